"""What recording costs: minigpt on one GPU, plain and recorded at level `layer`, in turns.

The extra time of a step is held against the bytes that were digested over the bandwidth of a pure read kernel, both of this
run. Usage: overhead.py BUILD. Prints `bench NAME VALUE GOAL ok|miss`; exits with 77 where there is no GPU.
"""

import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build-gpu").resolve()
MODEL = "--device cuda --ranks 1 --layers 8 --dim 1024 --heads 16 --seq 256 --batch 4 --seed 1".split()
FEW, MANY, ROUNDS = 10, 110, 3


def run(command):
    begin = time.monotonic()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        sys.exit(f"{command[0]} exited with status {done.returncode}:\n{done.stdout}")
    return seconds, done.stdout


def train(steps, record_to=None, level="layer"):
    command = [BUILD / "samples/minigpt", *MODEL, "--steps", steps]
    if record_to:
        command = [BUILD / "forkpoint", "record", "--level", level, "-o", record_to, "--", *command]
    return run(command)[0]


def step_ms(folder, name, level):
    """Time of a step without start-up and end: the difference of a long and a short run."""
    few = train(FEW, folder / f"{name}-few" if level else None, level)
    many = train(MANY, folder / f"{name}-many" if level else None, level)
    return 1000 * (many - few) / (MANY - FEW)


def main():
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0:
        print("skipped: no GPU")
        sys.exit(77)
    bench = run([BUILD / "bench/device_digest_bench", "f32_256MiB"])[1]
    read_gb_s = float(re.search(r"read (\d+) GB/s", bench).group(1))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="forkpoint-overhead-"))
    times = {"plain": [], "step": [], "layer": []}
    train(FEW)  # warm: files, the driver's caches
    for i in range(ROUNDS):
        for name in times:
            times[name].append(step_ms(folder, f"{name}-{i}", None if name == "plain" else name))
    plain = statistics.median(times["plain"])
    for level, goal in (("step", 0), ("layer", 1.3)):
        run_folder = folder / f"{level}-0-many"
        overview = json.loads(run([BUILD / "forkpoint", "show", run_folder, "--json"])[1])
        bytes_a_step = overview["bytes_hashed"] / MANY
        recorded = statistics.median(times[level])
        floor_ms = bytes_a_step / read_gb_s / 1e6
        print(f"level {level}: {plain:.3f} -> {recorded:.3f} ms a step ({recorded / plain:.3f}x); "
              f"{bytes_a_step / 1e9:.3f} GB in {overview['record_count'] / MANY:.0f} records a step; at {read_gb_s:.0f} GB/s "
              f"of pure reading: {floor_ms:.3f} ms; spread of plain {min(times['plain']):.3f}-{max(times['plain']):.3f}")
        ratio = (recorded - plain) / floor_ms
        if goal:
            print(f"bench record_minigpt_{level}_over_floor {ratio:.3f} {goal} {'ok' if ratio <= goal else 'miss'}")
    shutil.rmtree(folder)


main()
