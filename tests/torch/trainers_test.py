"""Jobs in which somebody else's trainer runs the loop: trainers_test.py transformers|lightning. Unedited, two equal runs
are identical, results are what they are without the probe, and a fault is named by its layer."""
import importlib.util
import sys
import tempfile

from bridge_driver import PROGRAMS, alone, diff, place, record, rows

# Program, records of step 1 that must be there, faults, and where they must be found.
TRAINERS = {
    "transformers": ("hf_trainer.py", [
        "forward model.layers.0.self_attn.q_proj: input", "forward lm_head: output micro 1",
        "backward model.layers.1.mlp: grad_output", "optimizer model.layers.0.mlp.up_proj: weight micro 1",
        "forward loss: loss micro 1",
    ], {"model.layers.1.mlp@2": (2, "forward", "model.layers.1.mlp"), "lm_head@1": (1, "forward", "lm_head")}),
    "lightning": ("lightning_job.py", [
        "forward {net}0: input", "forward {net}2: output", "backward {net}1: grad_input",
        "optimizer {net}0: weight.exp_avg", "forward loss: loss",
    ], {"net.2@2": (2, "forward", "{net}2"), "net.0@1": (1, "forward", "{net}0")}),
}


def steps(done):
    """What the program says of its weights; Trainer also prints how long it took."""
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def main(package):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {package} is not installed")
        sys.exit(77)
    program, expected, faults = TRAINERS[package]
    with tempfile.TemporaryDirectory() as folder:
        # Started by itself here, and by quick.py below: what is recorded is the same.
        unedited = [sys.executable, PROGRAMS / program]
        found, expected_steps = steps(record(f"{folder}/good", program, command=unedited)), steps(alone(program))
        assert found and found == expected_steps, f"the probe changes what the job computes: {found}, {expected_steps}"
        found = rows(f"{folder}/good")
        first = (n.split()[1][:-1] for n in found if n.endswith("0: input") and n.startswith("forward"))
        net = next(first, "net.0")[:-1]
        missing = [name for name in (e.format(net=net) for e in expected) if name not in found]
        assert not missing, f"missing {missing}; found:\n" + "\n".join(found)
        record(f"{folder}/same", program)
        verdict = diff(f"{folder}/good", f"{folder}/same")
        assert verdict["verdict"] == "identical", (place(verdict), verdict["reason"], verdict["gaps"])
        for fault, where in faults.items():
            record(f"{folder}/{fault}", program, "--fault", fault)
            verdict = diff(f"{folder}/good", f"{folder}/{fault}")
            wanted = ("diverged", where[0], where[1], where[2].format(net=net))
            assert place(verdict)[:4] == wanted, f"{fault}: found {place(verdict)}, expected {wanted}"
    print(f"{package}: recorded unedited, and the faults are named")


if __name__ == "__main__":
    main(sys.argv[1])
