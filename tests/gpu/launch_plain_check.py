#!/usr/bin/env python3
"""Holds what a recording shows of launch_plain against what the program printed.

Usage: launch_plain_check.py SHOWN PRINTED
SHOWN: the JSON of `forkpoint show RUN --launches 0 --json`. PRINTED: the output of the program.
"""

import collections
import json
import sys

LIMITS = {  # what makes a kernel unseen: a word of the coverage limit that must say so
    "built_add": "one by one",
    "loop_add": "conditional",
    "branch_add": "one by one",  # its body was built, too
}


def read_expected(path):
    handed, unseen = collections.defaultdict(list), []
    with open(path) as printed:
        for line in printed:
            words = line.split()
            if words[0] == "handed":
                handed[words[1]].append(sorted(map(int, words[2:])))
            elif words[0] == "unseen":
                unseen.append(words[1])
    return handed, unseen


def kernel_of(row):
    return (row["short_name"] or "").split("::")[-1]


def after(row):
    return [buffer for buffer in row["buffers"] if "before" not in buffer["flags"]]


def problems_of_buffers(name, row):
    for buffer in after(row):
        what = f"{name} (launch {row['index']}), the buffer at {buffer['place']}"
        if buffer["digest"] is None:
            yield f"{what} has no digest"
        if "window" in buffer["flags"] or buffer["start"] != 0:
            yield f"{what} was not hashed from end to end: {buffer}"


def problems_of(shown, handed, unseen):
    kernels = collections.defaultdict(list)
    for row in shown["launches"]:
        if row["kind"] == "kernel":
            kernels[kernel_of(row)].append(row)
    for name, launches in handed.items():
        rows = kernels[name]
        found = [sorted(buffer["bytes"] for buffer in after(row)) for row in rows]
        if found != launches:
            yield f"{name} was handed {launches}, the recording shows {found}"
        for row in rows:
            yield from problems_of_buffers(name, row)
    limits = shown["coverage_limits"]
    for name in unseen:
        if kernels[name]:
            yield f"{name} should not be seen, but is: {kernels[name][0]}"
        if not any(LIMITS[name] in limit for limit in limits):
            yield f"{name} is not seen, and no coverage limit says so: {limits}"
    yield from problems_of_kinds(shown, handed, kernels)
    for gap in shown["gaps"]:
        yield f"a gap: {gap}"


def problems_of_kinds(shown, handed, kernels):
    kinds = collections.Counter(row["kind"] for row in shown["launches"])
    to_host = [row for row in shown["launches"] if row["kind"] == "copy" and "to host" in row["flags"]]
    if not to_host or any(buffer["digest"] is None for row in to_host for buffer in row["buffers"]):
        yield f"{len(to_host)} copies to the host, of which each should have a digest"
    if "produce" in handed and kinds["event_wait"] == 0:
        yield "no waits for events"
    if "pitched_add" in handed and kinds["set"] < 3:
        yield f"{kinds['set']} sets, 3 are asked for"
    places = [buffer["place"] for row in kernels["add_from_large"] for buffer in row["buffers"]]
    if "add_from_large" in handed and max(places, default=0) < 4096:
        yield "no buffer of add_from_large lies beyond the first 4 KiB of its parameters"
    if "captured_add" in handed:
        launches = len(handed["captured_add"])
        digests = {buffer["digest"] for row in kernels["captured_add"] for buffer in row["buffers"]}
        if len(digests) != launches:
            yield f"{len(digests)} digests for {launches} launches of captured_add, each of which adds 1"
        if any("in graph" not in row["flags"] for row in kernels["captured_add"]):
            yield "a launch of captured_add that is not said to be in a graph"


def main():
    with open(sys.argv[1]) as file:
        shown = json.load(file)
    handed, unseen = read_expected(sys.argv[2])
    if not handed:
        sys.exit(f"{sys.argv[2]} says of no launch what it was handed")
    found = list(problems_of(shown, handed, unseen))
    for problem in found:
        print(problem)
    sys.exit(1 if found else 0)


main()
