"""A Triton kernel that sums with atomics, in the order in which its programs arrive; used from step 2 on."""

import torch
import triton
import triton.language as tl


@triton.jit
def sum_by_token(values, token_of, sums, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(token_of + at, mask=inside, other=0)
    tl.atomic_add(sums + token, tl.load(values + at, mask=inside, other=0.0), mask=inside)


torch.manual_seed(0)
rows, width, tokens = 8192, 128, 1000
weight = torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    hidden = torch.tanh(batch @ weight)
    loss = hidden.double().square().mean()
    if step >= 2:
        sums = torch.zeros(tokens, device="cuda")
        sum_by_token[(triton.cdiv(hidden.numel(), 1024),)](hidden.detach(), token_of, sums, hidden.numel(), BLOCK=1024)
        loss = loss * (1 + (sums / 100).double().square().mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
