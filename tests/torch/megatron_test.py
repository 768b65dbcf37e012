"""Megatron Core's parallel training, samples/megatron on the CPU (tests/fakes/megatron_on_cpu.py): equal runs are identical,
a resume continues identical, a planted fault is bisected to its rank, layer and operator, and shards have their places.

Usage: megatron_test.py [PART...]: tensor, faults, pipeline, data, overlap, worlds (all, unless told)."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from bridge_driver import FORKPOINT, Done, diff, environment
from parallel_driver import expect, replicas, show

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = [sys.executable, ROOT / "tests/torch/programs/ranks.py", None, ROOT / "tests/fakes/megatron_on_cpu.py",
       ROOT / "samples/megatron/train_gpt.py", "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4,
       "--seq-length", 16, "--micro-batch-size", 1, "--global-batch-size", 4, "--deterministic-mode"]
TENSOR = ("--tp", 2, "--sequence-parallel", "--bf16")
DATA = ("--bf16", "--distributed-optimizer")


def job(ranks, *words):
    return [*(ranks if word is None else word for word in JOB), *words]


def run(words, timeout_s=1200):
    """As bridge_driver's, for verbs that run several jobs; none is left where it takes too long."""
    started = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(), start_new_session=True)
    try:
        stdout, stderr = started.communicate(timeout=timeout_s)
        return Done(started.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGTERM)  # forkpoint ends its job
        raise


def forkpoint(*words, status=0):
    done = run([FORKPOINT, *words])
    assert done.status == status, f"{words[0]}: status {done.status}: {done.stdout[:2500]}{done.stderr[-2500:]}"
    assert "torch bridge" not in done.stderr, f"{words[0]}: {done.stderr[-2000:]}"
    return done


def record(folder, ranks, *words, level="layer"):
    return forkpoint("record", "--level", level, "-o", folder, "--", *job(ranks, *words))


def rows(folder, *options):
    return show(folder, "--records", *options)["records"]


def identical(a, b, what):
    verdict = diff(a, b)
    expect((verdict["verdict"], verdict["gaps"]), ("identical", []), f"{what} ({verdict['reason']})")


def places(folder, layer, tensor, *options):
    found = rows(folder, "--layer", layer, "--tensor", tensor, *options)
    return sorted({(r["rank"], tuple(r["global_offset"] or ()), tuple(r["shape"])) for r in found})


def tensor_parallel(folder):
    """Two runs, and a replay from a checkpoint of the first."""
    saved = ("--train-iters", 4, "--save", f"{folder}/ckpts", "--save-interval", 2)
    record(f"{folder}/a", 2, *TENSOR, *saved)
    record(f"{folder}/b", 2, *TENSOR, "--train-iters", 4)  # which does not save: that is no part of a step
    identical(f"{folder}/a", f"{folder}/b", "equal runs of tensor parallel")
    expect(replicas(f"{folder}/a")["verdict"], "identical", "what tensor-parallel ranks hold alike")

    at = ("--steps", "1", "--phase", "optimizer")
    columns, across = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"
    for tensor in "weight", "weight.main", "weight.main.grad", "weight.main.exp_avg":
        expect(places(f"{folder}/a", columns, tensor, *at), [(0, (0, 0), (64, 32)), (1, (64, 0), (64, 32))], f"fc1 {tensor}")
        expect(places(f"{folder}/a", across, tensor, *at), [(0, (0, 0), (32, 64)), (1, (0, 64), (32, 64))], f"fc2 {tensor}")
    expect(places(f"{folder}/a", across, "bias", *at), [(0, (), (32,)), (1, (), (32,))], "a bias that both hold")
    kept = {r["tensor"] for r in rows(f"{folder}/a", "--steps", "1", "--phase", "state")}
    assert "megatron.model-parallel-rng" in kept, f"no generator of Megatron's in {kept}"
    groups = {r["communicator"] for r in rows(f"{folder}/a", "--steps", "1", "--phase", "collective")}
    assert "TENSOR_MODEL_PARALLEL_GROUP 0-1" in groups, f"no tensor-parallel group in {groups}"

    forkpoint("replay", "--checkpoint", f"{folder}/ckpts", "--steps", "2:3", "--against", f"{folder}/a", "-o",
              f"{folder}/replayed", "--", *job(2, *TENSOR, "--train-iters", 4))


def faults(folder):
    """A wrong product in one operator of one rank, found by bisection."""
    common = (*TENSOR, "--train-iters", 4)
    record(f"{folder}/good", 2, *common, "--save", f"{folder}/ckpts", "--save-interval", 2, level="step")
    fault = ("--fault", "kernel@step=3,rank=1,layer=1")
    record(f"{folder}/bad", 2, *common, *fault, level="step")
    done = forkpoint("bisect", "--checkpoint", f"{folder}/ckpts", "-o", f"{folder}/found", "--json", f"{folder}/good",
                     f"{folder}/bad", status=1)
    first = json.loads(done.stdout)["first"]
    where = tuple(first[name] for name in ("step", "rank", "phase", "layer", "op"))
    expect(where, (3, 1, "forward", "decoder.layers.1.mlp.linear_fc1", "aten::mm#0"), "where the fault was planted")


def pipeline(folder):
    """Layers have the whole model's numbers, the loss is recorded though its memory is given up."""
    words = ("--pp", 2, "--bf16", "--train-iters", 2)
    record(f"{folder}/a", 2, *words)
    record(f"{folder}/b", 2, *words)
    identical(f"{folder}/a", f"{folder}/b", "equal runs of a pipeline")
    held = {(r["rank"], r["layer"].split(".")[2]) for r in rows(f"{folder}/a", "--layer", "decoder.layers.*")}
    expect(held, {(0, "0"), (1, "1")}, "layers of the stages")
    losses = [(r["rank"], r["micro_step"]) for r in rows(f"{folder}/a", "--steps", "1", "--tensor", "loss")]
    expect(losses, [(1, micro) for micro in range(4)], "losses, of the last stage")
    assert replicas(f"{folder}/a")["verdict"] != "diverged", "stages are no replicas"


def data_parallel(folder):
    """The distributed optimizer: flat shards, a resume that continues, and one that lost something."""
    words = ("--checkpoint-at", 2, "--steps", 4)
    resume = ("resume", "--preset", "megatron", *words, "-o")
    forkpoint(*resume, f"{folder}/resumed", "--", *job(2, *DATA))
    straight = pathlib.Path(folder) / "resumed/straight"
    shards = rows(straight, "--steps", "1", "--phase", "optimizer", "--tensor", "*(flat)")
    sizes = {}
    for row in shards:
        whole = sizes.setdefault((row["layer"], row["tensor"]), [row["global_shape"][0], 0])
        whole[1] += row["shape"][0]
    assert sizes and all(whole == held for whole, held in sizes.values()), f"shards do not make the whole: {sizes}"
    expect(replicas(straight)["verdict"], "identical", "data-parallel replicas and flat shards")

    saved = pathlib.Path(folder) / "resumed/checkpoints"
    lost = forkpoint("replay", "--checkpoint", saved, "--steps", "2:3", "--against", straight, "-o", f"{folder}/lost", "--json",
                     "--", *job(2, *DATA, "--fault", "lost-momentum@rank=1"), status=1)
    first = json.loads(lost.stdout)["first"]
    assert first["phase"] == "load" and first["tensor"].endswith(".main (flat).exp_avg"), first


def overlapped(folder):
    """Weights that are gathered while other layers compute: whole when a layer uses them, on each rank, and the next step's."""
    words = (*DATA, "--overlap-grad-reduce", "--overlap-param-gather", "--train-iters", 3)
    record(f"{folder}/a", 2, *words)
    record(f"{folder}/b", 2, *words)
    identical(f"{folder}/a", f"{folder}/b", "equal runs whose gathers overlap")
    used = rows(f"{folder}/a", "--phase", "forward", "--layer", "decoder.layers.1.mlp.linear_fc1")
    for tensor in "weight", "bias":
        digests = {(r["step"], r["rank"]): r["digest"] for r in used if r["tensor"] == tensor and r["micro_step"] == 0}
        expect(sorted(digests), [(step, rank) for step in range(3) for rank in range(2)], f"{tensor}: where it is recorded")
        for step in range(3):
            expect(digests[step, 1], digests[step, 0], f"{tensor}, of step {step}, on both ranks")
        assert digests[2, 0] != digests[1, 0], f"{tensor} does not move"  # (the first step's learning rate is 0)


def worlds(folder):
    """One rank against two that share each weight: what was loaded is the same, and an altered shard is not."""
    words = ("--train-iters", 1, "--save", f"{folder}/ckpts", "--save-interval", 1)
    record(f"{folder}/one", 1, "--train-iters", 1, level="step")
    record(f"{folder}/two", 2, "--tp", 2, *words, level="step")
    verdict = diff(f"{folder}/one", f"{folder}/two")
    first = verdict["first"] or {}
    assert first.get("phase") != "load", f"weights that were drawn whole and cut differ: {verdict['reason']}"
    record(f"{folder}/altered", 2, "--tp", 2, "--train-iters", 1, "--fault", "weight@step=0,rank=1,layer=1", level="step")
    first = diff(f"{folder}/one", f"{folder}/altered")["first"]
    expect((first["phase"], first["layer"], first["tensor"]), ("load", "decoder.layers.1.mlp.linear_fc1", "weight"),
           "an altered shard, against the whole")


PARTS = {"tensor": tensor_parallel, "faults": faults, "pipeline": pipeline, "data": data_parallel, "overlap": overlapped, "worlds": worlds}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](folder)
        print(f"{name}: as expected", flush=True)
