"""A long sum in each product: how cuBLAS splits it depends on the workspace that CUBLAS_WORKSPACE_CONFIG leaves it."""

import torch

torch.manual_seed(0)
narrow, long = 64, 16384
weight = torch.randn(long, narrow, device="cuda") / long**0.5
for step in range(4):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(narrow, long, device="cuda")
    hidden = torch.tanh(batch @ weight)
    loss = hidden.double().square().mean()
    weight.mul_(1 - 0.01 * loss.float())
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
