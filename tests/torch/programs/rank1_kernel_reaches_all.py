"""Data-parallel training on two GPUs. From step 2 on rank 1 combines its rows with scatter_add; rank 0 never does."""

import os

import torch
import torch.distributed as distributed

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
rows, width, tokens = 8192, 128, 1000
weight = torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5)
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
torch.manual_seed(100 + rank)
for step in range(6):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(rows, width, device="cuda")
    combined = torch.tanh(batch @ weight).flatten()
    if rank == 1 and step >= 2:
        combined = torch.zeros(tokens, device="cuda").scatter_add(0, token_of, combined) / 1000
    loss = combined.double().square().mean()
    loss.backward()
    with torch.no_grad():
        distributed.all_reduce(weight.grad)
        weight -= 0.01 * weight.grad
        weight.grad = None
    print(f"step {step} rank {rank} loss {loss.item():.17g}", flush=True)
    torch.cuda.nvtx.range_pop()
distributed.destroy_process_group()
