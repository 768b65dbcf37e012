"""A job that reads past the end of a table on the GPU in step 3, after which CUDA is of no use to it."""

import torch
from model import mlp, vector_batches

torch.manual_seed(0)
model = mlp().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
table = torch.ones(100, device="cuda")
for step, (inputs, targets) in zip(range(8), vector_batches(1024)):
    torch.cuda.nvtx.range_push("step")
    loss = (model(inputs.cuda()) - targets.cuda()).square().mean()
    index = torch.full((32,), 99 if step < 3 else 1 << 20, device="cuda")
    loss = loss * table[index].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}", flush=True)
    torch.cuda.nvtx.range_pop()
