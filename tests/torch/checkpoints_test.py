"""forkpoint checkpoints on files that torch itself writes: equal where torch says so, different where one element is."""
import argparse
import collections
import io
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
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


def with_hook(tensor):
    """As torch 0.4 saved tensors, its hooks among the arguments."""
    class Hooked:
        def __reduce__(self):
            function, arguments = tensor.__reduce_ex__(2)
            return function, arguments[:5] + (collections.OrderedDict({0: print}),)
    return Hooked()


def with_metadata(tensor, metadata):
    class Tagged:
        def __reduce__(self):
            function, arguments = tensor.__reduce_ex__(2)
            return function, arguments[:6] + (metadata,)
    return Tagged()


def with_attribute(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def verdict(folder, a, b, *options):
    torch.save({"x": torch.ones(2), "it": a}, folder / "a.pt")
    torch.save({"x": torch.ones(2), "it": b}, folder / "b.pt")
    return compare(folder / "a.pt", folder / "b.pt", *options)["verdict"]


def test_conjugated_and_negated_views_are_the_values_that_they_stand_for(folder):
    z = torch.tensor([[1 + 2j, 3 - 4j], [0.5j, -7.0]])
    views = {"conj": (z.conj(), z), "neg": (z.conj().imag, z.imag), "both": (torch._neg_view(z.conj()), z),
             "real": (torch._neg_view(z.real), z.real), "transposed": (z.mH, z), "double": (z.to(torch.complex128).conj(), z),
             "half": (torch._neg_view(z.real.half()), z.real.half()), "bfloat": (torch._neg_view(z.real.bfloat16()), z.real.bfloat16()),
             "expanded": (z[0].conj().expand(3, 2), z[0].expand(3, 2)), "attribute": (with_attribute(z.conj(), n=1), z),
             "parameter": (torch.nn.Parameter(z.conj()), z)}
    for name, (view, bytes_of) in views.items():
        plain = view.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        plain = with_attribute(plain, n=1) if name == "attribute" else plain
        assert view.is_conj() or view.is_neg() or view.detach().is_conj(), name
        assert verdict(folder, view, plain) == "identical", name
        assert verdict(folder, view, bytes_of.clone()) == "diverged", name
    # What cannot be told is not called equal: whole numbers, and what another kind of tensor puts there.
    whole = torch.arange(3)
    for odd in (torch._neg_view(whole), with_metadata(torch.ones(2), {"scale": 2})):
        assert verdict(folder, odd, odd) == "incomparable"
    dcp.save({"z": views["conj"][0], "w": torch.ones(3)}, checkpoint_id=folder / "one", no_dist=True)
    dcp.save({"z": z.conj().resolve_conj(), "w": torch.ones(3)}, checkpoint_id=folder / "two", no_dist=True)
    dcp.save({"z": z, "w": torch.ones(3)}, checkpoint_id=folder / "three", no_dist=True)
    assert compare(folder / "one", folder / "two")["verdict"] == "identical"
    assert names(compare(folder / "one", folder / "three")) == ["z"]


def test_keys_of_another_kind_are_a_difference_even_where_the_name_is_one(folder):
    w, v, cpu, gpu = torch.ones(3), torch.zeros(2), torch.device("cpu"), torch.device("cuda", 0)
    for a, b in (({1: w}, {"1": w}), ({0: w}, [w]), ({"0": w}, [w]), ((w, 1), [w, 1]), ({"a.b": w, "a": {"c": v}}, {"a": {"b": w, "c": v}}),
                 ({True: w}, {"True": w}), ({None: w}, {"None": w}), ({1.0: w}, {"1.0": w}), ({1: w}, {True: w}), ({(1, 2): w}, {"(1, 2)": w}),
                 ({(1, "2"): w}, {(1, 2): w}), ({cpu: w}, {gpu: w}), ({b"a": w}, {"a": w}), ({frozenset([1]): w}, {frozenset([2]): w}),
                 ({1: w, "1": v}, {1: v, "1": w}), ({"a.b": w, "a": {"b": v}}, {"a.b": v, "a": {"b": w}}), ({'a"]["b': w}, {"a": {"b": w}}),
                 ({("a", 'b"), ("c'): w}, {("a", "b"): w}), (argparse.Namespace(a=w), {"@": {"a": w}})):
        for tensors in ((), ("--tensors",)):
            assert verdict(folder, a, b, *tensors) == "diverged", (a, b)
            assert verdict(folder, a, a, *tensors) == "identical", a
            assert verdict(folder, b, b, *tensors) == "identical", b
    for a, b in (({1: "x"}, {"1": "x"}), ([2], {0: 2}), ([2], (2,)), ({'a", "b'}, {"a", "b"}), ({cpu}, {gpu}), ({(1, 2)}, {(1, 3)}),
                 (frozenset("a"), frozenset("b"))):
        assert verdict(folder, a, b) == "diverged", (a, b)
        assert verdict(folder, a, a) == verdict(folder, b, b) == "identical", (a, b)
    # The order of a dict is no content, also not where two things have one name.
    assert verdict(folder, {1: w, "1": v}, {"1": v, 1: w}) == "identical"
    assert verdict(folder, {"a.b": w, "a": {"b": v}}, {"a": {"b": v}, "a.b": w}) == "identical"
    assert verdict(folder, {"a.b": 3, "a": {"b": v}}, {"a": {"b": v}, "a.b": 3}) == "identical"
    # A format of names alone compares by names.
    torch.save({"d": {1: w, "m.n": v}, "s": 3}, folder / "a.pt")
    dcp.save({"d": {"1": w, "m": {"n": v}}, "s": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    assert compare(folder / "a.pt", folder / "dcp", "--tensors")["verdict"] == "identical"
    torch.save({"d": {1: w}}, folder / "a.pt")
    torch.save({"d": {"1": w}}, folder / "b.pt")
    found = compare(folder / "a.pt", folder / "b.pt")["tensors"][0]
    assert (found["name"], found["a"], found["b"]) == ("d.1", 'root["d"][1]', 'root["d"]["1"]'), found


def test_what_hangs_on_a_tensor_is_compared_too(folder):
    w = torch.arange(4.0)
    plain, tagged, other = (torch.nn.Parameter(w.clone()) for _ in range(3))
    with_attribute(tagged, partition_dim=0)
    with_attribute(other, partition_dim=1)
    assert verdict(folder, tagged, other) == verdict(folder, plain, tagged) == "diverged"
    assert verdict(folder, tagged, with_attribute(torch.nn.Parameter(w.clone()), partition_dim=0)) == "identical"
    assert verdict(folder, with_attribute(w.clone(), main=w), with_attribute(w.clone(), main=w + 1)) == "diverged"
    big = torch.cat([w + 1, w])
    assert verdict(folder, with_attribute(big[4:], n=1), with_attribute(w.clone(), n=1)) == "identical"
    assert verdict(folder, with_attribute(big[4:], n=1), with_attribute(big[:4], n=1)) == "diverged"
    assert verdict(folder, with_hook(w), w) == "diverged"
    frozen = torch.nn.Parameter(w.clone(), requires_grad=False)
    assert verdict(folder, plain, frozen) == "identical"
    note = compare(folder / "a.pt", folder / "b.pt")["notes"]
    assert note == ["1 tensor differs in requires_grad, first it: not counted"], note
    for same, changed in ((torch.eye(3).to_sparse(), (torch.eye(3) * 2).to_sparse()), (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()),
                          (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
                          (torch.nested.nested_tensor([w, w[:2]]), torch.nested.nested_tensor([w, w[1:3]]))):
        assert verdict(folder, same, same) == "identical"
        assert verdict(folder, same, changed) == "diverged"
    quantized = torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    assert verdict(folder, quantized, quantized) == "incomparable"


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


def listed(folder, step=100):
    done = subprocess.run([FORKPOINT, "checkpoints", "--json", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(c for c in json.loads(done.stdout)["checkpoints"] if c["step"] == step)


def write_fsdp2(rank, world, path, port):
    """As torchtitan and Megatron save: FSDP2's model and its optimizer by their own names. The update is one by elements, so
    that it is the same for any number of ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "train_state": {"step": 100}}, checkpoint_id=path)
    dist.destroy_process_group()


def test_fsdp2_of_one_and_of_two_ranks_and_each_file_cut(folder):
    port = 30700 + os.getpid() % 1000
    for i, (name, world) in enumerate((("one", 1), ("two", 2))):
        torch.multiprocessing.spawn(write_fsdp2, (world, str(folder / name / "step-100"), port + i), nprocs=world)
    same = compare(f"{folder}/one@100", f"{folder}/two@100")
    assert same["verdict"] == "identical" and same["tensors_compared"] >= 12, same
    path = folder / "two" / "step-100"
    assert listed(folder / "two")["whole"]
    for file in sorted(path.iterdir()):
        kept = file.read_bytes()
        for size in {0, 1, len(kept) // 2, len(kept) - 1}:
            file.write_bytes(kept[:size])
            assert not listed(folder / "two")["whole"], f"{file.name} cut to {size} of {len(kept)}"
        file.unlink()
        assert not listed(folder / "two")["whole"], f"{file.name} removed"
        file.write_bytes(kept)
    # The same tensors as Megatron's torch_dist lays them out.
    megatron = folder / "megatron" / "iter_0000100"
    shutil.copytree(path, megatron)
    torch.save({"iteration": 100, "args": argparse.Namespace(tensor_model_parallel_size=2)}, megatron / "common.pt")
    (folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("100")
    assert listed(folder / "megatron")["why_not"].startswith("metadata.json is missing")
    (megatron / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}')
    assert listed(folder / "megatron")["whole"] and listed(folder / "megatron")["kind"] == "megatron"
    shutil.copytree(folder / "megatron", folder / "flipped")
    data = folder / "flipped" / "iter_0000100" / "__1_0.distcp"
    bytes_, weight = bytearray(data.read_bytes()), dcp.FileSystemReader(path).read_metadata()
    at = next(where for index, where in weight.storage_data.items()
              if index.fqn == "model.1.weight" and where.relative_path == "__1_0.distcp")
    chunk = torch.load(io.BytesIO(bytes_[at.offset:at.offset + at.length]), weights_only=True)
    place = bytes_.find(chunk.numpy().tobytes(), at.offset)
    assert place > 0
    bytes_[place] ^= 1
    data.write_bytes(bytes_)
    found = compare(f"{folder}/megatron@100", f"{folder}/flipped@100")
    assert names(found) == ["model.1.weight"] and abs(found["tensors"][0]["pointing"]["delta"]) == 1, found


def test_deepspeed_as_zero_lays_it_out(folder):
    def write(name, flip=False):
        path = folder / name / "global_step100"
        path.mkdir(parents=True)
        torch.manual_seed(2)
        torch.save({"module": {"w": torch.randn(3, 5).bfloat16()}, "buffer_names": [], "optimizer": None, "lr_scheduler": {"last": 100},
                    "skipped_steps": 1, "global_steps": 100, "global_samples": 800, "dp_world_size": 2, "mp_world_size": 1,
                    "ds_config": {"zero_optimization": {"stage": 1}}, "ds_version": "0.16.0"}, path / "mp_rank_00_model_states.pt")
        for rank in range(2):
            part = torch.randn(8)
            if flip and rank == 1:
                part.view(torch.int32)[5] ^= 1 << 3
            torch.save({"optimizer_state_dict": {"base_optimizer_state": {"state": {0: {"exp_avg": part, "step": 100}}},
                                                 "single_partition_of_fp32_groups": [part.clone()], "zero_stage": 1},
                        "ds_version": "0.16.0"}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (folder / name / "latest").write_text("global_step100")
        return path
    path = write("a")
    write("b")
    write("c", flip=True)
    assert listed(folder / "a")["whole"] and listed(folder / "a")["kind"] == "deepspeed"
    assert compare(f"{folder}/a@100", f"{folder}/b@100")["verdict"] == "identical"
    found = compare(f"{folder}/a@100", f"{folder}/c@100")
    begin = "bf16_zero_pp_rank_1_mp_rank_00_optim_states: optimizer_state_dict."
    assert names(found) == [begin + "base_optimizer_state.state.0.exp_avg", begin + "single_partition_of_fp32_groups.0"], found
    assert [abs(t["pointing"]["delta"]) for t in found["tensors"]] == [8, 8], found
    (path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()  # the last one: only the model's file tells of it
    assert "1 of 2 files" in listed(folder / "a")["why_not"], listed(folder / "a")


def main():
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory() as folder:
                test(pathlib.Path(folder))
            print(f"ok: {name}", flush=True)


if __name__ == "__main__":
    main()
