"""DistributedDataParallel in several buckets, which its reducer lays out anew after a process's first step, in the order in which
gradients came: ddp_resumed.py [--out DIR --every K] [--from FILE] [--steps N] [--dtype NAME] [--static] [--fault STEP].

Layers are used in another order than they are registered in. A fault: rank 1 alters one element between its bucket and the
all-reduce.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--from", dest="start")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--static", action="store_true")
parser.add_argument("--fault", type=int, default=-1)
options = parser.parse_args()


class Crossed(nn.Module):
    """Odd sizes: of 16-bit elements, a word pairs other two in each layout."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(9, 5)
        self.first = nn.Linear(7, 31)
        self.wide = nn.Linear(31, 15)
        self.second = nn.Linear(15, 9)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.wide(torch.tanh(self.first(x)))))))


def altering(state, bucket):
    """What the reducer does itself, but for the fault."""
    buffer = bucket.buffer().div_(world)
    if step == options.fault and rank == 1 and bucket.index() == 0:
        buffer[3] += 2
    return dist.group.WORLD.allreduce([buffer]).get_future().then(lambda future: future.value()[0])


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=world)
torch.manual_seed(3)
dtype = getattr(torch, options.dtype)
model = nn.parallel.DistributedDataParallel(Crossed().to(dtype), bucket_cap_mb=0.001, static_graph=options.static)
if options.fault >= 0:
    model.register_comm_hook(None, altering)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.Generator().manual_seed(11 + rank)
step = 0
if options.start:
    saved = torch.load(options.start, weights_only=False)
    step = saved["step"]
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    data.set_state(saved["data"][rank])
while step < options.steps:
    batch = torch.randn(6, 7, generator=data).to(dtype)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    os.write(1, f"step {step - 1} rank {rank} loss {loss.item():.9g}\n".encode())
    if options.every and step % options.every == 0:
        states = [None] * world
        dist.all_gather_object(states, data.get_state())
        if rank == 0:
            path = f"{options.out}/ckpt_{step}.pt"
            torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "data": states}, path + ".part")
            os.rename(path + ".part", path)
        dist.barrier()
dist.destroy_process_group()
