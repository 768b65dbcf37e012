"""Training that also computes a statistic whose last bits differ from run to run.

drop: nobody looks at the statistic, and it is freed. keep: it is kept to the end, and still nobody looks.
"""

import sys

import torch
import triton
import triton.language as tl
from model import mlp, vector_batches


@triton.jit
def sum_by_token(values, token_of, sums, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(token_of + at, mask=inside, other=0)
    tl.atomic_add(sums + token, tl.load(values + at, mask=inside, other=0.0), mask=inside)


what = sys.argv[1] if len(sys.argv) > 1 else "drop"
torch.manual_seed(0)
rows, width, tokens = 4096, 256, 1000
model = mlp(width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
kept = []
for step, (inputs, targets) in zip(range(5), vector_batches(rows, width)):
    torch.cuda.nvtx.range_push("step")
    predicted = model(inputs.cuda())
    statistic = torch.zeros(tokens, device="cuda")
    sum_by_token[(rows * width // 1024,)](predicted.detach(), token_of, statistic, rows * width, BLOCK=1024)
    if what == "keep":
        kept.append(statistic)
    del statistic
    loss = (predicted - targets.cuda()).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
torch.cuda.synchronize()
