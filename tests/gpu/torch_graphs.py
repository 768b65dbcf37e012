#!/usr/bin/env python3
"""PyTorch's CUDA graphs at level layer, and ops at level launch, on a GPU.

Usage: torch_graphs.py BUILD. A case is a line `pass|FAIL|skip NAME: ...`; the last line counts them."""
import json
import os
import pathlib
import sys
import tempfile

os.environ["FORKPOINT_BUILD"] = str(pathlib.Path(sys.argv[1]).resolve())
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch"))

from bridge_driver import FORKPOINT, alone, diff, record, rows, run

GRAPH = "layers inside of a CUDA graph"


def twice(folder, mode):
    """Rows of the last step; the run is repeated, and both runs and the program by itself agree."""
    a = record(f"{folder}/{mode}.a", "graph_modules.py", mode)
    record(f"{folder}/{mode}.b", "graph_modules.py", mode)
    assert a.stdout == alone("graph_modules.py", mode).stdout, "the probe changes what the program computes"
    verdict = diff(f"{folder}/{mode}.a", f"{folder}/{mode}.b")
    assert verdict["verdict"] == "identical", (verdict["verdict"], verdict["reason"], verdict["gaps"])
    assert any(GRAPH in limit for limit in verdict["coverage"]["limits"]), verdict["coverage"]["limits"]
    return verdict["coverage"]["steps_compared"]


def a_graphed_module_shows_what_goes_in_and_out(folder):
    twice(folder, "callables")
    found = rows(f"{folder}/callables.a", 2)
    wanted = ["forward block: input", "forward block: output", "backward block: grad_output", "optimizer block.0: weight"]
    missing = [name for name in wanted if name not in found]
    assert not missing, f"missing {missing} in {list(found)}"


def a_graphed_step_is_a_step(folder):
    steps = twice(folder, "step")
    assert steps >= 7, f"{steps} steps, expected three before the capture and four replays"
    last = rows(f"{folder}/step.a", steps - 1)
    before = rows(f"{folder}/step.a", steps - 2)
    name = "optimizer block.0: weight"
    assert last[name]["digest"] != before[name]["digest"], "a replayed step changes the weights: found them alike"


def launches_carry_their_ops(folder):
    record(f"{folder}/ops", "graph_modules.py", "callables", level="launch", options=("--ops", "head"))
    shown = json.loads(run([FORKPOINT, "show", f"{folder}/ops", "--launches", "2", "--json"]).stdout)
    kernels = [r for r in shown["launches"] if r["kind"] == "kernel"]
    of_head = [r for r in kernels if r["layer"] == "head"]
    ops = {(r["phase"], (r["op"] or "").partition("#")[0]) for r in of_head}
    assert ("forward", "aten::addmm") in ops and ("backward", "aten::mm") in ops, ops
    assert any(r["phase"] == "optimizer" for r in kernels), {r["phase"] for r in kernels}


def main():
    probe = run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"])
    counts = {"pass": 0, "FAIL": 0, "skip": 0}
    for case in (a_graphed_module_shows_what_goes_in_and_out, a_graphed_step_is_a_step, launches_carry_their_ops):
        word, detail = "skip", "no torch with a GPU"
        if probe.stdout.strip() == "True":
            try:
                with tempfile.TemporaryDirectory() as folder:
                    case(folder)
                word, detail = "pass", "as expected"
            except Exception as error:
                word, detail = "FAIL", f"{type(error).__name__}: {error}"
        counts[word] += 1
        print(f"{word} {case.__name__}: {detail}", flush=True)
    print(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
