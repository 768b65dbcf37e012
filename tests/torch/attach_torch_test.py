"""A PyTorch job that runs with the probe asleep is attached, layer by layer, and learns what it learns by itself."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from bridge_driver import BUILD, FORKPOINT, PROGRAMS, alone, diff, environment, record, rows, run, wait_for

STEPS, PAUSE = "2000", "0.005"
PROBE = str(BUILD / "libforkpoint.so")


def attach(folder, name, sockets, *options):
    done = run([FORKPOINT, "attach", "--all", "-o", folder / name, *options], FORKPOINT_SOCKETS=sockets)
    assert done.status == 0, f"attach: status {done.status}: {done.stderr}"
    said = re.search(r"recording steps (\d+) to (\d+)", done.stderr)
    return int(said[1]), int(said[2])


def main():
    expected = alone("attach_loop.py", STEPS, 0).stdout
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        sockets = str(folder / "sockets")
        job = subprocess.Popen([sys.executable, str(PROGRAMS / "attach_loop.py"), STEPS, PAUSE], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment(LD_PRELOAD=PROBE, FORKPOINT_SOCKETS=sockets))
        try:
            ps = lambda: json.loads(run([FORKPOINT, "ps", "--json"], FORKPOINT_SOCKETS=sockets).stdout)
            assert wait_for(ps, "the job in the list")[0]["pid"] == job.pid
            time.sleep(3)  # well into the loop
            windows = [attach(folder, f"run{i}", sockets, "--steps", 3, "--level", level) for i, level in enumerate(("layer", "step", "layer"))]
            assert all(a[1] < b[0] for a, b in zip(windows, windows[1:])), windows
            assert all(last - first == 2 for first, last in windows), windows
            out, err = job.communicate(timeout=200)
        finally:
            job.kill()
        assert (job.returncode, out, err) == (0, expected, ""), f"an attached job does what it does by itself: {job.returncode} {out} {err}"
        recorded = rows(folder / "run0", windows[0][0])
        for name in ("forward 0: input", "forward 2: output", "backward 0: weight.grad", "optimizer 2: weight"):
            assert name in recorded, f"{name} is not among {sorted(recorded)}"
        assert not any(name.startswith("forward 0: output") for name in rows(folder / "run1", windows[1][0])), "level step records no outputs"
        # The numbers of the steps and all values are those of a job that was recorded from its start.
        first, last = windows[2]
        record(folder / "whole", "attach_loop.py", last + 1, 0, options=("--steps", f"{first}:{last}"))
        verdict = diff(folder / "whole", folder / "run2")
        # What the job started from is in the recording only; nobody saw it of the attached one, and the verdict says so.
        assert verdict["first"] is None and not verdict["gaps"] and "the 3 common steps are equal" in verdict["reason"], verdict
        assert verdict["records_compared"] > 3 * 20, verdict
    print("a sleeping PyTorch job was attached three times")


main()
