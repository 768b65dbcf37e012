"""Draws from NumPy's global generator in each step: numpy_seeds.py SEED HOW [used]. HOW: which import comes first, or "unseeded". used: the
batch comes from it."""
import sys

if sys.argv[2] == "numpy-first":
    import numpy
import torch
import numpy

if sys.argv[2] == "from":
    from numpy.random import rand, seed
else:
    rand, seed = lambda *shape: numpy.random.rand(*shape), lambda number: numpy.random.seed(number)
torch.manual_seed(1)
if sys.argv[2] != "unseeded":
    seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    drawn = torch.tensor(rand(2, 4), dtype=torch.float32)
    optimizer.zero_grad()
    model(drawn if "used" in sys.argv else torch.ones(2, 4)).sum().backward()
    optimizer.step()
