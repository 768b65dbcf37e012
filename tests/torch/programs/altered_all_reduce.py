"""Data-parallel training on two GPUs: two weights, one all-reduce for each a step."""

import os

import torch
import torch.distributed as distributed

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
width = 256
weights = [torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5) for _ in range(2)]
torch.manual_seed(100 + rank)
for step in range(6):
    torch.cuda.nvtx.range_push("step")
    batch = torch.randn(512, width, device="cuda")
    loss = (torch.tanh(batch @ weights[0]) @ weights[1] - batch).double().square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in weights:
            distributed.all_reduce(weight.grad)
            weight -= 0.05 * weight.grad
            weight.grad = None
    print(f"step {step} rank {rank} loss {loss.item():.17g}", flush=True)
    torch.cuda.nvtx.range_pop()
distributed.destroy_process_group()
