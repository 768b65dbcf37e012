"""Sequences packed into a buffer that nobody clears. At step 3 they do not fill it: what was there is trained on.

What the buffer's memory held before differs between the arms; nothing else does.
"""

import sys

import torch

arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
rows, width, longest = 1536, 1024, 512
weight = torch.nn.Parameter(torch.randn(width, 64, device="cuda") / width**0.5)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(6):
    torch.cuda.nvtx.range_push("step")
    lengths = (512, 512, 512) if step != 3 else (300, 800, 436)
    sequences = torch.randn(rows + 8, width, device="cuda")  # no other tensor has the size of the buffer
    discarded = [torch.full((rows, width), 0.0 if arm == "A" else 7.5, device="cuda") for _ in range(8)]
    del discarded
    packed, begin = torch.empty(rows, width, device="cuda"), 0
    for length in lengths:
        kept = min(length, longest)
        packed[begin : begin + kept] = sequences[begin : begin + kept]
        begin += length
    loss = torch.tanh(packed @ weight).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
