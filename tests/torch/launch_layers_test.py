"""At launch level each launch carries the layer and the phase that it ran in, backward, recompute and optimizer too;
with --ops the op that it came from. On a libcuda and a libcupti that need no GPU."""
import json
import os
import sys
import tempfile

from bridge_driver import BUILD, FORKPOINT, PROGRAMS, run

FAKES = BUILD / "tests" / "probe_clients"


def launches(folder, *arguments, options=()):
    """[(kernel, phase, layer, op, recompute)] of step 1."""
    command = [sys.executable, PROGRAMS / "launch_layers.py", FAKES / "libcuda.so.1", *arguments]
    done = run([FORKPOINT, "record", "--level", "launch", "--keep-allocators", *options, "-o", folder, "--", *command],
               FORKPOINT_CUPTI=str(FAKES / "libcupti.so.13"))
    assert done.status == 0 and done.stdout == "done\n", done
    assert "torch bridge" not in done.stderr, done.stderr
    shown = json.loads(run([FORKPOINT, "show", folder, "--launches", "1", "--json"]).stdout)
    return [(r["name"], r["phase"], r["layer"], r["op"], "recompute" in r["flags"])
            for r in shown["launches"] if r["kind"] == "kernel"]


def expect(found, wanted):
    listing = "\n".join(map(str, found))
    assert found == wanted, f"found\n{listing}\nexpected\n" + "\n".join(map(str, wanted))


FORWARD = [
    ("net", "forward", "Net", None, False),
    ("first", "forward", "first", None, False), ("first_after", "forward", "first", None, False),
    ("second", "forward", "second", None, False), ("second_after", "forward", "second", None, False),
    ("again", "forward", "again", None, False), ("again_after", "forward", "again", None, False),
]
BACKWARD = [
    ("again_backward", "backward", "again", None, False),
    ("second_backward", "backward", "second", None, False),
    ("first_backward", "backward", "first", None, False),
]
AGAIN = [("again", "forward", "again", None, True), ("again_after", "forward", "again", None, True)]


def main():
    if os.path.exists("/proc/driver/nvidia/version"):
        print("skipped: torch loads the real libcuda here, beside the one that stands in for it")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        for kind in "nonreentrant", "reentrant":
            found = launches(f"{folder}/{kind}", kind)
            after = [("update", "optimizer", None, None, False)]
            outside = [row for row in found if row[0] == "outside"]
            assert outside and outside[0][2] is None and outside[0][1] != "optimizer", outside
            again = AGAIN if AGAIN[1] in found else AGAIN[:1]  # it may stop early
            expect([row for row in found if row[0] != "outside"], FORWARD + again + BACKWARD + after)
        found = launches(f"{folder}/ops", options=("--ops", "Net,second"))
        named = [row for row in found if row[3]]
        expect(named, [("net", "forward", "Net", "planted::launches#0", False)])
    print("each launch carries the layer and the phase that it ran in")


if __name__ == "__main__":
    main()
