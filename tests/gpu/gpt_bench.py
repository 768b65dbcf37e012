"""What the benches of the recording of a GPT share: its program in several arms, in turns, and the table of results."""

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import traceback

PROGRAM = pathlib.Path(__file__).resolve().parent / "launch_gpt.py"
BLOCKS = 5
TIMEOUT_S = 300
table = []
LAUNCH = ("--level", "launch", "--step-on", "^step$")
# Options of `forkpoint record` of the arms that are recorded. bare: launches without the bridge into PyTorch. idle: all hooks are there, and no step is wanted.
RECORDED = {
    "recorded": LAUNCH,
    "kept": (*LAUNCH, "--keep-allocators"),
    "bare": LAUNCH,
    "step": ("--level", "step"),
    "layer": ("--level", "layer"),
    "idle": ("--level", "layer", "--steps", "1000000:"),
}


def report(name, value, goal, at_most=True):
    """One line of the table. goal None: there is none."""
    verdict = "-" if goal is None else "ok" if (value <= goal) == at_most else "MISS"
    table.append(f"bench {name} {value:.3f} {'-' if goal is None else goal} {verdict}")


def environment(changes=None):
    unwanted = ("FORKPOINT_", "LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)} | (changes or {})


def run(command, changes=None):
    """The JSON that the command prints last."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(changes), timeout=TIMEOUT_S)
    if done.returncode != 0:
        output = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        sys.exit(f"{' '.join(words)} exited with status {done.returncode}:\n{output}")
    return json.loads(done.stdout.splitlines()[-1])


class Bench:
    def __init__(self, build, folder, model=()):
        self.model = model   # options of the program
        self.forkpoint, self.probe, self.folder = build / "forkpoint", build / "libforkpoint.so", folder
        self.changes = None  # of the environment of recordings

    def program(self, arm, mode, *arguments, every=1):
        """One run of launch_gpt.py; a recording, of each `every`-th step, is left in the folder MODE-ARM."""
        command = [sys.executable, PROGRAM, mode, *arguments, *self.model]
        if arm == "dormant":
            return run(command, {"LD_PRELOAD": str(self.probe)})
        if arm == "pool":
            return run(command, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
        if arm in RECORDED:
            recording = self.folder / f"{mode}-{arm}"
            shutil.rmtree(recording, ignore_errors=True)
            command = [self.forkpoint, "record", *RECORDED[arm], "--every", every, "-o", recording, "--", *command]
            return run(command, (self.changes or {}) | ({"FORKPOINT_TORCH": "0"} if arm == "bare" else {}))
        return run(command)

    def in_turns(self, mode, arms, rounds):
        """What each arm printed of BLOCKS blocks of steps, round by round."""
        results = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm in arms:
                results[arm].append(self.program(arm, mode, BLOCKS))
        return results


def block_ms(results):
    """Median over the blocks of all rounds."""
    return statistics.median(value for result in results for value in result["block_ms"])


def best_ms(results):
    """The quietest process: what a difference of a thousandth needs."""
    return min(statistics.median(result["block_ms"]) for result in results)


def spread(results):
    values = [value for result in results for value in result["block_ms"]]
    return f"{min(values):.2f} to {max(values):.2f}"


def trouble_of(measure):
    """What went wrong; None: nothing. The other numbers are worth having all the same."""
    try:
        measure()
        return None
    except SystemExit as trouble:
        print(trouble.code)
        return trouble
    except Exception as trouble:
        traceback.print_exc(file=sys.stdout)
        return trouble
    finally:
        sys.stdout.flush()
