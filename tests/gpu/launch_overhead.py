#!/usr/bin/env python3
"""What the probe costs: preloaded and dormant, recording each launch of a GPT, and in memory over thousands of steps.

Usage: launch_overhead.py BUILD [--growth-steps N] [--rounds N] [--only NAMES]
All in one run, in turns, so that the ratios hold whatever the machine. Ends with lines `bench NAME VALUE GOAL ok|MISS`;
a goal that is missed is no failure, but memory that grows is. Skipped (status 77) without torch or a GPU.
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
import time

from gpt_bench import BLOCKS, TIMEOUT_S, Bench, best_ms, block_ms, environment, report, spread, table, trouble_of

BYTES_A_SECOND = 4.4e12  # what a pure read of device memory reaches
SECONDS_A_DIGEST = 2e-6  # a digest's node in a CUDA graph, when it has nothing to do
STARTS = 50
MOST_GROWTH_MIB = 4


def launches(bench, mode, step=20):
    """Calls, digests and bytes hashed in one recorded step."""
    shown = subprocess.run(
        [bench.forkpoint, "show", bench.folder / f"{mode}-recorded", "--launches", str(step), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )
    rows = [row for row in json.loads(shown.stdout)["launches"] if row["kind"] in ("kernel", "copy", "set")]
    # Buffers of one launch with the same bytes share a digest.
    hashed = [
        {(buffer["allocation"], buffer["start"], buffer["bytes"]) for buffer in row["buffers"] if buffer["digest"]}
        for row in rows
    ]
    return {
        "launches": len(rows),
        "hashed_launches": sum(bool(buffers) for buffers in hashed),
        "digests": sum(len(buffers) for buffers in hashed),
        "bytes": sum(size for buffers in hashed for _, _, size in buffers),
    }


def measure_eager(bench, rounds):
    results = bench.in_turns("eager", ("unrecorded", "dormant", "recorded"), rounds)
    plain, recorded = block_ms(results["unrecorded"]), block_ms(results["recorded"])
    counts = launches(bench, "eager")
    print(f"eager: unrecorded {plain:.2f} ms a step ({spread(results['unrecorded'])}), dormant "
          f"{block_ms(results['dormant']):.2f} ({spread(results['dormant'])}), recorded {recorded:.2f} "
          f"({spread(results['recorded'])})")
    gigabytes = counts["bytes"] / 1e9
    print(f"eager: {counts['launches']} launches, {counts['digests']} digests and {gigabytes:.2f} GB a step")
    host = [statistics.median(result["host_ms"] for result in results[arm]) for arm in ("unrecorded", "recorded")]
    print(f"eager: the host asks for a step in {host[0]:.2f} ms unrecorded, {host[1]:.2f} recorded")
    for arm, what in (("pool", "unrecorded, one allocation a tensor"), ("bare", "recorded, launches alone"), ("kept", "recorded, PyTorch's own allocator")):
        print(f"eager: {what}: {block_ms([bench.program(arm, 'eager', BLOCKS)]):.2f} ms a step")
    if len({result["loss"] for arm in results for result in results[arm]}) > 1:
        print(f"eager: the losses differ: { {arm: [result['loss'] for result in results[arm]] for arm in results} }")
    report("dormant_step_ratio", best_ms(results["dormant"]) / best_ms(results["unrecorded"]), 1.003)
    report("launch_eager_step_ratio", recorded / plain, 1.8)
    report("launch_us_a_launch", 1000 * (recorded - plain) / counts["launches"], 5)
    report("launch_host_us_a_launch", 1000 * (host[1] - host[0]) / counts["launches"], 5)


def measure_debug_mode(bench):
    result = bench.program("unrecorded", "debug_mode", 5)
    if "missing" in result:
        return print(f"DebugMode: torch has none here that logs hashes: {result['missing']}")
    ratio = result["debug_ms"] / result["plain_ms"]
    print(f"DebugMode with hashes: {result['plain_ms']:.2f} -> {result['debug_ms']:.2f} ms a step ({ratio:.1f}x), "
          f"{result['operators']} operators")
    report("debug_mode_step_ratio", ratio, None)


def measure_graph(bench, rounds):
    results = bench.in_turns("graph", ("unrecorded", "recorded"), rounds)
    plain, recorded = block_ms(results["unrecorded"]), block_ms(results["recorded"])
    counts = launches(bench, "graph")
    floor_ms = 1000 * (counts["bytes"] / BYTES_A_SECOND + counts["hashed_launches"] * SECONDS_A_DIGEST)
    print(f"graph: unrecorded {plain:.2f} ms a replay ({spread(results['unrecorded'])}), recorded {recorded:.2f} "
          f"({spread(results['recorded'])}); {counts['launches']} nodes, {counts['digests']} digests, "
          f"{counts['bytes'] / 1e9:.2f} GB: at least {floor_ms:.2f} ms more")
    report("launch_graph_replay_ratio", recorded / plain, 1.6)
    report("launch_graph_floor_ratio", (plain + floor_ms) / plain, None)


def measure_growth(bench, steps):
    # A ring that has gone round before the first look: each of its pages is touched once, whatever the number of steps.
    bench.changes = {"FORKPOINT_RING_SLOTS": "4096"}
    grown = {}
    for arm in ("unrecorded", "recorded"):
        result = bench.program(arm, "growth", steps)
        grown[arm] = {what: (result["late"][what] - result["early"][what]) / 2**20 for what in ("host", "device")}
        host, device = grown[arm]["host"], grown[arm]["device"]
        print(f"growth, {arm}: {host:.2f} MiB on the host, {device:.2f} MiB on the device in {result['steps']} steps")
    more = {what: grown["recorded"][what] - grown["unrecorded"][what] for what in ("host", "device")}
    for what, mib in more.items():
        report(f"growth_{what}_mib", mib, MOST_GROWTH_MIB)
    if max(more.values()) > MOST_GROWTH_MIB:
        sys.exit(f"memory grows with the steps: {more} MiB more than unrecorded, at most {MOST_GROWTH_MIB} is noise")


def start_ms(command, preload):
    times = {None: [], preload: []}
    for _ in range(STARTS):
        for probe in times:
            words = environment({"LD_PRELOAD": probe} if probe else None)
            begin = time.perf_counter()
            subprocess.run(command, env=words, check=True)
            times[probe].append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[preload]) - statistics.median(times[None])


def measure_start(bench):
    report("dormant_start_python_ms", start_ms([sys.executable, "-c", "pass"], str(bench.probe)), 1)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return print("start of a C program: not measured, there is no C compiler")
    source, program = bench.folder / "nothing.c", bench.folder / "nothing"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run([compiler, source, "-o", program], check=True)
    report("dormant_start_c_ms", start_ms([str(program)], str(bench.probe)), 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--growth-steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="of start, eager, debug_mode, graph and growth, by commas")
    options = parser.parse_args()
    has_gpu = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    if not has_gpu or importlib.util.find_spec("torch") is None:
        print("skipped: needs torch and a GPU")
        sys.exit(77)
    with tempfile.TemporaryDirectory(prefix="forkpoint-overhead-") as folder:
        bench = Bench(options.build.resolve(), pathlib.Path(folder))
        measurements = {
            "start": lambda: measure_start(bench),
            "eager": lambda: measure_eager(bench, options.rounds),
            "debug_mode": lambda: measure_debug_mode(bench),
            "graph": lambda: measure_graph(bench, max(1, options.rounds - 1)),
            "growth": lambda: measure_growth(bench, options.growth_steps),
        }
        wanted = options.only.split(",") if options.only else measurements
        failed = [trouble for trouble in (trouble_of(measurements[name]) for name in wanted) if trouble]
    print("\n".join(table))
    sys.exit(1 if failed else 0)


main()
