"""Two optimizers of two models, one of which rests after step 1: bridge_resting.py [wrong]. wrong: a weight of the
resting one changes before step 3 ends, and nothing depends on it."""
import sys

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    model, second = nn.Linear(4, 2), nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (second, model)]
    for step in range(6):
        for m, optimizer in zip((second, model), optimizers):
            if m is second and step > 1:
                continue
            optimizer.zero_grad()
            m(torch.randn(5, 4)).square().mean().backward()
            if step == 3 and len(sys.argv) > 1:
                second.weight.data[0, 0] += 1
            optimizer.step()
