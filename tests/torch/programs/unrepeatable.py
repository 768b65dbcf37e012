"""Trains a small model that repeats itself unless it is told to have one of these faults: unrepeatable.py FAULT...

empty: reads memory nobody wrote. set: takes a part of its input from the order of a set of strings. unseeded: seeds nothing,
and takes its batches from a loader with a worker. put: calls an op that has no deterministic implementation. strict, off: calls
use_deterministic_algorithms(True) or (False) itself. error: has warnings raised. tf32: says so by the interface of torch 2.9,
after which the older one may not be asked.
"""
import os
import sys
import warnings

import torch
from torch import nn

faults = set(sys.argv[1:])
if "error" in faults:
    warnings.simplefilter("error")
if "strict" in faults:
    torch.use_deterministic_algorithms(True)
if "off" in faults:
    torch.use_deterministic_algorithms(False)
if "tf32" in faults:
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
print("deterministic", torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
      "fill", torch.utils.deterministic.fill_uninitialized_memory)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(8) if "unseeded" in faults else torch.full((8,), float(index) / 64)


def unwritten():
    """What the allocator hands out: here, what the process has thrown away before."""
    old = [torch.frombuffer(bytearray(os.urandom(256)), dtype=torch.uint8).float() / 256 for _ in range(64)]
    del old
    return torch.cat([torch.empty(256) for _ in range(32)]).nan_to_num(0, 0, 0).clamp(-1, 1).view(-1, 8).mean(0)


if "unseeded" not in faults:
    torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = {"layer-%d" % i for i in range(16)}
for batch in torch.utils.data.DataLoader(Data(), batch_size=16, num_workers=1 if "unseeded" in faults else 0):
    optimizer.zero_grad()
    if "empty" in faults:
        batch = batch + unwritten()
    if "set" in faults:
        order = [int(name.split("-")[1]) for name in names]
        batch = batch + torch.tensor(order[:8]) / 16  # no two orders give one sum
    if "put" in faults:
        batch = batch.clone().put_(torch.tensor([0]), torch.tensor([0.5]))
    model(batch).square().mean().backward()
    optimizer.step()
