"""Runs the programs of the bridge's tests, alone and recorded, and reads what was recorded with `forkpoint show`."""
import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import quick

BUILD = pathlib.Path(os.environ["FORKPOINT_BUILD"])
PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
FORKPOINT = BUILD / "forkpoint"

Done = collections.namedtuple("Done", "status stdout stderr")


def wait_for(look, what, seconds=240):
    """What look() gives, once that is something."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
    return seen


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FORKPOINT_") and k != "LD_PRELOAD"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", **more}


def run(command, **more):
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(**more))
    return Done(done.returncode, done.stdout, done.stderr)


def command_of(program, *arguments):
    return [sys.executable, quick.__file__, PROGRAMS / program, *arguments]


def be(program, arguments, out, err):
    """Makes this process, a child that was forked for it, the one of the program; ends it."""
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.alarm(280)
        os.environ.clear()
        os.environ.update(environment())
        quick.run(str(PROGRAMS / program), arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of what the test has yet to do at its end


def in_a_child(program, *arguments):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            be(program, arguments, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Done(status, *(os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err)))


def alone(program, *arguments):
    """What the program does without the probe. It runs in a child of this process, so that torch is imported once for all;
    not where importing it may have woken the CUDA driver, which no child can use then."""
    if os.path.exists("/proc/driver/nvidia/version"):
        done = run([sys.executable, PROGRAMS / program, *arguments])
    else:
        quick.import_torch()
        done = in_a_child(program, *map(str, arguments))
    assert done.status == 0, f"{program} {arguments} fails by itself: status {done.status}: {done.stderr[-2000:]}"
    return done


def record(folder, program, *arguments, level="layer", options=(), command=None):
    """What the program printed; the run is in `folder`. Complaints of the bridge are failures."""
    command = command or command_of(program, *arguments)
    done = run([FORKPOINT, "record", "--level", level, *options, "-o", folder, "--", *command])
    assert done.status == 0, f"recorded {program} {arguments}: status {done.status}: {done.stderr[-2000:]}"
    for word in "torch bridge", "<forkpoint>", "Exception ignored":
        assert word not in done.stderr, f"recorded {program} {arguments}: {done.stderr[-2000:]}"
    return done


def the_results_are_the_same(folder, program, *arguments, level="layer", options=()):
    """With the probe and without it, bit by bit; and no step has lost a record. The run is in `folder`."""
    found, expected = record(folder, program, *arguments, level=level, options=options), alone(program, *arguments)
    assert found.stdout == expected.stdout, (
        f"{program} {arguments} at level {level}: found\n{found.stdout}expected\n{expected.stdout}")
    shown = run([FORKPOINT, "show", folder]).stdout
    assert "incomplete" not in shown and "Gap" not in shown, f"{program} {arguments}: expected whole steps:\n{shown}"


def diff(a, b, *options):
    done = run([FORKPOINT, "diff", a, b, "--json", *options])
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
