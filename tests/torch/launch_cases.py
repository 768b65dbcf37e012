#!/usr/bin/env python3
"""Faults and equal runs of unedited programs, recorded at level launch on a GPU, and the verdicts that they must get.

Usage: launch_cases.py BUILD [--only SUBSTRING] [--jobs N] [--time-limit SECONDS] [--keep FOLDER] [--list]
Prints a line a case, `pass|FAIL|skip NAME: verdict (expected ...)`, and at the end `N passed, N failed, N skipped`.
Exits with 1 when a case failed.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import sys
import tempfile
import time
import traceback

import job_cases
from case_driver import Case, Expected, Trouble, Workplace, count_gpus, describe, python, torchrun

ARMS = (("A",), ("B",))
TWICE = ((), ())
GEMM = ("gemm", "nvjet", "cutlass", "gemv", "splitk", "cublas", "dot_kernel")  # as cuBLAS names its kernels
CONVOLUTION = (*GEMM, "conv", "cudnn", "xmma", "fprop", "wgrad", "dgrad", "winograd", "fft")
UNORDERED = ("unordered_accumulation",)


def pair(name, expected, *, program=None, arguments=TWICE, environments=({}, {}), options=(), gpus=1, launcher=python,
         warm_up=False, step_on="^step$", module="triton", steps=4):
    """The program twice, or its two arms, and one comparison. steps: compared at least, where nothing differs."""

    def play(place: Workplace):
        commands = [launcher(program or name, *words) for words in arguments]
        if warm_up and place.run(commands[0], environments[0]).status != 0:
            raise Trouble("the program fails unrecorded")
        done = [
            place.record_whole(run, command, options, changes, step_on=step_on)
            for run, command, changes in zip("ab", commands, environments)
        ]
        verdict = place.diff("a", "b")
        problems = expected.problems(verdict)
        if problems and expected.outcome == "diverged" and done[0].losses() == done[1].losses():
            problems.append("both printed the same losses: the fault itself may not have shown")
        if expected.outcome == "identical":
            if done[0].losses() != done[1].losses():
                problems.append("the programs printed other losses: these were no equal runs")
            if verdict["coverage"]["steps_compared"] < steps:
                problems.append(f"{verdict['coverage']['steps_compared']} steps compared, the program has {steps}")
        return describe(verdict), problems

    return Case(name, play, str(expected), gpus, module)


def says(*words):
    """One of the words occurs in what the verdict says besides its first line."""

    def also(verdict):
        sentences = [*verdict["cause"]["evidence"], *verdict["notes"], *verdict["gaps"], *verdict["coverage"]["limits"]]
        text = " ".join([verdict["reason"], *sentences]).lower()
        return [] if any(word.lower() in text for word in words) else [f"nowhere is said: {' or '.join(words)}"]

    return also


def faults():
    yield pair("scatter_add_atomics", Expected(step=2, kernel=("scatter",), causes=UNORDERED))
    yield pair("index_add_atomics", Expected(step=2, kernel=("indexfunc", "index_add", "scatter"), causes=UNORDERED))
    yield job_cases.retried("scatter_add_atomics", "scatter")
    yield job_cases.retried("index_add_atomics", "index")
    yield pair("cumsum_large", Expected(step=2, kernel=("scan",), causes=UNORDERED))
    yield pair("scatter_overwrite", Expected(step=2, kernel=("scatter",), causes=UNORDERED))
    race, sure = (Expected(step=3, causes=("stream_race",), exact=exact) for exact in (False, True))
    yield pair("missing_stream_wait", race, arguments=ARMS)
    yield pair("missing_stream_wait_inputs", sure, program="missing_stream_wait", arguments=ARMS, options=("--inputs",))
    unwritten = Expected(step=3, causes=("uninitialized_memory",))
    yield pair("uninitialized_read", unwritten, arguments=ARMS, options=("--inputs",))
    workspaces = ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    other_workspace = Expected(
        step=0, kernel=GEMM, causes=("algorithm_choice", "environment"), also=says("CUBLAS_WORKSPACE_CONFIG")
    )
    yield pair("cublas_workspace", other_workspace, environments=workspaces)
    other_precision = Expected(step=2, kernel=GEMM, causes=("algorithm_choice", "precision_or_formula"))
    yield pair("tf32", other_precision, arguments=ARMS)
    other_convolution = Expected(step=0, kernel=CONVOLUTION, causes=("algorithm_choice", "unordered_accumulation"))
    yield pair("cudnn_algorithm", other_convolution, arguments=ARMS)
    yield pair("triton_atomic_add", Expected(step=2, kernel=("sum_by_token",), causes=UNORDERED))
    # Triton cannot launch on what cudaMallocAsync gives during a capture.
    yield pair("triton_atomic_add_graph", Expected(step=2, kernel=("sum_by_token",), causes=UNORDERED), options=("--keep-allocators",))
    baked = Expected(step=1, kernel=("dropout",), causes=("rng_state", "hyperparameter"))
    yield pair("graph_baked_seed", baked, arguments=ARMS)
    yield job_cases.altered_all_reduce()
    on_rank_1 = Expected(step=2, rank=1, kernel=("scatter",), causes=UNORDERED)
    yield pair("rank1_kernel_reaches_all", on_rank_1, launcher=torchrun, gpus=2)


def equal_runs():
    identical = Expected("identical")
    yield pair("equal_runs_gpt", identical)
    yield pair("equal_runs_gpt_inputs", identical, program="equal_runs_gpt", options=("--inputs",))
    yield pair("equal_runs_compile", identical, warm_up=True)  # the first run tunes and fills the cache
    yield pair("equal_runs_graph", identical, steps=8)
    yield pair("equal_runs_triton", identical, program="triton_mlp")
    # JAX marks no steps: a kernel that only its program's mark_step has begins them.
    # Cases run side by side: JAX must not take most of the device's memory at its start.
    modest = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    deterministic = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"} | modest
    kernels = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_enable_command_buffer="} | modest
    jax = {"program": "equal_runs_jax", "step_on": "popcnt", "module": "jax"}
    yield pair("equal_runs_jax", identical, environments=(kernels, kernels), **jax)
    yield pair("equal_runs_jax_graphs", identical, environments=(deterministic, deterministic), **jax)
    yield job_cases.native_allocator()
    noise = Expected("identical", also=says("scratch noise, not counted"))
    dropped = (("drop",), ("drop",))
    yield pair("discarded_statistics", noise, arguments=dropped)
    # Still there where the window ends: somebody may look later.
    kept, keep = Expected("incomparable", also=says("undecided")), (("keep",), ("keep",))
    yield pair("kept_statistics", kept, program="discarded_statistics", arguments=keep, options=("--steps", "0:3"))


def all_cases():
    return [*faults(), *equal_runs(), *job_cases.all_cases()]


def missing(case: Case, gpus: int):
    """Why this machine cannot run the case; empty: it can."""
    if gpus < case.gpus:
        return f"needs {case.gpus} GPU(s), found {gpus}"
    absent = [name for name in ("torch", case.module) if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(absent)} here" if absent else ""


def run(case: Case, build: pathlib.Path, folder: pathlib.Path, keep: bool, deadline: float):
    """The lines to print, the first of which begins with pass or FAIL."""
    place = Workplace(build, folder / case.name)
    try:
        if time.monotonic() > deadline:
            raise Trouble("not started: the time is up")
        found, problems = case.play(place)
    except Trouble as trouble:
        found, problems = "no verdict", [str(trouble)]
    except Exception:  # of this test's: the other cases go on
        found, problems = "no verdict", [traceback.format_exc()]
    lines = [f"{'FAIL' if problems else 'pass'} {case.name}: {found} (expected {case.expected})"]
    if problems:
        lines += [f"     {problem}" for problem in problems] + [place.report()]
    if not keep:
        place.remove()
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    parser.add_argument("--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)), help="cases at a time")
    parser.add_argument("--time-limit", type=float, default=3600, metavar="SECONDS", help="starts no case after it")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="leave the runs in this new folder")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case.name]
    if options.list or not cases:
        print("\n".join(case.name for case in cases) or f"no case has {options.only} in its name")
        sys.exit(0 if cases else 1)
    gpus, counts = count_gpus(), {"pass": 0, "FAIL": 0, "skip": 0}
    deadline = time.monotonic() + options.time_limit
    with tempfile.TemporaryDirectory(prefix="forkpoint-cases-") as temporary:
        folder = (options.keep or pathlib.Path(temporary)).resolve()
        build = options.build.resolve()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = [
                [f"skip {case.name}: {missing(case, gpus)}"]
                if missing(case, gpus)
                else pool.submit(run, case, build, folder, bool(options.keep), deadline)
                for case in cases
            ]
            for result in results:
                lines = result if isinstance(result, list) else result.result()
                counts[lines[0][:4]] += 1
                print("\n".join(lines), flush=True)
    print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(1 if counts["FAIL"] else 0)


if __name__ == "__main__":
    main()
