"""Steps of a running PyTorch job that was attached are replayed from its checkpoint, and are the same."""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from bridge_driver import BUILD, FORKPOINT, PROGRAMS, environment, run, wait_for

PROGRAM = PROGRAMS / "replayed.py"


def attached(folder, *words, late=False, wait=2):
    """Records steps 23 to 26 of a running job, whose checkpoint of step 20 is there then. late: it is well into its steps
    before it is attached; else that is after `wait` seconds: in less than 2 it still imports what it needs."""
    out = pathlib.Path(folder, "ckpts")
    out.mkdir(parents=True)
    sockets = str(pathlib.Path(folder, "sockets"))
    command = [sys.executable, PROGRAM, "--out", out, "--every", "20", "--pace", "0.25", *words]
    with open(f"{folder}/job.log", "w") as log:
        job = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.PIPE, text=True,
                               env=environment(LD_PRELOAD=str(BUILD / "libforkpoint.so"), FORKPOINT_SOCKETS=sockets))
    try:
        wait_for(lambda: json.loads(run([FORKPOINT, "ps", "--json"], FORKPOINT_SOCKETS=sockets).stdout), "the job in the list")
        if late:
            wait_for(lambda: "step 8 " in pathlib.Path(folder, "job.log").read_text(), "step 8 of the job")
        else:
            time.sleep(wait)
        done = run([FORKPOINT, "attach", "--all", "--from", 23, "--to", 26, "--level", "layer", "-o", f"{folder}/live"],
                   FORKPOINT_SOCKETS=sockets)
        assert done.status == 0, f"attach {words}: status {done.status}: {done.stderr}"
    finally:
        job.kill()
        job.communicate()


def replayed(folder, name, *words):
    done = run([FORKPOINT, "replay", "--checkpoint", f"{folder}/ckpts", "--checkpoint-pattern", "ckpt_{step}.pt", "--steps", "23:26",
                "--level", "layer", "--against", f"{folder}/live", "--json", "-o", f"{folder}/{name}", "--",
                sys.executable, PROGRAM, "--from", "{checkpoint}", *words])
    assert done.stdout, f"no verdict: status {done.status}: {done.stderr[-1500:]}"
    return json.loads(done.stdout)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        attached(f"{folder}/plain")
        verdict = replayed(f"{folder}/plain", "again")
        assert verdict["verdict"] == "identical" and verdict["coverage"]["steps_compared"] == 4, verdict
        verdict = replayed(f"{folder}/plain", "fault", "--fault", "25")
        assert (verdict["verdict"], verdict["first"]["step"], verdict["first"]["tensor"]) == ("diverged", 25, "weight"), verdict

        # Generators that were seeded before anybody looked; an average that rests, which the attached run does not see.
        attached(f"{folder}/more", "--more", late=True)
        verdict = replayed(f"{folder}/more", "again", "--more")
        assert verdict["verdict"] == "incomparable" and "the 4 common steps are equal" in verdict["reason"], verdict
        assert "the other recorded more" in verdict["reason"], verdict
        attached(f"{folder}/early", "--more", wait=0.5)
        verdict = replayed(f"{folder}/early", "again", "--more")
        assert verdict["first"] is None and verdict["coverage"]["steps_compared"] == 4, verdict
        assert verdict["verdict"] == "identical" or "the other recorded more" in verdict["reason"], verdict
        verdict = replayed(f"{folder}/early", "lost", "--more", "--lose", "numpy")
        assert (verdict["verdict"], verdict["first"]["step"], verdict["first"]["tensor"]) == ("diverged", 23, "numpy.rng"), verdict
    print("steps of a running job were replayed: the same, or not, or not all of them seen")
