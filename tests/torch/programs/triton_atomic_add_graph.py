"""A training step with a Triton kernel that sums with atomics, captured in a CUDA graph; steps 2 to 5 replay it."""

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
weight = torch.randn(width, width, device="cuda") / width**0.5
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
batch = torch.zeros(rows, width, device="cuda")
sums = torch.zeros(tokens, device="cuda")


def train(with_sums):
    hidden = torch.tanh(batch @ weight)
    loss = hidden.double().square().mean()
    if with_sums:
        sums.zero_()
        sum_by_token[(triton.cdiv(hidden.numel(), 1024),)](hidden, token_of, sums, hidden.numel(), BLOCK=1024)
        loss = loss * (1 + (sums / 100).double().square().mean())
    weight.mul_(1 - 0.01 * torch.sigmoid(loss).float())
    return loss


# Compiled before the capture, by a launch in which each value has a token of its own.
sum_by_token[(1,)](batch, torch.arange(tokens, device="cuda"), sums, 16, BLOCK=1024)
train(with_sums=False)  # the libraries set themselves up
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured_loss = train(with_sums=True)

for step in range(6):
    torch.cuda.nvtx.range_push("step")
    batch.copy_(torch.randn(rows, width, device="cuda"))
    if step < 2:
        loss = train(with_sums=False)
    else:
        graph.replay()
        loss = captured_loss
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
