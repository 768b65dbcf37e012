"""An MLP whose bias and activation are a Triton kernel without atomics."""

import torch
import triton
import triton.language as tl


@triton.jit
def bias_and_square_relu(values, bias, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(values + row * width + at, mask=inside, other=0.0) + tl.load(bias + at, mask=inside, other=0.0)
    positive = tl.maximum(x, 0.0)
    tl.store(out + row * width + at, positive * positive, mask=inside)


torch.manual_seed(0)
rows, width = 1024, 256
weight, bias = torch.randn(width, width, device="cuda") / width**0.5, torch.zeros(width, device="cuda")
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    product, hidden = batch @ weight, torch.empty(rows, width, device="cuda")
    bias_and_square_relu[(rows,)](product, bias, hidden, width, BLOCK=256)
    loss = hidden.double().square().mean()
    gradient = 2 * hidden.sqrt() * hidden / rows  # up to a factor
    weight.sub_(1e-3 * (batch.t() @ gradient))
    bias.sub_(1e-3 * gradient.sum(0))
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
