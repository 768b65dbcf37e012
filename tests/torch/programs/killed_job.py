"""A job that arm B ends with SIGKILL in the middle of step 5."""

import os
import signal
import sys
import time

import torch
from model import mlp, vector_batches

arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
model = mlp().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (inputs, targets) in zip(range(8), vector_batches(1024)):
    torch.cuda.nvtx.range_push("step")
    loss = (model(inputs.cuda()) - targets.cuda()).square().mean()
    if arm == "B" and step == 5:
        torch.cuda.synchronize()
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}", flush=True)
    torch.cuda.nvtx.range_pop()
