"""Training with a layer whose output nobody uses. Arm B hands it something else from step 2 on: no loss, gradient or weight
ever differs, and the layer's output does."""

import sys

import torch
from model import mlp, vector_batches
from torch import nn


class Observed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.observer = mlp(width), nn.Linear(width, 8)
        self.factor = 1.0

    def forward(self, x):
        with torch.no_grad():
            self.observer(x * self.factor)
        return self.body(x)


arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
model = Observed(256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (inputs, targets) in zip(range(5), vector_batches(512)):
    torch.cuda.nvtx.range_push("step")
    if arm == "B" and step >= 2:
        model.factor = 1.5
    loss = (model(inputs.cuda()) - targets.cuda()).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
torch.cuda.synchronize()
