#!/usr/bin/env python3
"""What recording a PyTorch training by layers and by steps costs, beside what people do without forkpoint.

Usage: layer_overhead.py BUILD [--rounds N] [--only MODEL|others]     All in one run, in turns. Ends with lines `bench NAME VALUE GOAL ok|MISS`; a
goal that is missed is no failure. Skipped (status 77) without torch or a GPU.
"""

import argparse
import importlib.util
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from gpt_bench import BLOCKS, Bench, best_ms, block_ms, report, spread, table, trouble_of

BYTES_A_SECOND = 4.4e12  # what a pure read of device memory reaches
STEPS, WARM_UP = 120, 40
STEPS_A_RUN = 10 * (BLOCKS + 1) + 10  # of launch_gpt.py
# name: (options of the program, goal of level layer, of level step)
MODELS = {
    "d1024": ((), 1.06, None),
    "d4096": (("--width", "4096", "--layers", "4"), None, None),
    "32k_tokens": (("--batch", "64"), None, 1.01),
}


def recorded_of(bench, recording, steps):
    """Records and bytes hashed a step of a recording."""
    command = [bench.forkpoint, "show", bench.folder / recording, "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return shown["record_count"] / steps, shown["bytes_hashed"] / steps


def beside(step_ms, place):
    """Within one process: the median of the steps at `place` of each two, and of the others, behind the warm-up."""
    kept = list(enumerate(step_ms))[WARM_UP:]
    return (statistics.median(ms for step, ms in kept if step % 2 == place),
            statistics.median(ms for step, ms in kept if step % 2 != place))


def measure_each(bench, name, goals):
    """Each second step, beside the steps before and behind it: what other processes of the machine do meets both alike."""
    for arm, goal in goals:
        recorded, plain = beside(bench.program(arm, "each", STEPS, every=2)["step_ms"], 0)
        shown = recorded_of(bench, f"each-{arm}", STEPS // 2)
        floor_ms = 1000 * shown[1] / BYTES_A_SECOND
        print(f"{name}: level {arm}, each second step of one process: {plain:.2f} ms, recorded {recorded:.2f}; "
              f"{shown[0]:.0f} records, reading {shown[1] / 1e9:.2f} GB takes {floor_ms:.2f} ms")
        report(f"{name}_{arm}_each_ratio", recorded / plain, goal)
        report(f"{name}_{arm}_reading_ratio", 1 + floor_ms / plain, None)
    hooked, plain = beside(bench.program("hooks", "each", STEPS, "--empty-hooks")["step_ms"], 1)
    print(f"{name}: hooks that do nothing, where level layer has some, in each second step: {plain:.2f} ms, {hooked:.2f}")
    report(f"{name}_empty_hooks_each_ratio", hooked / plain, None)


def measure(bench, name, layer_goal, step_goal, rounds):
    arms = ("unrecorded", "idle", "step", "layer")
    results = bench.in_turns("eager", arms, rounds)
    plain = block_ms(results["unrecorded"])
    print(f"{name}: unrecorded {plain:.2f} ms a step ({spread(results['unrecorded'])})")
    for arm, goal in (("step", step_goal), ("layer", layer_goal)):
        records, size = recorded_of(bench, f"eager-{arm}", STEPS_A_RUN)
        floor_ms = 1000 * size / BYTES_A_SECOND
        took = block_ms(results[arm])
        host = [statistics.median(result["host_ms"] for result in results[a]) for a in ("unrecorded", arm)]
        print(f"{name}: level {arm} {took:.2f} ms ({spread(results[arm])}); {records:.0f} records and {size / 1e9:.2f} GB a step, "
              f"{floor_ms:.2f} ms of reading; the host asks for a step in {host[0]:.2f} ms unrecorded, {host[1]:.2f} recorded")
        report(f"{name}_{arm}_ratio", took / plain, goal)
        report(f"{name}_{arm}_quietest_ratio", best_ms(results[arm]) / best_ms(results["unrecorded"]), None)
        report(f"{name}_{arm}_bound", 1 + (1.2 * floor_ms + 0.005 * records) / plain, None)
        report(f"{name}_{arm}_host_us_a_record", 1000 * (host[1] - host[0]) / records, 5)
    report(f"{name}_idle_ratio", best_ms(results["idle"]) / best_ms(results["unrecorded"]), 1.003)
    if len({result["loss"] for arm in results for result in results[arm]}) > 1:
        print(f"{name}: the losses differ: { {arm: [result['loss'] for result in results[arm]] for arm in results} }")
    measure_each(bench, name, (("step", step_goal), ("layer", layer_goal)))


def measure_others(bench):
    others = (("debug_mode", "DebugMode with hashes", 5), ("md5_hooks", "MD5 in module hooks", 2),
              ("msprobe", "msprobe, level L0, its md5", 3))
    for mode, what, steps in others:
        result = bench.program("unrecorded", mode, steps)
        if "missing" in result:
            print(f"{what}: not here: {result['missing']}")
            continue
        ratio = result["debug_ms"] / result["plain_ms"]
        print(f"{what}: {result['plain_ms']:.2f} -> {result['debug_ms']:.2f} ms a step ({ratio:.1f}x), {result['operators']} hashes or ops")
        report(f"{mode}_step_ratio", ratio, None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=(*MODELS, "others"), help="one model, or what else there is, and nothing beside it")
    options = parser.parse_args()
    has_gpu = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    if not has_gpu or importlib.util.find_spec("torch") is None:
        print("skipped: needs torch and a GPU")
        sys.exit(77)
    failed = []
    with tempfile.TemporaryDirectory(prefix="forkpoint-overhead-") as folder:
        for name, (model, layer_goal, step_goal) in MODELS.items():
            if options.only not in (None, name):
                continue
            bench = Bench(options.build.resolve(), pathlib.Path(folder), model)
            failed.append(trouble_of(lambda: measure(bench, name, layer_goal, step_goal, options.rounds)))
        if options.only in (None, "others"):
            failed.append(trouble_of(lambda: measure_others(Bench(options.build.resolve(), pathlib.Path(folder)))))
    print("\n".join(table))
    sys.exit(1 if any(failed) else 0)


main()
