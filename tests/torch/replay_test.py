"""`forkpoint replay` and `forkpoint resume` on a PyTorch script that nobody edited, told by placeholders where its checkpoints are."""
import json
import pathlib
import sys
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, place, record, run

PROGRAM = "replayed.py"
PATTERN = ("--checkpoint-pattern", "ckpt_{step}.pt")


def verdict_of(done):
    assert done.status in (0, 1, 2), f"status {done.status}: {done.stderr[-1500:]}"
    assert done.stdout, f"no verdict: {done.stderr[-1500:]}"
    return json.loads(done.stdout)


def replay(folder, name, steps, *arguments, against="run"):
    command = [FORKPOINT, "replay", "--checkpoint", f"{folder}/ckpts", *PATTERN, "--steps", steps, "--against", f"{folder}/{against}"]
    command += ["--json", "-o", f"{folder}/{name}", "--", sys.executable, PROGRAMS / PROGRAM, "--from", "{checkpoint}", *arguments]
    return run(command)


def resume(folder, name, *arguments):
    command = [FORKPOINT, "resume", "--checkpoint-at", 4, "--steps", 8, *PATTERN, "--json", "-o", f"{folder}/{name}"]
    more = [word for word in arguments if word == "--more"]
    command += ["--level", "layer", "--save-args", "--out {checkpoint_dir} --every {step}"]
    command += ["--resume-args", " ".join(["--from {checkpoint}", *(word for word in arguments if word not in more)])]
    return run(command + ["--", sys.executable, PROGRAMS / PROGRAM, *more])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "ckpts")
        out.mkdir()
        for name, more in ("run", ()), ("faulty", ("--fault", "7")):
            record(f"{folder}/{name}", PROGRAM, "--out", out, "--every", "5", *more, options=("--steps", ":20"))
        files = sorted(path.name for path in out.iterdir())
        kept = {path.name: path.read_bytes() for path in out.iterdir()}

        done = replay(folder, "again", "7:9", "--out", out, "--every", "1")
        verdict = verdict_of(done)
        # The faulty run was the last to save: the checkpoint of step 5 is older than its fault.
        assert (done.status, verdict["verdict"]) == (0, "identical"), f"found {done.status} {verdict['reason']}: {done.stderr}"
        assert sorted(path.name for path in out.iterdir()) == files and all((out / n).read_bytes() == b for n, b in kept.items())
        done = replay(folder, "fork", "7:9", against="faulty")
        assert place(verdict_of(done)) == ("diverged", 7, "forward", "3", "weight"), place(verdict_of(done))

        clean = verdict_of(resume(folder, "clean"))
        assert clean["verdict"] == "identical", clean["reason"]
        for lost, state in ("momentum", "momentum"), ("rng", "random-number generator"), ("lr", "schedule (learning rate)"):
            verdict = verdict_of(resume(folder, lost, "--lose", lost))
            states = verdict["resume"]["state"]
            assert verdict["verdict"] == "diverged" and [s for s in states if s.startswith(state)], (lost, states, place(verdict))

        clean = verdict_of(resume(folder, "more", "--more"))
        assert clean["verdict"] == "identical", clean["reason"]
        for lost, state, at in (("statistics", "buffers (running_mean of 4)", (4, "load", "4", "running_mean")),
                                ("scale", "loss scale (scale)", (4, "optimizer", None, "scale")),
                                ("average", "weights that no step trains (weight of kept.", (4, "optimizer", "kept.Sequential#2.0", "weight")),
                                ("numpy", "random-number generator (numpy.rng)", (4, "state", None, "numpy.rng"))):
            verdict = verdict_of(resume(folder, lost, "--more", "--lose", lost))
            states = verdict["resume"]["state"]
            assert [s for s in states if s.startswith(state)], (lost, states, place(verdict))
            assert place(verdict) == ("diverged", *at), (lost, place(verdict))
            assert verdict["cause"]["class"] == "state_restore", (lost, verdict["cause"])
    print("windows are replayed, and what a resume loses is named")
