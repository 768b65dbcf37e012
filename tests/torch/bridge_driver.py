"""Runs the programs of the bridge's tests, alone and recorded, and reads what was recorded with `forkpoint show`."""
import collections
import json
import os
import pathlib
import subprocess
import sys

BUILD = pathlib.Path(os.environ["FORKPOINT_BUILD"])
PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
FORKPOINT = BUILD / "forkpoint"

Done = collections.namedtuple("Done", "status stdout stderr")


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FORKPOINT_") and k != "LD_PRELOAD"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", **more}


def run(command, **more):
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(**more))
    return Done(done.returncode, done.stdout, done.stderr)


def alone(program, *arguments):
    done = run([sys.executable, PROGRAMS / program, *arguments])
    assert done.status == 0, f"{program} {arguments} fails by itself: {done.stderr[-2000:]}"
    return done


def record(folder, program, *arguments, level="layer", options=()):
    """What the program printed; the run is in `folder`. Complaints of the bridge are failures."""
    command = [sys.executable, PROGRAMS / program, *arguments]
    done = run([FORKPOINT, "record", "--level", level, *options, "-o", folder, "--", *command])
    assert done.status == 0, f"recorded {program} {arguments}: status {done.status}: {done.stderr[-2000:]}"
    assert "torch bridge" not in done.stderr, f"recorded {program} {arguments}: {done.stderr[-2000:]}"
    return done


def diff(a, b):
    done = run([FORKPOINT, "diff", a, b, "--json"])
    assert done.status in (0, 1, 2), f"diff: status {done.status}: {done.stderr[-1000:]}"
    return json.loads(done.stdout)


def rows(folder, step=1):
    """{name: record} of a step; a name is "phase layer: tensor", then micro-step, call and flags that are not 0."""
    shown = json.loads(run([FORKPOINT, "show", folder, "--steps", step, "--json"]).stdout)
    out = {}
    for r in shown["records"]:
        marks = [f"micro {r['micro_step']}"] * (r["micro_step"] > 0) + [f"#{r['call']}"] * (r["call"] > 0)
        marks += [flag for flag in ("eval", "recompute") if r[flag]]
        out[" ".join([f"{r['phase']} {r['layer'] or '-'}: {r['tensor']}", *marks])] = r
    return out


def place(verdict):
    first = verdict["first"] or {}
    return verdict["verdict"], first.get("step"), first.get("phase"), first.get("layer"), first.get("tensor")
