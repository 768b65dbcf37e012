"""Learns a density; from step 2 on its distribution function, a scan of a million floats, is what is fitted."""

import torch
from torch.nn import functional

torch.manual_seed(0)
bins = 1_000_003
logits = torch.nn.Parameter(torch.randn(bins, device="cuda"))
wanted = torch.linspace(0, 1, bins, device="cuda")
optimizer = torch.optim.SGD([logits], lr=0.1)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    density = functional.softplus(logits) / bins
    distribution = density.cumsum(0) if step >= 2 else density * bins
    loss = (distribution - wanted).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
