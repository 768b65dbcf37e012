"""Two ranks that no launcher started, as torch.multiprocessing makes them: only torch knows which is which.

Usage: spawned_job.py MEETING     a path of a file that is not there yet
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 3


def train(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)  # the weights are rank 0's: DistributedDataParallel sends them around as it is made
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(torch.full((2, 8), float(rank + step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" not in os.environ, "a launcher started this"
    torch.multiprocessing.spawn(train, args=(sys.argv[1],), nprocs=RANKS)
