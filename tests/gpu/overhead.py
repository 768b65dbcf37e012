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
# name: (options, steps of a short and of a long run, goal or None)
MODELS = {
    # Tensors of 64 to 256 MiB, as in a batch that fills the GPU: digests run at the bandwidth of memory.
    "large": ("--layers 4 --dim 2048 --heads 16 --seq 1024 --batch 8", 4, 34, 1.3),
    # Tensors of 4 to 16 MiB: what is fixed for a record (a launch, 2 to 4 us of GPU time) weighs most.
    "small": ("--layers 8 --dim 1024 --heads 16 --seq 256 --batch 4", 10, 110, None),
}
ROUNDS = 3


def run(command):
    begin = time.monotonic()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        sys.exit(f"{command[0]} exited with status {done.returncode}:\n{done.stdout}")
    return seconds, done.stdout


def train(model, steps, record_to=None, level="layer"):
    command = [BUILD / "samples/minigpt", "--device", "cuda", "--ranks", 1, "--seed", 1, *model.split(), "--steps", steps]
    if record_to:
        command = [BUILD / "forkpoint", "record", "--level", level, "-o", record_to, "--", *command]
    return run(command)[0]


def step_ms(model, few, many, folder, level):
    """Time of a step without start-up and end: the difference of a long and a short run."""
    short = train(model, few, folder / "few" if level else None, level)
    long = train(model, many, folder / "many" if level else None, level)
    return 1000 * (long - short) / (many - few)


def measure(name, read_gb_s, folder):
    model, few, many, goal = MODELS[name]
    train(model, few)  # warm: files, the driver's caches
    times = {None: [], "step": [], "layer": []}
    for i in range(ROUNDS):
        for level in times:
            place = folder / f"{name}-{level}-{i}"
            place.mkdir()
            times[level].append(step_ms(model, few, many, place, level))
    plain = statistics.median(times[None])
    for level in ("step", "layer"):
        overview = json.loads(run([BUILD / "forkpoint", "show", folder / f"{name}-{level}-0/many", "--json"])[1])
        bytes_a_step = overview["bytes_hashed"] / many
        floor_ms = bytes_a_step / read_gb_s / 1e6
        recorded = statistics.median(times[level])
        ratio = (recorded - plain) / floor_ms
        print(f"{name} model, level {level}: {plain:.2f} -> {recorded:.2f} ms a step ({recorded / plain:.3f}x); "
              f"{bytes_a_step / 1e9:.2f} GB in {overview['record_count'] / many:.0f} records a step, at {read_gb_s:.0f} GB/s of "
              f"pure reading {floor_ms:.2f} ms: {ratio:.2f} times that; plain {min(times[None]):.2f} to {max(times[None]):.2f}",
              flush=True)
        if goal and level == "layer":
            print(f"bench record_minigpt_layer_over_floor {ratio:.3f} {goal} {'ok' if ratio <= goal else 'miss'}")


def main():
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0:
        print("skipped: no GPU")
        sys.exit(77)
    bench = run([BUILD / "bench/device_digest_bench", "f32_256MiB"])[1]
    read_gb_s = float(re.search(r"read (\d+) GB/s", bench).group(1))
    with tempfile.TemporaryDirectory(prefix="forkpoint-overhead-") as folder:
        for name in MODELS:
            measure(name, read_gb_s, pathlib.Path(folder))


main()
