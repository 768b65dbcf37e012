"""The python that the tests are given trains a model and sums over two ranks: failures elsewhere are not torch's."""

import pathlib
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def two_steps_lower_the_loss():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(5, 8)
    losses = []
    for _ in range(3):
        loss = model(batch).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[2] < losses[1] < losses[0], f"losses {losses}: expected each below the one before"


def tensors_and_arrays_share_memory():
    tensor = torch.zeros(3)
    tensor.numpy()[1] = 5
    assert numpy.array_equal(tensor.numpy(), [0, 5, 0]), f"found {tensor}, expected what was written through numpy"


def sum_over_ranks(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensor = torch.full((1000,), 10.0 ** rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), 11.0)), f"rank {rank} found {tensor[:4]}, expected 11 everywhere"
    dist.destroy_process_group()


if __name__ == "__main__":
    two_steps_lower_the_loss()
    tensors_and_arrays_share_memory()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(sum_over_ranks, (pathlib.Path(folder) / "store",), nprocs=2)
    print(f"torch {torch.__version__}: trains, and sums over two ranks")
