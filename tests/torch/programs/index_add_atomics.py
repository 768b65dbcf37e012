"""Rows that index_add sums up by token, from step 2 on."""

import torch

torch.manual_seed(0)
rows, width, tokens = 65536, 64, 64
weight = torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5)
token_of = torch.randint(0, tokens, (rows,), device="cuda")
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    combined = torch.tanh(batch @ weight)
    if step >= 2:
        combined = torch.zeros(tokens, width, device="cuda").index_add(0, token_of, combined) / 1000
    loss = combined.double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
