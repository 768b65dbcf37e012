"""DistributedDataParallel on two GPUs. With `planted`, rank 1 combines its rows with atomics from step 2 on."""

import os
import sys

import torch
import torch.distributed as distributed
from model import mlp

planted = "planted" in sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl")
torch.manual_seed(0)
rows, width, tokens = 8192, 256, 1000
model = torch.nn.parallel.DistributedDataParallel(mlp(width).cuda(), device_ids=[rank], bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
torch.manual_seed(100 + rank)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    combined = model(torch.randn(rows, width, device="cuda")).flatten()
    if planted and rank == 1 and step >= 2:
        combined = torch.zeros(tokens, device="cuda").scatter_add(0, token_of, combined) / 1000
    loss = combined.double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} rank {rank} loss {loss.item():.17g}", flush=True)
    torch.cuda.nvtx.range_pop()
distributed.destroy_process_group()
