"""Experts whose outputs a scatter_add combines, from step 2 on; before it each row has an expert of its own."""

import torch

torch.manual_seed(0)
rows, width, tokens = 8192, 128, 1000
weight = torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    combined = torch.relu(batch @ weight).flatten()
    if step >= 2:
        combined = torch.zeros(tokens, device="cuda").scatter_add(0, token_of, combined) / 1000
    loss = combined.double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
