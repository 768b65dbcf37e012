"""Cases of `peer`: two GPUs in one process that use each other's memory.

Memory of another device is not hashed where it cannot be read, and the run declares that. So two equal runs are
identical, and a difference that lies there may end as incomparable; but never as identical.
"""

import collections

from case_driver import Case, Trouble, Workplace, describe

PARTS = ("kernels", "copies", "one_thread", "two_threads", "mapped", "exported", "pool", "managed")
DECLARED = "memory of another device"
# The other process of `exported` is a rank of its own.
TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2"}


def command(place: Workplace, part: str):
    return [place.build / "tests" / "peer", part]


def handed(printed: str):
    """Kernel: for each launch, the sizes of what it was handed, and how many of them are the other device's."""
    launches = collections.defaultdict(list)
    for line in printed.splitlines():
        words = line.split()
        if words and words[0] == "peer":
            sizes = sorted(int(word.split(":")[1]) for word in words[2:])
            launches[words[1]].append((sizes, sum(word.startswith("other:") for word in words[2:])))
    return launches


def recorded(place: Workplace, run: str):
    launches = collections.defaultdict(list)
    for row in place.show(run, "--launches", 0, "--ranks", 0)["launches"]:
        if row["kind"] == "kernel":
            buffers = [buffer for buffer in row["buffers"] if "before" not in buffer["flags"]]
            sizes = sorted(buffer["bytes"] for buffer in buffers)
            name = (row["short_name"] or "").split("::")[-1]
            launches[name].append((sizes, sum(buffer["digest"] is None for buffer in buffers)))
    return launches


def problems_of_buffers(place: Workplace, run: str, printed: str):
    """Each launch with what it was handed; only what is the other device's may be without a digest, and is declared."""
    expected, found = handed(printed), recorded(place, run)
    undigested = False
    for kernel, launches in expected.items():
        if [sizes for sizes, _ in found[kernel]] != [sizes for sizes, _ in launches]:
            sizes = [[sizes for sizes, _ in rows] for rows in (launches, found[kernel])]
            yield f"{kernel} was handed {sizes[0]}, recorded is {sizes[1]}"
            continue
        for number, ((sizes, others), (_, missing)) in enumerate(zip(launches, found[kernel])):
            undigested |= missing > 0
            if missing > others:
                yield f"{kernel}, launch {number}: {missing} of {sizes} without a digest, {others} are the other device's"
    shown = place.show(run)
    if undigested and not any(DECLARED in limit for limit in shown["coverage_limits"]):
        yield f"buffers without a digest, and no limit says so: {shown['coverage_limits']}"
    for gap in shown["gaps"]:
        yield f"a gap: {gap}"


def same_twice(part: str):
    changes = TWO_RANKS if part == "exported" else {}

    def play(place: Workplace):
        plain = place.run(command(place, part), changes)
        if plain.status != 0:
            raise Trouble(f"the program fails unrecorded, with status {plain.status}: {plain.stderr[-2000:]}")
        problems = []
        for run in "ab":
            done = place.record_whole(run, command(place, part), changes=changes, step_on="mark_step")
            if done.stdout != plain.stdout:
                problems.append(f"run {run} prints something else than unrecorded: {done.stdout[-300:]}")
            problems += [f"run {run} says: {line}" for line in done.complaints()]
        verdict = place.diff("a", "b")
        said = " ".join([verdict["reason"], *verdict["gaps"], *verdict["coverage"]["limits"]])
        declared = verdict["verdict"] == "incomparable" and DECLARED in said
        if verdict["verdict"] != "identical" and not declared:
            problems.append(f"{describe(verdict)}, expected identical, or incomparable because of {DECLARED}")
        problems += problems_of_buffers(place, "a", plain.stdout)
        return describe(verdict), problems

    return Case(f"peer_{part}", play, "as unrecorded, identical or declared", gpus=2, modules=())


def planted(part: str):
    """Another value in the other device's memory in each run."""

    def play(place: Workplace):
        done = [place.record_whole(run, command(place, part), step_on="mark_step") for run in "ab"]
        if done[0].stdout == done[1].stdout:
            raise Trouble("both runs have the same checksum: nothing was planted")
        verdict = place.diff("a", "b")
        problems = ["a difference went unnoticed"] if verdict["verdict"] == "identical" else []
        if verdict["verdict"] == "diverged" and part == "planted_read":
            # What wrote it was not hashed there: either it, or the kernel that read it.
            named = f"{verdict['first']['kernel']} {verdict['first']['op']}"
            if not any(kernel in named for kernel in ("plant_time", "peer_add")):
                problems.append(f"named is {named}, expected plant_time or peer_add")
        return describe(verdict), problems

    return Case(f"peer_{part}", play, "not identical", gpus=2, modules=())


def all_cases():
    return [*map(same_twice, PARTS), planted("planted_read"), planted("planted_copy")]
