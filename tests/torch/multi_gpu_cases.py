#!/usr/bin/env python3
"""PyTorch's ways to use two GPUs, and its memory pools: equal runs, and a rank that does not repeat itself.

Usage: multi_gpu_cases.py BUILD, and the options of case_runner.py.
"""

import itertools

import case_runner
from case_driver import Case, Expected, Trouble, Workplace, describe, python, torchrun

STEPS = 5


def communicators(place: Workplace, run: str):
    return {row["communicator"] for row in place.show(run, "--records")["records"] if row["communicator"]}


def collectives(place: Workplace, run: str):
    return {row["op"] for row in place.show(run, "--records")["records"] if row["kind"] == "collective"}


def other_lines(*programs):
    """The lines of the first place where what they printed is not the same."""
    lines = next((row for row in itertools.zip_longest(*(p.losses() for p in programs)) if len(set(row)) > 1), ())
    return " | ".join(str(line) for line in lines)


def problems_of_equal(verdict: dict, declared: tuple):
    """identical over all steps, or incomparable for a reason that is declared: a step with a gap is not compared."""
    outcome = verdict["verdict"]
    said = " ".join([verdict["reason"], *verdict["gaps"], *verdict["coverage"]["limits"]]).lower()
    if outcome == "diverged" or (outcome == "incomparable" and not any(words in said for words in declared)):
        yield f"{describe(verdict)}, expected identical ({verdict['reason']})"
    if outcome == "identical" and verdict["coverage"]["steps_compared"] < STEPS:
        yield f"{verdict['coverage']['steps_compared']} steps compared, the program has {STEPS}"


def case(name, program, *, words=(), launcher=torchrun, changes=None, options=(), ops=(), splits=False, declared=(),
         planted=None, gpus=2):
    """The program twice, and, where `planted` is expected, twice with the fault in it. ops: that must be recorded."""

    def play(place: Workplace):
        plain, again = (place.run(launcher(program, *words), changes) for _ in range(2))
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded: {plain.stderr[-3000:]}")
        if plain.losses() != again.losses():
            raise Trouble(f"the program does not repeat itself unrecorded: {other_lines(plain, again)}")
        runs = [place.record_whole(run, launcher(program, *words), options, changes) for run in "ab"]
        verdict = place.diff("a", "b")
        problems = list(problems_of_equal(verdict, declared))
        if any(run.losses() != plain.losses() for run in runs):
            problems.append(f"other losses than unrecorded: {other_lines(plain, *runs)}")
        recorded = collectives(place, "a")
        problems += [f"no {op} was recorded, only {sorted(recorded)}" for op in ops if op not in recorded]
        if splits and not any(found.startswith("split ") for found in communicators(place, "a")):
            problems.append(f"no communicator was split off: {sorted(communicators(place, 'a'))}")
        found = describe(verdict)
        if planted:
            for run in ("c", "d"):
                place.record_whole(run, launcher(program, *words, "planted"), options, changes)
            verdict = place.diff("c", "d")
            problems += [f"planted: {problem} ({describe(verdict)})" for problem in planted.problems(verdict)]
            found += f"; planted: {describe(verdict)}"
        return found, problems

    expected = "identical" + (f"; planted: {planted}" if planted else "")
    return Case(name, play, expected, gpus, ("torch",))


# No class is asked for: that atomics are the cause is asked for in launch_cases.py.
ON_RANK_1 = Expected(step=2, rank=1, kernel=("scatter",))
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}


def all_cases():
    alone = Expected(step=2, rank=0, kernel=("scatter",))
    return [
        case("ddp", "ddp", ops=("all_reduce",), planted=ON_RANK_1),
        case("ddp_nonblocking", "ddp", changes=NONBLOCKING, ops=("all_reduce",), planted=ON_RANK_1),
        case("fsdp2", "fsdp2", ops=("all_gather", "reduce_scatter"), planted=ON_RANK_1),
        case("fsdp2_factor", "fsdp2", words=("factor",), ops=("all_gather", "reduce_scatter")),
        case("new_groups", "new_groups", ops=("all_reduce", "all_gather"), splits=True, planted=ON_RANK_1),
        case("new_groups_nonblocking", "new_groups", changes=NONBLOCKING, splits=True),
        # Memory pools do not work with cudaMallocAsync.
        case("mem_pool", "mem_pool", launcher=python, options=("--keep-allocators",), planted=alone, gpus=1,
             declared=("large allocation",)),
        case("mem_pool_native", "mem_pool", launcher=python, declared=("large allocation",), gpus=1,
             changes={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    ]


if __name__ == "__main__":
    case_runner.main(all_cases())
