"""A training whose batches and activations lie in a torch.cuda.MemPool.

With `planted`, rows are combined with atomics from step 2 on.
"""

import sys

import torch
from model import mlp

planted = "planted" in sys.argv[1:]
torch.manual_seed(0)
rows, width, tokens = 16384, 256, 1000
model = mlp(width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
pool = torch.cuda.MemPool()
print("allocator", torch.cuda.memory.get_allocator_backend())
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    with torch.cuda.use_mem_pool(pool):
        combined = model(torch.randn(rows, width, device="cuda")).flatten()
        if planted and step >= 2:
            combined = torch.zeros(tokens, device="cuda").scatter_add(0, token_of, combined) / 1000
        loss = combined.double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
