#!/usr/bin/env python3
"""Faults and equal runs of unedited programs, recorded at level launch on a GPU, and the verdicts that they must get.

Usage: launch_cases.py BUILD, and the options of case_runner.py.
"""

import case_runner
import job_cases
from case_driver import Case, Expected, Workplace, describe, python, torchrun

ARMS = (("A",), ("B",))
TWICE = ((), ())
GEMM = ("gemm", "nvjet", "cutlass", "gemv", "splitk", "cublas", "dot_kernel")  # as cuBLAS names its kernels
CONVOLUTION = (*GEMM, "conv", "cudnn", "xmma", "fprop", "wgrad", "dgrad", "winograd", "fft")
UNORDERED = ("unordered_accumulation",)


def pair(name, expected, *, program=None, arguments=TWICE, environments=({}, {}), options=(), gpus=1, launcher=python,
         warm_up=False, step_on="^step$", module="triton", steps=4, alone=False):
    """The program twice, or its two arms, and one comparison. steps: compared at least, where nothing differs."""

    def play(place: Workplace):
        commands = [launcher(program or name, *words) for words in arguments]
        if warm_up:  # recorded as well: compilers' caches tell other allocators apart
            place.record_whole("warm-up", commands[0], options, environments[0], step_on=step_on)
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

    return Case(name, play, str(expected), gpus, ("torch", module), alone)


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
    # cuDNN's benchmark tries algorithms whose workspaces take all that cudaMallocAsync gives: 142 GB were seen.
    yield pair("cudnn_algorithm", other_convolution, arguments=ARMS, alone=True)
    yield pair("triton_atomic_add", Expected(step=2, kernel=("sum_by_token",), causes=UNORDERED))
    # Triton cannot launch on what cudaMallocAsync gives during a capture.
    yield pair("triton_atomic_add_graph", Expected(step=2, kernel=("sum_by_token",), causes=UNORDERED), options=("--keep-allocators",))
    baked = Expected(step=1, kernel=("dropout",), causes=("rng_state", "hyperparameter"))
    yield pair("graph_baked_seed", baked, arguments=ARMS)
    # What layers are handed is left to the launches; what they give counts though nothing comes of it.
    yield pair("unused_layer_output", Expected(step=2), arguments=ARMS, module="torch")
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


if __name__ == "__main__":
    case_runner.main(all_cases())
