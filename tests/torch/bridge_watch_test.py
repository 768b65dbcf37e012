"""`forkpoint record --watch` on PyTorch: what becomes non-finite is said in time, what is meant to be is not, and the layers
of the steps after a finding are recorded where that was asked for."""
import re
import tempfile

from bridge_driver import FORKPOINT, alone, command_of, rows, run


def watch(folder, *arguments, options=("--watch", "nan")):
    return run([FORKPOINT, "record", *options, "-o", folder, "--", *command_of("bridge_watch.py", *arguments)])


def layers_in(folder, step):
    return any(name.startswith("forward fc1: output") for name in rows(folder, step))


def check(condition, done, what):
    assert condition, f"{what}: status {done.status}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Said within the step or the next: before the one after that begins.
        done = watch(f"{folder}/nan", "nan", "--pause", "0.5")
        check(done.status == 0, done, "a finding that is only said changes no status")
        said = done.stderr.find("warning: step 3, rank 0, forward, loss: loss: 1 of 1 element is not finite")
        check(said >= 0, done, "a NaN of the model is named")
        check(said < done.stderr.find("step 5 begins"), done, "it is named within a step")
        check(done.stderr.count("not finite\n") == 1, done, "it is named once")
        check(done.stdout == alone("bridge_watch.py", "nan").stdout, done, "the program computes the same")

        stop = ("--watch", "nan", "--on-trigger", "stop")
        done = watch(f"{folder}/stop", "nan", "--pause", "0.5", "--steps", "200", options=stop)
        check(done.status == 124, done, "stop")
        check("step 20 begins" not in done.stderr, done, "the job ends soon")

        done = watch(f"{folder}/scaler", "scaler", options=stop)
        check(done.status == 0 and "warning" not in done.stderr, done, "steps that a GradScaler skips are no finding")
        check("2 steps with gradients that are not finite, skipped" in done.stderr, done, "they are counted")
        done = watch(f"{folder}/mask", "mask", options=stop)
        check(done.status == 0 and "warning" not in done.stderr, done, "a mask is no finding")

        deepen = ("--watch", "nan", "--on-trigger", "deepen", "--deepen-steps", "2")
        done = watch(f"{folder}/deep", "nan", "--pause", "0.2", "--steps", "20", options=deepen)
        found = re.search(r"steps (\d+) to (\d+) are recorded by layer", done.stderr)
        check(found is not None, done, "deepen says which steps")
        first, last = int(found[1]), int(found[2])
        deep = [step for step in range(20) if layers_in(f"{folder}/deep", step)]
        assert deep == [first, last], f"steps {deep} hold layers, said were {first} to {last}"
        names = rows(f"{folder}/deep", first)
        assert any(name.startswith("backward fc1: grad_") for name in names), sorted(names)
        check(done.stdout == alone("bridge_watch.py", "nan", "--steps", "20").stdout, done, "the program computes the same")
    print("every finding is said, and nothing else")
