"""What no gradient tells of is looked at too, or said not to be: sparse gradients, what optimizers keep beside tensors, and
what rests while others are trained."""
import shutil
import tempfile

from bridge_driver import diff, place, record

# Of what bridge_optimizer.py can change: what it is called in the run.
KEPT = {"mode": "mode", "seed": "seed", "array": "weight.array", "shared": "state.shared.count",
        "scalar": "weight.kinds.scalar"}


def expect(found, expected):
    assert found == expected, f"found {found}, expected {expected}"


def against_its_copy(folder, name, program, *arguments, level):
    """The verdict on two runs that hold the same."""
    record(f"{folder}/{name}", program, *arguments, level=level)
    shutil.copytree(f"{folder}/{name}", f"{folder}/{name}.same")
    return diff(f"{folder}/{name}", f"{folder}/{name}.same")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Nobody has looked at these gradients, alike as the rest is.
        verdict = against_its_copy(folder, "sparse", "bridge_sparse.py", level="layer")
        expect(verdict["verdict"], "incomparable")
        assert any("could not be read: Tensor torch.sparse_coo" in gap for gap in verdict["gaps"]), verdict["gaps"]

        # What an optimizer keeps beside tensors and numbers is looked at too, or said not to be.
        for name in "kept", "kept.same":
            record(f"{folder}/{name}", "bridge_optimizer.py", level="step")
        expect(place(diff(f"{folder}/kept", f"{folder}/kept.same"))[0], "identical")
        record(f"{folder}/kept.changed", "bridge_optimizer.py", *KEPT, level="step")
        for step, tensor in enumerate(KEPT.values(), 2):
            found = place(diff(f"{folder}/kept", f"{folder}/kept.changed", "--steps", step))
            expect((found[0], found[1], found[4]), ("diverged", step, tensor))
        expect(diff(f"{folder}/kept", f"{folder}/kept.changed", "--steps", "7")["verdict"], "identical")
        verdict = against_its_copy(folder, "unreadable", "bridge_optimizer.py", "unreadable", level="step")
        expect(verdict["verdict"], "incomparable")

        # Parameters of an optimizer that does not step are looked at in each step all the same.
        for name, *change in ("rests",), ("rests.wrong", "wrong"):
            record(f"{folder}/{name}", "bridge_resting.py", *change, level="step")
        verdict = diff(f"{folder}/rests", f"{folder}/rests.wrong")
        found = place(verdict)
        expect((found[0], found[2], found[4]), ("diverged", "optimizer", "weight"))
        # It is no result of the other optimizer's step, whose gradients agree.
        assert "overwritten_input" in verdict["cause"]["class_candidates"], verdict["cause"]

        # So is an average of the weights, whether or not, and when, it is called: behind each step, and behind the last one too.
        for level in "step", "layer":
            record(f"{folder}/average.{level}", "bridge_average.py", level=level)
            record(f"{folder}/evaluated.{level}", "bridge_average.py", "--evaluate", level=level)
            expect(diff(f"{folder}/average.{level}", f"{folder}/evaluated.{level}")["verdict"], "identical")
            for at in 3, 5:
                record(f"{folder}/decay{at}.{level}", "bridge_average.py", "--evaluate", "--decay-at", at, level=level)
                found = place(diff(f"{folder}/average.{level}", f"{folder}/decay{at}.{level}"))
                expect((found[0], found[1], found[3]), ("diverged", min(at + 1, 5), "kept.Sequential#2.0"))

        # So are those, and the buffers, of a part that was called by itself before the whole was made.
        for name, *change in ("part",), ("part.wrong", "wrong"):
            record(f"{folder}/{name}", "bridge_part.py", *change, level="step")
        found = place(diff(f"{folder}/part", f"{folder}/part.wrong"))
        expect((found[0], found[1], found[4]), ("diverged", 2, "running_mean"))

        # NumPy's generator, which NumPy 2 imports when it is first used.
        for how in "torch-first", "numpy-first", "from":
            for seed in 1, 2:
                record(f"{folder}/numpy.{how}.{seed}", "numpy_seeds.py", seed, how, level="step")
            verdict = diff(f"{folder}/numpy.{how}.1", f"{folder}/numpy.{how}.2")
            expect((verdict["verdict"], verdict["first"]["tensor"]), ("diverged", "numpy.rng"))
            expect(verdict["cause"]["class"], "rng_state")
        verdict = against_its_copy(folder, "numpy.unseeded", "numpy_seeds.py", 0, "unseeded", level="step")
        expect(verdict["verdict"], "identical")
        assert any("NumPy's generator, which was not seen to be seeded" in text for text in verdict["coverage"]["limits"]), verdict
    print("what rests and what optimizers keep is looked at, or said not to be")
