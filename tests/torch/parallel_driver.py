"""Runs gloo_job.py as a job of several ranks, recorded or alone, for the tests of parallel training."""
import json
import sys

from bridge_driver import FORKPOINT, PROGRAMS, diff, run  # noqa: F401 (for the tests)


def job(world, kind, *words):
    return [sys.executable, PROGRAMS / "ranks.py", world, "gloo_job.py", kind, *words]


def record(folder, world, kind, *words, level="layer", ends_well=True):
    """How it ended; the run is in `folder`. Complaints of the bridge are failures."""
    done = run([FORKPOINT, "record", "--level", level, "-o", folder, "--", *job(world, kind, *words)])
    assert (done.status == 0) == ends_well, f"{kind} {words}: status {done.status}: {done.stderr[-2000:]}"
    assert "torch bridge" not in done.stderr, f"{kind} {words}: {done.stderr[-2000:]}"
    return done


def printed(done):
    return sorted(line for line in done.stdout.splitlines() if line.startswith("step "))


def show(folder, *options):
    return json.loads(run([FORKPOINT, "show", folder, *options, "--json"]).stdout)


def collectives(folder, step=1):
    """{(rank, op, communicator): its tensors, sorted} of a step."""
    found = {}
    for row in show(folder, "--steps", step, "--records")["records"]:
        if row["kind"] == "collective":
            found.setdefault((row["rank"], row["op"], row["communicator"]), []).append(row["tensor"])
    return {key: sorted(tensors) for key, tensors in found.items()}


def replicas(folder):
    return json.loads(run([FORKPOINT, "diff", "--replicas", folder, "--json"]).stdout)


def place(verdict):
    first = verdict["first"] or {}
    names = "step", "rank", "phase", "layer", "op", "tensor"
    return verdict["verdict"], *(first.get(name) for name in names)


def expect(found, expected, what):
    assert found == expected, f"{what}: found {found}, expected {expected}"
