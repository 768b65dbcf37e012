#!/usr/bin/env python3
"""What the bridge into PyTorch costs the host: an 8-layer GPT of tiny tensors on the CPU, where host time is all there is.

Usage: bridge_host.py PROBE [LEVEL...]     PROBE: libforkpoint.so; LEVEL: step, layer, launch (default: all).
Prints for each level microseconds a step, beside those of the same program unrecorded, how many hooks ran and records were
made in a step, and microseconds of each. The least of several blocks of steps counts: others use the machine too.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

STEPS, BLOCKS = 20, 15


def train():
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch" / "programs"))
    import torch
    from model import GPT, token_batches

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(16, 4, width=8, heads=2, layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = next(token_batches(16, 1, 4))

    def step():
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    best = None
    for block in range(BLOCKS):
        begin, cpu = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            step()
        spent = (time.thread_time() - cpu) / STEPS, (time.perf_counter() - begin) / STEPS
        best = spent if best is None or block < 2 else min(best, spent)
    modules = sum(1 for _ in model.modules())
    parameters = sum(1 for _ in model.parameters())
    print(json.dumps({"us": 1e6 * best[0], "wall_us": 1e6 * best[1], "modules": modules, "parameters": parameters}))


def run(probe, level, folder):
    changes = {"OMP_NUM_THREADS": "1"}
    if level:
        changes |= {"LD_PRELOAD": probe, "FORKPOINT_RUN": str(folder), "FORKPOINT_LEVEL": level}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORKPOINT_", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, __file__, "--train"], capture_output=True, text=True, env=kept | changes)
    if done.returncode != 0:
        sys.exit(f"level {level}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    if sys.argv[1] == "--train":
        return train()
    probe, levels = str(pathlib.Path(sys.argv[1]).resolve()), sys.argv[2:] or ["step", "layer", "launch"]
    plain = run(probe, None, None)
    modules, parameters = plain["modules"], plain["parameters"]
    print(f"unrecorded: {plain['us']:.0f} us a step; {modules} modules, {parameters} parameters")
    for level in levels:
        with tempfile.TemporaryDirectory() as folder:
            recorded = run(probe, level, pathlib.Path(folder) / "run")
        more = recorded["us"] - plain["us"]
        # Before and behind each forward, before and behind its nodes; at each gradient; two of the optimizer.
        hooks = 4 * modules + parameters + 2 if level != "step" else 4
        print(f"{level}: {recorded['us']:.0f} us a step, {more:.0f} us more: {more / hooks:.2f} us a hook ({hooks})")


main()
