"""A job that gives up in step 3, with status 3."""

import sys

import torch
from model import mlp, vector_batches

torch.manual_seed(0)
model = mlp().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (inputs, targets) in zip(range(8), vector_batches(1024)):
    torch.cuda.nvtx.range_push("step")
    loss = (model(inputs.cuda()) - targets.cuda()).square().mean()
    if step == 3:
        sys.exit(3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
    torch.cuda.nvtx.range_pop()
