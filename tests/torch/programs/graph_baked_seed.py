"""Dropout with a new seed each step. Arm B replays it from a CUDA graph, into which the first seed is baked."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def dropout(values, dropped, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > 0.5
    tl.store(dropped + at, tl.where(keep, tl.load(values + at) * 2, 0.0))


arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
rows, width, first_seed = 512, 128, 21
weight = torch.randn(width, width, device="cuda") / width**0.5
hidden, dropped = torch.zeros(rows, width, device="cuda"), torch.zeros(rows, width, device="cuda")


def drop(seed):
    dropout[(rows * width // 1024,)](hidden, dropped, seed, BLOCK=1024)


drop(first_seed)  # compiled
graph = torch.cuda.CUDAGraph()
if arm == "B":
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        drop(first_seed)

for step in range(5):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    hidden.copy_(torch.tanh(batch @ weight))
    if arm == "B":
        graph.replay()
    else:
        drop(first_seed + 2 * step)  # odd: Triton makes another kernel for multiples of 16
    loss = dropped.double().square().mean()
    weight.sub_(1e-4 * (batch.t() @ dropped))
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
