"""A small training in which something becomes non-finite. Tells on stderr when each step begins, and prints each loss.

bridge_watch.py KIND [--steps N] [--pause SECONDS]
KIND: nan (a module's output, from step 3 on), scaler (the gradients of steps 3 and 4; a GradScaler skips those), mask (an
attention mask of -infinity, in every step), none."""
import argparse
import sys
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["nan", "scaler", "mask", "none"])
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 4)
        self.step = 0

    def forward(self, x, mask):
        hidden = self.fc1(x)
        if given.kind == "nan" and self.step >= 3:
            hidden = hidden * float("nan")
        return torch.softmax(self.fc2(torch.relu(hidden)) + mask, -1)


torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=given.kind == "scaler")
mask = torch.tensor([0.0, 0.0, 0.0, float("-inf") if given.kind == "mask" else 0.0])
for step in range(given.steps):
    print(f"step {step} begins", file=sys.stderr, flush=True)
    model.step = step
    optimizer.zero_grad()
    loss = model(torch.randn(5, 4), mask).square().mean()
    if given.kind == "scaler" and step in (3, 4):
        loss = loss + torch.sqrt(0 * model.fc1.weight).sum()  # 0, and its gradient is not finite
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"loss {loss.item().hex()}", flush=True)
    time.sleep(given.pause)
