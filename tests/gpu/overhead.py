"""What recording costs: minigpt on one GPU, plain and recorded at level `layer`, in turns.

The extra time of a step is held against the bytes that were digested over the bandwidth of a pure read kernel, both of this
run. Usage: overhead.py BUILD [MODEL...]. Prints `bench NAME VALUE GOAL ok|miss`; exits with 77 where there is no GPU.
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
# name: (options, steps, goal or None)
MODELS = {
    # 32,768 tokens, tensors of 64 MiB to 1 GiB: a batch that fills the GPU.
    "large": ("--layers 2 --dim 2048 --heads 16 --seq 256 --batch 128", 10, 1.3),
    # 8,192 tokens, tensors of 16 to 256 MiB.
    "medium": ("--layers 2 --dim 2048 --heads 16 --seq 256 --batch 32", 20, 1.3),
    # 1,024 tokens, tensors of 4 to 16 MiB: what is fixed for a record (a launch, 2 to 4 us of GPU time) weighs most.
    "small": ("--layers 8 --dim 1024 --heads 16 --seq 256 --batch 4", 60, None),
}
ROUNDS = 3
WARM_UP_STEPS = 4


def run(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} exited with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def step_ms(model, steps, record_to=None, level="layer"):
    """Median time between the lines that the job prints at the end of its steps; each waits for the GPU (the loss is read)."""
    command = [BUILD / "samples/minigpt", "--device", "cuda", "--ranks", 1, "--seed", 1, *model.split(), "--steps", steps]
    if record_to:
        command = [BUILD / "forkpoint", "record", "--level", level, "-o", record_to, "--", *command]
    job = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    times = [time.monotonic() for line in job.stdout if line.startswith("step ")]
    if job.wait() != 0 or len(times) != steps:
        sys.exit(f"{' '.join(map(str, command))} exited with status {job.returncode} after {len(times)} steps")
    return 1000 * statistics.median(b - a for a, b in zip(times[WARM_UP_STEPS:], times[WARM_UP_STEPS + 1:]))


def measure(name, read_gb_s, folder):
    model, steps, goal = MODELS[name]
    times = {None: [], "step": [], "layer": []}
    for i in range(ROUNDS):
        for level in times:
            times[level].append(step_ms(model, steps, folder / f"{name}-{level}-{i}" if level else None, level))
    plain = statistics.median(times[None])
    for level in ("step", "layer"):
        overview = json.loads(run([BUILD / "forkpoint", "show", folder / f"{name}-{level}-0", "--json"]))
        bytes_a_step = overview["bytes_hashed"] / steps
        floor_ms = bytes_a_step / read_gb_s / 1e6
        recorded = statistics.median(times[level])
        ratio = (recorded - plain) / floor_ms
        print(f"{name} model, level {level}: {plain:.2f} -> {recorded:.2f} ms a step ({recorded / plain:.3f}x); "
              f"{bytes_a_step / 1e9:.2f} GB in {overview['record_count'] / steps:.0f} records a step, at {read_gb_s:.0f} GB/s of "
              f"pure reading {floor_ms:.2f} ms: {ratio:.2f} times that; plain {min(times[None]):.2f} to {max(times[None]):.2f}",
              flush=True)
        if goal and level == "layer":
            print(f"bench record_minigpt_{name}_layer_over_floor {ratio:.3f} {goal} {'ok' if ratio <= goal else 'miss'}")


def main():
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0:
        print("skipped: no GPU")
        sys.exit(77)
    bench = run([BUILD / "bench/device_digest_bench", "f32_256MiB"])
    read_gb_s = float(re.search(r"read (\d+) GB/s", bench).group(1))
    with tempfile.TemporaryDirectory(prefix="forkpoint-overhead-") as folder:
        for name in sys.argv[2:] or MODELS:
            measure(name, read_gb_s, pathlib.Path(folder))


main()
