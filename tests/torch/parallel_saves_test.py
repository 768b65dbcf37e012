"""A job that saves and one that resumes are the same training as one that does neither, though they import what saves and loads
when their optimizer is long there, and make its states by a step of their own."""
import sys
import tempfile

from bridge_driver import FORKPOINT, PROGRAMS, diff, run
from parallel_driver import expect, printed


def record(folder, *words):
    command = [sys.executable, PROGRAMS / "ranks.py", 2, "dcp_job.py", *words]
    done = run([FORKPOINT, "record", "--level", "layer", "-o", folder, "--", *command])
    assert done.status == 0 and "torch bridge" not in done.stderr, f"{words}: status {done.status}: {done.stderr[-2000:]}"
    return printed(done)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        saved = f"{folder}/saved"
        straight = record(f"{folder}/straight", "straight")
        expect(record(f"{folder}/saving", "saving", saved), straight, "what the job that saves printed")
        verdict = diff(f"{folder}/straight", f"{folder}/saving")
        expect((verdict["verdict"], verdict["gaps"]), ("identical", []), f"with saving, without it ({verdict['reason']})")
        expect(record(f"{folder}/resumed", "resumed", saved), [line for line in straight if line[5] >= "2"], "what the resumed job printed")
        verdict = diff(f"{folder}/straight", f"{folder}/resumed")
        expect((verdict["first"], verdict["coverage"]["steps_compared"]), (None, 2), f"resumed, against straight ({verdict['reason']})")
    print("saving and resuming are no part of a step")
