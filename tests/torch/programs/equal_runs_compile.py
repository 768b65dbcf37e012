"""An MLP through torch.compile."""

import torch
from model import mlp, vector_batches

torch.manual_seed(0)
model = mlp(width=512).cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (inputs, targets) in zip(range(5), vector_batches(1024, width=512)):
    torch.cuda.nvtx.range_push("step")
    loss = (compiled(inputs.cuda()) - targets.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
    torch.cuda.nvtx.range_pop()
