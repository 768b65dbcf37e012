#!/usr/bin/env python3
"""Megatron Core on two GPUs (samples/megatron): tensor and sequence parallel, pipeline, distributed optimizer.

Equal runs are identical at level layer, a resume continues identical, and a wrong product on one tensor-parallel rank is
bisected to its layer and operator.

Usage: megatron_cases.py BUILD, and the options of tests/torch/case_runner.py.
FORKPOINT_MEGATRON: a folder that holds megatron-core, psutil and packaging, for a Python that lacks them. It is made with
    pip install --target FOLDER --no-deps megatron-core==0.19.2 psutil packaging
FORKPOINT_MEGATRON_ARGUMENTS: further words for train_gpt.py, such as `--transformer-impl transformer_engine --fp8 hybrid`.
"""

import json
import os
import pathlib
import re
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/torch"))
import case_runner  # noqa: E402
from case_driver import Case, Expected, Trouble, Workplace, describe  # noqa: E402

CARRIED = os.environ.get("FORKPOINT_MEGATRON", "")
FURTHER = tuple(shlex.split(os.environ.get("FORKPOINT_MEGATRON_ARGUMENTS", "")))  # before they are taken out of the jobs'
if CARRIED:
    sys.path.append(str(pathlib.Path(CARRIED).resolve()))
NEEDED = ("torch", "triton", "megatron", "psutil", "packaging")
TENSOR = ("--tp", 2, "--sequence-parallel", "--bf16")
SIZES = ("--num-layers", 4, "--hidden-size", 512, "--num-attention-heads", 8, "--seq-length", 128, "--micro-batch-size", 4,
         "--global-batch-size", 16, "--deterministic-mode")


def job(*words):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    return [*launcher, ROOT / "samples/megatron/train_gpt.py", *SIZES, *words, *FURTHER]


def environment():
    paths = [str(pathlib.Path(CARRIED).resolve())] if CARRIED else []
    return {"PYTHONPATH": os.pathsep.join(paths + [os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)])}


def deterministic(place: Workplace, verb="record"):
    """The option, where this forkpoint has it."""
    told = place.run([place.forkpoint, verb, "-h"])
    return ["--deterministic"] if "--deterministic" in told.stdout + told.stderr else []


def record(place: Workplace, name: str, *words, level="layer"):
    return place.record_whole(name, job(*words), deterministic(place), environment(), step_on=None, level=level)


def forkpoint(place: Workplace, *words):
    """What a verb with --json said, and its exit status."""
    done = place.run([place.forkpoint, *words], environment(), timeout_s=420)
    try:
        return json.loads(done.stdout), done.status
    except ValueError:
        raise Trouble(f"{words[0]} ended with status {done.status}: {done.stdout[-500:]} {done.stderr[-2500:]}") from None


def twice(place: Workplace, *words, first=()):
    """Two recorded runs that must be identical, without a gap."""
    runs = [record(place, "a", *words, *first), record(place, "b", *words)]
    verdict = place.diff("a", "b")
    problems = Expected("identical").problems(verdict)
    if verdict["gaps"]:
        problems.append(f"gaps: {verdict['gaps'][:3]}")
    if runs[0].losses() != runs[1].losses() or not runs[0].losses():
        problems.append(f"losses differ or there are none: {runs[0].losses()[:2]} {runs[1].losses()[:2]}")
    seen = {row["op"] for row in place.show("a", "--records", "--steps", 1)["records"] if row["kind"] == "collective"}
    if not seen:
        problems.append("no collective was recorded")
    return describe(verdict) + f"; collectives {', '.join(sorted(filter(None, seen)))}", problems


def replay(place: Workplace, *words):
    """Steps 4 and 5 again from the checkpoint behind step 3, against the run that saved it."""
    asked = ["--checkpoint", place.folder / "ckpts", "--steps", "4:5", "--against", place.folder / "a", "-o", place.folder / "r"]
    verdict, _ = forkpoint(place, "replay", "--json", *asked, *deterministic(place, "replay"), "--", *job(*words))
    return [f"resumed: {problem}" for problem in Expected("identical").problems(verdict)]


def tensor_parallel(place: Workplace):
    words = (*TENSOR, "--train-iters", 6)
    found, problems = twice(place, *words, first=("--save", place.folder / "ckpts", "--save-interval", 4))
    problems += replay(place, *words)
    shards = [row for row in place.show("a", "--records", "--steps", 1)["records"] if row.get("global_shape")]
    if not shards:
        problems.append("no shard was recorded with its place in the whole")
    verdict, _ = forkpoint(place, "diff", "--replicas", place.folder / "a", "--json")
    if verdict["verdict"] != "identical":
        problems.append(f"replicas of an undisturbed run: {verdict['verdict']} ({verdict['reason']})")

    record(place, "bad", *words, "--fault", "kernel@step=5,rank=1,layer=2")
    options = ["--checkpoint", place.folder / "ckpts", "--level", "layer", "--json", "-o", place.folder / "bisect"]
    verdict, status = forkpoint(place, "bisect", *options, *deterministic(place, "bisect"), place.folder / "a", place.folder / "bad")
    first = verdict["first"] or {}
    where = tuple(first.get(name) for name in ("step", "rank", "phase", "layer"))
    if where != (5, 1, "forward", "decoder.layers.2.mlp.linear_fc1") or not re.match(r"aten::mm\b", first.get("op") or ""):
        problems.append(f"bisected (status {status}) to {where}, op {first.get('op')}: {verdict['reason']}")
    return f"{found}; bisected to {where[3]}, {first.get('op')}", problems


def distributed_optimizer(place: Workplace):
    words = ("--bf16", "--distributed-optimizer", "--train-iters", 6)
    found, problems = twice(place, *words, first=("--save", place.folder / "ckpts", "--save-interval", 4))
    return found, problems + replay(place, *words)


def overlapped(place: Workplace):
    return twice(place, "--bf16", "--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--train-iters", 4)


def pipeline(place: Workplace):
    return twice(place, "--pp", 2, "--bf16", "--train-iters", 4)


def all_cases():
    told = "identical, resumed identical"
    return [
        Case("megatron_tensor_parallel", tensor_parallel, f"{told}, bisected to the layer and aten::mm", 2, NEEDED),
        Case("megatron_distributed_optimizer", distributed_optimizer, told, 2, NEEDED),
        Case("megatron_overlap", overlapped, "identical", 2, NEEDED),
        Case("megatron_pipeline", pipeline, "identical", 2, NEEDED),
    ]


if __name__ == "__main__":
    case_runner.main(all_cases())
