"""A fault planted in a PyTorch program is named by `forkpoint diff`: its step, phase, layer and tensor. Of a GPT here; of what
optimizers and resting modules hold in bridge_state_verdicts_test.py."""
import tempfile

from bridge_driver import diff, place, record

FAULTS = {
    "bitflip@3": (3, "forward", "blocks.1.fc1", "weight"),
    "dropout@2": (2, "forward", "blocks.0.drop", "output"),
    "off@2": (2, "forward", "blocks.0.drop", "output"),
    "lr@2": (2, "optimizer", None, "group0.lr"),
    "order@3": (3, "data", None, "batch"),
    "grad@2": (2, "optimizer", "blocks.1.fc1", "weight.grad"),
}


def expect(found, expected):
    assert found == expected, f"found {found}, expected {expected}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        saved = f"{folder}/saved"
        record(f"{folder}/good", "bridge_gpt.py", "--save", saved, "--save-at", "3")
        record(f"{folder}/same", "bridge_gpt.py")
        expect(place(diff(f"{folder}/good", f"{folder}/same"))[0], "identical")
        for fault, where in FAULTS.items():
            record(f"{folder}/{fault}", "bridge_gpt.py", "--fault", fault)
            expect(place(diff(f"{folder}/good", f"{folder}/{fault}")), ("diverged", *where))
        assert diff(f"{folder}/good", f"{folder}/grad@2")["cause"]["class"] == "unknown", "who changed a gradient was not seen"
        assert diff(f"{folder}/good", f"{folder}/off@2")["cause"]["class"] == "structure", "a layer that was switched off"
        record(f"{folder}/foreach", "bridge_gpt.py", "--foreach")
        verdict = diff(f"{folder}/good", f"{folder}/foreach")
        assert verdict["verdict"] == "identical" and "foreach: (not set) in run A, True in run B" in str(verdict["notes"]), verdict
        record(f"{folder}/skip", "bridge_gpt.py", "--fault", "skip@2")
        verdict = diff(f"{folder}/good", f"{folder}/skip")
        expect((place(verdict)[:3], verdict["first"]["kind"], verdict["cause"]["class"]), (("diverged", 2, "optimizer"), "structure", "structure"))
        record(f"{folder}/coarse", "bridge_gpt.py", level="step")
        for pair in ("coarse", "good"), ("good", "coarse"):
            verdict = diff(*(f"{folder}/{run}" for run in pair))
            assert verdict["verdict"] == "identical" and verdict["records_compared"] > 300, verdict
        record(f"{folder}/init", "bridge_gpt.py", "--fault", "init@0")
        verdict = diff(f"{folder}/good", f"{folder}/init")
        expect(place(verdict)[2:4] + (verdict["cause"]["class"],), ("load", "tok", "initial_state"))

        # A run that goes on from a checkpoint counts on from the optimizer's state, and is the same from there on.
        record(f"{folder}/tail", "bridge_gpt.py", "--resume", saved)
        verdict = diff(f"{folder}/good", f"{folder}/tail")
        assert verdict["first"] is None and verdict["coverage"]["steps_compared"] == 2, f"resumed: found {place(verdict)}, {verdict}"
        record(f"{folder}/wrong", "bridge_gpt.py", "--resume", saved, "--fault", "bitflip@4")
        expect(place(diff(f"{folder}/tail", f"{folder}/wrong")), ("diverged", 4, "forward", "blocks.1.fc1", "weight"))

        for kind in "reentrant", "nonreentrant":
            record(f"{folder}/{kind}", "bridge_checkpoint.py", kind)
            record(f"{folder}/{kind}.wrong", "bridge_checkpoint.py", kind, "wrong-mask")
            found = place(diff(f"{folder}/{kind}", f"{folder}/{kind}.wrong"))
            expect(found, ("diverged", 0, "forward", "blocks.2.drop", "output"))
    print("every planted fault is named")
