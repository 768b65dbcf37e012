"""An MLP in float32; arm B switches to TF32 at step 2."""

import sys

import torch
from model import mlp, vector_batches

arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
model = mlp(width=512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (inputs, targets) in zip(range(5), vector_batches(512, width=512)):
    torch.cuda.nvtx.range_push("step")
    torch.backends.cuda.matmul.allow_tf32 = arm == "B" and step >= 2
    loss = (model(inputs.cuda()) - targets.cuda()).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
