"""What is recorded of programs, and under which names; and that they compute what they compute without the probe."""
import tempfile

from bridge_driver import rows, the_results_are_the_same

# Of step 1: records that must be there, and words that no record may have.
EXPECTED = {
    ("bridge_gpt.py",): ([
        "state -: torch.rng", "data -: batch", "data -: batch micro 1", "forward GPT: input",
        "forward GPT: output.logits", "forward blocks.0: input.mask", "forward blocks.1.act: input",
        "forward blocks.0.attn: output.0", "forward blocks.1.fc1: weight", "forward loss: loss micro 1",
        "backward blocks.1.act: grad_output", "backward blocks.1.act: grad_input",
        "backward blocks.1.fc1: grad_output", "backward blocks.0.ln1: grad_input", "backward tok: weight.grad",
        "backward tok: weight.grad micro 1", "optimizer -: grad_norm micro 1",
        "optimizer -: group1.weight_decay micro 1", "optimizer blocks.0.fc1: weight.grad micro 1",
        "optimizer blocks.0.fc1: weight micro 1", "optimizer blocks.0.fc1: weight.exp_avg micro 1",
        "optimizer GPT: mask micro 1",
    ], ["eval", "python.rng"]),
    ("bridge_gan.py",): ([
        "forward Critic: input eval", "forward fc1: weight eval", "forward fc1: output eval", "forward Critic#2.fc1: output",
        "forward Maker.net.0: input", "forward Maker.net.1: running_mean", "backward BCEWithLogitsLoss: grad_input.0",
        "optimizer Maker.net.1: running_mean micro 1", "optimizer -: SGD#2.lr micro 1",
    ], []),
    ("bridge_checkpoint.py", "reentrant"): ([
        "forward blocks.1.drop: output", "forward blocks.1.drop: output #1 recompute",
        "backward blocks.1.drop: grad_input", "backward blocks.1.fc1: weight.grad",
    ], ["eval", "micro"]),
    ("bridge_checkpoint.py", "nonreentrant"): ([
        "forward blocks.1.drop: output", "forward blocks.1.drop: output #1 recompute",
        "backward blocks.1.drop: grad_input", "backward blocks.1.fc1: weight.grad",
    ], ["eval", "micro"]),
    ("bridge_cases.py", "nested"): ([
        "forward inner: input.x", "forward inner: input.scale", "forward inner: output.hidden",
        "forward inner: output.both.left", "forward inner: output.both.right.1.deep",
        "forward Outer: output.extra.0", "backward Outer: grad_output.logits",
    ], []),
    ("bridge_cases.py", "views_and_in_place"): ([
        "backward fc: grad_output", "forward shift: input",
    ], []),
    ("bridge_cases.py", "shared_and_stray"): ([
        "forward fc: output #1", "forward Linear: input", "forward Linear#2: input",
    ], []),
    ("bridge_cases.py", "own_function"): ([
        "backward two: grad_output.0", "backward two: grad_input.0",
    ], []),
    ("bridge_cases.py", "frozen_and_unused"): ([
        "optimizer frozen: weight", "optimizer norm: running_var", "forward unused: output",
    ], ["frozen: weight.grad", "unused: grad"]),
    ("bridge_cases.py", "scaler"): ([
        "optimizer -: skipped", "optimizer -: scale", "optimizer 0: weight.grad",
    ], ["micro"]),
    ("bridge_cases.py", "lbfgs"): ([
        "forward loss: loss micro 2", "optimizer 0: weight micro 3",
    ], []),
    ("bridge_cases.py", "compiled"): ([
        "forward Net: input", "forward Net: output", "backward Net: grad_output",
    ], ["forward 0", "#1"]),
    ("bridge_cases.py", "no_module"): ([
        "optimizer -: group0.param0", "forward loss: loss",
    ], []),
}


def missing_and_unwanted(folder, expected, unwanted):
    found = rows(folder)
    missing = [name for name in expected if name not in found]
    wrong = [name for name in found for word in unwanted if word in name]
    return missing, wrong, found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for i, (program, (expected, unwanted)) in enumerate(EXPECTED.items()):
            the_results_are_the_same(f"{folder}/{i}", *program)
            missing, wrong, found = missing_and_unwanted(f"{folder}/{i}", expected, unwanted)
            listing = "\n".join(found)
            assert not missing and not wrong, f"{program}: missing {missing}, unwanted {wrong}, found:\n{listing}"
            if program[1:] == ("scaler",):
                assert [found["optimizer -: skipped"]["value"]] == [1.0], "step 1 overflowed: expected it to be skipped"
        the_results_are_the_same(f"{folder}/step", "bridge_gpt.py", level="step")
        found = rows(f"{folder}/step")
        layered = [name for name, row in found.items() if row["role"] in ("input", "output")]
        assert not layered and "optimizer tok: weight micro 1" in found, f"level step: found {layered}"
    print(len(EXPECTED), "programs are recorded as expected, and give the same results")
