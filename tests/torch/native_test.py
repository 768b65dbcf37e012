"""Torch's own tensors through the bridge's native module: digests of their elements in logical order, from this library's
memory, and no more asked of them than what they say of themselves."""
import json
import pathlib
import sys
import tempfile

import torch

from bridge_driver import BUILD, FORKPOINT, PROGRAMS, run


def records(folder, *arguments):
    preload = {"LD_PRELOAD": str(BUILD / "libforkpoint.so"), "FORKPOINT_RUN": str(folder), "FORKPOINT_LEVEL": "layer"}
    done = run([sys.executable, PROGRAMS / "native_tensors.py", *arguments], **preload)
    assert done.status == 0, done.stderr[-2000:]
    assert done.stderr == "", done.stderr
    assert done.stdout == "vmap False\ngrad False\n", done.stdout
    shown = run([FORKPOINT, "show", folder, "--records", "--json"])
    assert shown.status == 0, shown.stderr
    return json.loads(shown.stdout)


def main():
    with tempfile.TemporaryDirectory() as folder:
        shown = records(pathlib.Path(folder) / "run")
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            asked = records(pathlib.Path(folder) / "asked", "attributes")
            assert asked["records"] == shown["records"], "torch's table and its attributes tell of tensors in two ways"
    found = {r["tensor"]: r for r in shown["records"]}
    assert len(found) == len(shown["records"]), "a tensor was recorded twice"
    names = [name[:-5] for name in found if name.endswith(" copy")]
    assert len(names) == 18 * 7 + 2, names
    for name in names:
        lies, copy, raw = found[name], found[name + " copy"], found[name + " bytes"]
        assert lies["digest"] == copy["digest"] == raw["digest"], (lies, copy, raw)
        assert lies["shape"] == copy["shape"] and lies["dtype"] == copy["dtype"], (lies, copy)
    different = {found[name]["digest"] for name in names if not name.endswith(("empty", "number"))}
    assert len(different) > 60, f"only {len(different)} digests: expected most of them to differ"
    assert found["under modes"]["digest"] == found["subclass"]["digest"] == found["float32"]["digest"]
    assert "unreadable" not in found and "wrong" not in found
    places = {name: (found[name]["global_shape"], found[name]["global_offset"]) for name in ("part", "whole", "flat")}
    assert places == {"part": ([12, 7], [6, 0]), "whole": (None, None), "flat": ([100], [58])}, places
    with tempfile.TemporaryDirectory() as folder:
        preload = {"LD_PRELOAD": str(BUILD / "libforkpoint.so"), "FORKPOINT_RUN": folder, "FORKPOINT_LEVEL": "layer"}
        walked = run([sys.executable, PROGRAMS / "native_walks.py"], **preload)
    assert (walked.status, walked.stdout, walked.stderr) == (0, "", ""), walked
    print(f"{len(names)} tensors of torch: as they lie, copied and as bytes they have one digest")


main()
