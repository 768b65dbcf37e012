"""forkpoint checkpoints on files that torch itself writes: equal where torch says so, different where one element is."""
import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

FORKPOINT = os.path.join(os.environ["FORKPOINT_BUILD"], "forkpoint")


def compare(a, b, *options):
    done = subprocess.run([FORKPOINT, "checkpoints", "--json", *options, str(a), str(b)], capture_output=True, text=True)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert {"identical": 0, "diverged": 1, "incomparable": 2}[found["verdict"]] == done.returncode, done
    return found


def names(found):
    return [tensor["name"] for tensor in found["tensors"]]


def state(seed=0):
    """A model, its optimizer after two steps, and odd things that people put beside them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
    shared = torch.randn(6, 10)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "rng": torch.get_rng_state(),
            "numpy": numpy.random.RandomState(3).get_state(), "number": numpy.float64(0.25), "args": argparse.Namespace(lr=0.1),
            "views": [shared, shared.t(), shared[1:4, ::2], shared[0], shared.expand(2, 6, 10)],
            "types": {str(t): torch.arange(7).to(t) for t in (
                torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.float8_e4m3fn,
                torch.float8_e5m2)},
            "sparse": torch.eye(3).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(2)), "set": {"a", "b", "c"},
            "default": collections.defaultdict(list, a=[1, 2]), "deep": {"x": [{"y": (1, 2.5, float("nan"), None, b"z", 1 << 70)}]}}


def test_saves_of_the_same_state_are_identical_and_every_tensor_is_seen(folder):
    torch.save(state(), folder / "a.pt")
    torch.save(state(), folder / "b.pt")
    found = compare(folder / "a.pt", folder / "b.pt")
    assert found["verdict"] == "identical", found

    def count(value):
        if isinstance(value, torch.Tensor):
            return 2 if value.is_sparse else 1
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return sum(map(count, value)) if isinstance(value, (list, tuple)) else 0
    assert found["tensors_compared"] == count(state()), (found["tensors_compared"], count(state()))


def test_one_changed_element_is_named(folder):
    torch.save(state(), folder / "a.pt")
    for where, index in (("types.torch.bfloat16", 3), ("types.torch.float64", 6), ("types.torch.int8", 1), ("types.torch.float8_e4m3fn", 5)):
        changed = state()
        tensor = changed["types"][where.removeprefix("types.")]
        tensor.view(torch.uint8)[index * tensor.element_size()] ^= 1
        torch.save(changed, folder / "b.pt")
        found = compare(folder / "a.pt", folder / "b.pt")
        assert found["verdict"] == "diverged" and names(found) == [where], found
        word = index * tensor.element_size() // 4
        assert found["tensors"][0]["pointing"]["word"] == word, found
    changed = state()
    changed["views"][1][9, 5] += 1  # of the transposed one, and so of all that share its storage
    torch.save(changed, folder / "b.pt")
    found = compare(folder / "a.pt", folder / "b.pt")
    assert names(found) == ["views.0", "views.1", "views.4"], found
    assert found["tensors"][1]["pointing"]["element"] == [9, 5], found


def test_changed_values_and_optimizer_state(folder):
    torch.save(state(), folder / "a.pt")
    for change, where in ((lambda s: s.update(step=3), "step"), (lambda s: s["args"].__setattr__("lr", 0.2), "args.@.lr"),
                          (lambda s: s["optimizer"]["param_groups"][0].update(lr=2e-3), "optimizer.param_groups.0.lr"),
                          (lambda s: s["default"]["a"].append(3), "default.a.2"), (lambda s: s["set"].add("d"), "set")):
        changed = state()
        change(changed)
        torch.save(changed, folder / "b.pt")
        found = compare(folder / "a.pt", folder / "b.pt")
        assert found["verdict"] == "diverged" and [v["name"] for v in found["values"]] == [where], (where, found)
        assert compare(folder / "a.pt", folder / "b.pt", "--tensors")["verdict"] == "identical"
    changed = state()
    changed["optimizer"]["state"][2]["exp_avg_sq"][3] += 1e-3
    torch.save(changed, folder / "b.pt")
    assert names(compare(folder / "a.pt", folder / "b.pt")) == ["optimizer.state.2.exp_avg_sq"]


def test_what_the_file_would_run_is_not_run(folder):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {folder}/ran",)
    for side in "ab":
        torch.save({"x": torch.ones(2), "evil": Evil()}, folder / f"{side}.pt")
    compare(folder / "a.pt", folder / "b.pt")
    assert not (folder / "ran").exists()


def write_distributed(rank, world, path, changed, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    tensors = {f"layers.{i}.{w}": torch.randn(7, 5 + i) for i in range(12) for w in ("weight", "exp_avg")}
    tensors["half"] = torch.randn(11, 3).bfloat16()
    if changed:
        tensors["layers.3.weight"].view(torch.int32)[6, 2] += 4
        tensors["layers.10.weight"] += 1
    sharded = {n: distribute_tensor(t, mesh, [Shard(i % 2)]) for i, (n, t) in enumerate(tensors.items())}
    dcp.save({"model": sharded, "step": 100, "lr": 0.5, "state": {"seed": [1, 2]}}, checkpoint_id=path)
    dist.destroy_process_group()


def test_dcp_of_one_and_of_two_ranks(folder):
    port = 29600 + os.getpid() % 1000
    for i, (path, world, changed) in enumerate((("one", 1, False), ("two", 2, False), ("bad", 2, True))):
        torch.multiprocessing.spawn(write_distributed, (world, str(folder / path / "step-100"), changed, port + i), nprocs=world)
    same = compare(f"{folder}/one@100", f"{folder}/two@100")
    assert same["verdict"] == "identical" and same["tensors_compared"] == 25 and same["values_compared"] >= 3, same
    found = compare(f"{folder}/one@100", f"{folder}/bad@100")
    assert found["verdict"] == "diverged" and names(found) == ["model.layers.3.weight", "model.layers.10.weight"], found
    assert found["tensors"][0]["pointing"]["element"] == [6, 2] and found["tensors"][0]["pointing"]["delta"] == 4, found
    listed = json.loads(subprocess.run([FORKPOINT, "checkpoints", "--json", "--content", folder / "two"], capture_output=True).stdout)
    other = json.loads(subprocess.run([FORKPOINT, "checkpoints", "--json", "--content", folder / "one"], capture_output=True).stdout)
    two, one = listed["checkpoints"][0], other["checkpoints"][0]
    assert two["whole"] and two["kind"] == "dcp" and two["content"]["digest"] == one["content"]["digest"] is not None, (two, one)
    shutil.copytree(folder / "two", folder / "cut")
    shard = folder / "cut" / "step-100" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert compare(f"{folder}/one@100", folder / "cut" / "step-100")["verdict"] == "incomparable"


def main():
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory() as folder:
                test(pathlib.Path(folder))
            print(f"ok: {name}", flush=True)


if __name__ == "__main__":
    main()
