"""A 4-layer GPT, trained with deterministic algorithms."""

import os

import torch
from model import GPT, token_batches

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = GPT(vocabulary=512, length=128, width=256, heads=8, layers=4).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("allocator", torch.cuda.memory.get_allocator_backend(), os.environ.get("PYTORCH_ALLOC_CONF", ""))
for step, (tokens, targets) in zip(range(5), token_batches(512, 16, 128)):
    torch.cuda.nvtx.range_push("step")
    loss = model(tokens.cuda(), targets.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9g}")
    torch.cuda.nvtx.range_pop()
