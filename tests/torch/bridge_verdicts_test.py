"""A fault planted in a PyTorch program is named by `forkpoint diff`: its step, phase, layer and tensor."""
import tempfile

from bridge_driver import diff, place, record

FAULTS = {
    "bitflip@3": (3, "forward", "blocks.1.fc1", "weight"),
    "dropout@2": (2, "forward", "blocks.0.drop", "output"),
    "lr@2": (2, "optimizer", None, "group0.lr"),
    "order@3": (3, "data", None, "batch"),
}

# Of what bridge_optimizer.py can change: what it is called in the run.
KEPT = {"mode": "mode", "seed": "seed", "array": "weight.array", "shared": "state.shared.count",
        "scalar": "weight.kinds.scalar"}


def expect(found, expected):
    assert found == expected, f"found {found}, expected {expected}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(f"{folder}/good", "bridge_gpt.py")
        record(f"{folder}/same", "bridge_gpt.py")
        expect(place(diff(f"{folder}/good", f"{folder}/same"))[0], "identical")
        for fault, where in FAULTS.items():
            record(f"{folder}/{fault}", "bridge_gpt.py", "--fault", fault)
            expect(place(diff(f"{folder}/good", f"{folder}/{fault}")), ("diverged", *where))
        record(f"{folder}/init", "bridge_gpt.py", "--fault", "init@0")
        verdict = diff(f"{folder}/good", f"{folder}/init")
        expect(place(verdict)[2:4] + (verdict["cause"]["class"],), ("load", "tok", "initial_state"))

        # Nobody has looked at these gradients, alike as the rest is.
        for name in "sparse", "sparse.same":
            record(f"{folder}/{name}", "bridge_sparse.py")
        verdict = diff(f"{folder}/sparse", f"{folder}/sparse.same")
        expect(verdict["verdict"], "incomparable")
        assert any("could not be read: Tensor torch.sparse_coo" in gap for gap in verdict["gaps"]), verdict["gaps"]

        # What an optimizer keeps beside tensors and numbers is looked at too, or said not to be.
        record(f"{folder}/kept", "bridge_optimizer.py", level="step")
        record(f"{folder}/kept.same", "bridge_optimizer.py", level="step")
        expect(place(diff(f"{folder}/kept", f"{folder}/kept.same"))[0], "identical")
        for what, tensor in KEPT.items():
            record(f"{folder}/kept.{what}", "bridge_optimizer.py", what, level="step")
            found = place(diff(f"{folder}/kept", f"{folder}/kept.{what}"))
            expect((found[0], found[1], found[4]), ("diverged", 2, tensor))
        for name in "unreadable", "unreadable.same":
            record(f"{folder}/{name}", "bridge_optimizer.py", "unreadable", level="step")
        expect(diff(f"{folder}/unreadable", f"{folder}/unreadable.same")["verdict"], "incomparable")

        # Parameters of an optimizer that does not step are looked at in each step all the same.
        for name, *change in ("rests",), ("rests.wrong", "wrong"):
            record(f"{folder}/{name}", "bridge_resting.py", *change, level="step")
        found = place(diff(f"{folder}/rests", f"{folder}/rests.wrong"))
        expect((found[0], found[2], found[4]), ("diverged", "optimizer", "weight"))

        # So are those, and the buffers, of a part that was called by itself before the whole was made.
        for name, *change in ("part",), ("part.wrong", "wrong"):
            record(f"{folder}/{name}", "bridge_part.py", *change, level="step")
        found = place(diff(f"{folder}/part", f"{folder}/part.wrong"))
        expect((found[0], found[1], found[4]), ("diverged", 2, "running_mean"))

        # A run that goes on from a checkpoint counts on from the optimizer's state, and is the same from there on.
        record(f"{folder}/head", "bridge_gpt.py", "--steps", "3", "--save", f"{folder}/saved")
        record(f"{folder}/tail", "bridge_gpt.py", "--resume", f"{folder}/saved")
        verdict = diff(f"{folder}/good", f"{folder}/tail")
        assert verdict["first"] is None, f"resumed: found {place(verdict)}, expected no divergence"
        record(f"{folder}/wrong", "bridge_gpt.py", "--resume", f"{folder}/saved", "--fault", "bitflip@4")
        expect(place(diff(f"{folder}/tail", f"{folder}/wrong")), ("diverged", 4, "forward", "blocks.1.fc1", "weight"))

        for kind in "reentrant", "nonreentrant":
            record(f"{folder}/{kind}", "bridge_checkpoint.py", kind)
            record(f"{folder}/{kind}.wrong", "bridge_checkpoint.py", kind, "wrong-mask")
            found = place(diff(f"{folder}/{kind}", f"{folder}/{kind}.wrong"))
            expect(found, ("diverged", 0, "forward", "blocks.2.drop", "output"))
    print("every planted fault is named")
