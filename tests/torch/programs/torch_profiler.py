"""A job that profiles itself. Usage: torch_profiler.py FIRST:LAST (the steps that are profiled)"""

import sys

import torch
from model import mlp, vector_batches
from torch.profiler import ProfilerActivity, profile

first, last = map(int, sys.argv[1].split(":"))
torch.manual_seed(0)
model = mlp().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
for step, (inputs, targets) in zip(range(8), vector_batches(1024)):
    torch.cuda.nvtx.range_push("step")
    if step == first:
        profiler.start()
    loss = (model(inputs.cuda()) - targets.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
    if step == last:
        torch.cuda.synchronize()
        profiler.stop()
    torch.cuda.nvtx.range_pop()
events = profiler.events()
on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
print(f"profiled {len(events) > 0} kernels {len(on_device) > 0}")
