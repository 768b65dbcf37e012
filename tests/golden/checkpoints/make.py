"""Writes the small checkpoints beside this file, with torch 2.11: small.pt, views.pt, and dcp/ from two gloo ranks.

    python tests/golden/checkpoints/make.py
"""
import collections
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

here = os.path.dirname(os.path.abspath(__file__))


def small():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = collections.OrderedDict(weight=base, transposed=base.t(), tail=base[2:, 1:4])
    state["half"] = torch.arange(5).to(torch.bfloat16)
    state["parameter"] = torch.nn.Parameter(torch.full((3,), 0.5))
    state["scalar"] = torch.tensor(7, dtype=torch.int64)
    state["empty"] = torch.zeros(0, 3)
    torch.save({"model": state, "step": 100, "lr": 0.1, "name": "small", "betas": (0.9, 0.999), "none": None, "flag": True,
                "seeds": b"\x01\x02\x03", "big": 1 << 80}, f"{here}/small.pt")


def views():
    z = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"plain": z, "conj": z.conj(), "neg": z.clone().conj().imag, "both": torch._neg_view(z.conj()),
                "half": torch._neg_view(torch.tensor([1.0, 2.0], dtype=torch.float16))}, f"{here}/views.pt")


def distributed(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    weight = torch.arange(28, dtype=torch.float32).reshape(7, 4)
    state = {"weight": distribute_tensor(weight, mesh, [Shard(0)]), "columns": distribute_tensor(weight, mesh, [Shard(1)]),
             "copy": distribute_tensor(weight[:2], mesh, [Replicate()]), "step": 100}
    dcp.save(state, checkpoint_id=f"{here}/dcp", no_dist=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    small()
    views()
    torch.multiprocessing.spawn(distributed, args=(2,), nprocs=2)
