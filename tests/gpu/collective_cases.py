#!/usr/bin/env python3
"""Every reduction of nccl_program done by the deterministic kernels, on two GPUs, in one process and in two.

The program looks at each result itself; that the kernels made it is in the recording. Two recordings must be identical.
Usage: collective_cases.py BUILD, and the options of tests/torch/case_runner.py.
"""

import collections
import dataclasses
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch"))
import case_runner  # noqa: E402
import nccl_cases  # noqa: E402
from case_driver import Case, Trouble, Workplace, describe  # noqa: E402

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
WAY = "in rank order"


def command(arrangement, place, knobs="collectives"):
    """messages: as where no GPU reaches another's memory."""
    knob, test = ("collectives", ["FORKPOINT_TEST_COLLECTIVES=messages"]) if knobs == "messages" else (knobs, [])
    return ["env", f"FORKPOINT_DETERMINISTIC={knob}", *test, *arrangement.command(place)]


def problems_of_ways(place: Workplace, run: str):
    """Each reduction says which way it went; a communicator of one rank has nothing to add."""
    ways = collections.Counter()
    for row in place.show(run, "--records")["records"]:
        if row["op"] in REDUCTIONS and row["tensor"].endswith(WAY):
            alone = "split 2" in row["communicator"]
            ways[alone, row["value"]] += 1
    wrong = {way: count for way, count in ways.items() if way not in ((False, 1.0), (True, 0.0))}
    if wrong:
        yield f"reductions by (alone, in rank order): {wrong}"
    if ways[False, 1.0] < 20:
        yield f"{ways[False, 1.0]} reductions in rank order only"


def case(arrangement, level: str, knobs="collectives"):
    def play(place: Workplace):
        if not (place.build / "tests" / "nccl_program").exists():
            raise Trouble("nccl_program was not built: NCCL or NVTX was not found")
        plain = place.run(arrangement.command(place))
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded, with status {plain.status}: {plain.stderr[-2000:]}")
        problems = []
        for run in "ab":
            done = place.record_whole(run, command(arrangement, place, knobs), level=level)
            if done.stdout != plain.stdout:
                problems.append(f"run {run} prints something else than unrecorded")
            problems += [f"run {run} says: {line}" for line in done.complaints()]
            problems += problems_of_ways(place, run)
        verdict = place.diff("a", "b")
        if verdict["verdict"] != "identical":
            problems.append(f"twice: {describe(verdict)}, expected identical ({verdict['reason']})")
        problems += [f"a gap: {gap}" for gap in place.show("a")["gaps"]]
        return describe(verdict), problems

    expected = "identical, every reduction in rank order"
    return Case(f"{knobs}_{arrangement.name}_{level}", play, expected, gpus=2, modules=())


def other_way():
    """A run whose reductions are NCCL's against one whose are not differs in what the reductions say of themselves."""
    arrangement = nccl_cases.ARRANGEMENTS[3]

    def play(place: Workplace):
        place.record_whole("a", command(arrangement, place), level="step")
        place.record_whole("b", arrangement.command(place), level="step")
        verdict = place.diff("a", "b")
        same = verdict["verdict"] == "identical"
        return describe(verdict), ["said to be identical, though the reductions went other ways"] if same else []

    return Case("collectives_other_way", play, "not identical", gpus=2, modules=())


def isolated():
    """Each process sees its own GPU only, as some launchers have it: device 0 of both. All members must have found the same
    way, and that is said: kernels where the driver maps memory of a device that is not visible, else messages."""
    arrangement = dataclasses.replace(nccl_cases.ARRANGEMENTS[3], name="isolated", launcher="isolated")

    def play(place: Workplace):
        plain = place.run(arrangement.command(place))
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded, with status {plain.status}: {plain.stderr[-2000:]}")
        words = ["env", "FORKPOINT_DETERMINISTIC=collectives", "FORKPOINT_TEST_COLLECTIVES=say"]
        done = place.record_whole("a", [*words, *arrangement.command(place)], level="step")
        ways = re.findall(r"ranks adds by (kernels|messages)", done.stderr)  # of rank 0, then of rank 1
        halves = sorted(ways[: len(ways) // 2]), sorted(ways[len(ways) // 2 :])
        problems = list(problems_of_ways(place, "a"))
        if done.stdout != plain.stdout:
            problems.append("it prints something else than unrecorded")
        if not ways or halves[0] != halves[1]:
            problems.append(f"the members went different ways, or nowhere: {halves}")
        return f"of both processes' communicators {dict(collections.Counter(ways))}", problems

    return Case("collectives_isolated", play, "every reduction in rank order, both members one way", gpus=2, modules=())


def graphs():
    """Captured calls, replayed, among others: each sum is in rank order, so the kernels kept to one order too."""

    def play(place: Workplace):
        program = [sys.executable, pathlib.Path(__file__).with_name("collective_graphs.py")]
        launch = ["bash", nccl_cases.HERE / "two_ranks.sh", "torchrun", *program]
        done = place.record_whole("a", ["env", "FORKPOINT_DETERMINISTIC=collectives", *launch], level="step")
        said = done.stdout.count("right\n")
        records = place.show("a", "--records")["records"]
        ways = {row["value"] for row in records if row["tensor"].endswith(WAY)}
        return f"{said} ranks right, in rank order: {sorted(ways)}", [] if said == 2 and ways == {1.0} else [done.stderr]

    return Case("collectives_graphs", play, "2 ranks right, in rank order: [1.0]", gpus=2, modules=("torch",))


chosen = [one for one in nccl_cases.ARRANGEMENTS if one.name in ("all", "threads", "processes")]
cases = [case(one, level) for one in chosen for level in ("step", "launch")]
cases += [case(one, "step", "messages") for one in chosen[:-1]]
cases += [case(chosen[-1], "step", knobs) for knobs in ("messages", "collectives-wide", "collectives-tree")]
case_runner.main([*cases, other_way(), isolated(), graphs()])
