"""Groups of ranks beside the world on two GPUs: with a device bound at the start, PyTorch splits them off.

With `planted`, rank 1 combines its rows with atomics from step 2 on.
"""

import os
import sys

import torch
import torch.distributed as distributed

planted = "planted" in sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
pair = distributed.new_group([0, 1])
alone = [distributed.new_group([member]) for member in (0, 1)][rank]
torch.manual_seed(0)
rows, width, tokens = 8192, 128, 1000
weights = [torch.nn.Parameter(torch.randn(width, width, device="cuda") / width**0.5) for _ in range(3)]
token_of = torch.randint(0, tokens, (rows * width,), device="cuda")
torch.manual_seed(100 + rank)
for step in range(5):
    torch.cuda.nvtx.range_push("step")
    x = torch.randn(rows, width, device="cuda")
    for weight in weights:
        x = torch.tanh(x @ weight)
    combined = x.flatten()
    if planted and rank == 1 and step >= 2:
        combined = torch.zeros(tokens, device="cuda").scatter_add(0, token_of, combined) / 1000
    loss = combined.double().square().mean()
    loss.backward()
    with torch.no_grad():
        for weight, group in zip(weights, (None, pair, alone)):
            distributed.all_reduce(weight.grad, group=group)
            weight -= 0.01 * weight.grad
            weight.grad = None
        gathered = [torch.empty_like(weights[1]) for _ in range(2)]
        distributed.all_gather(gathered, weights[1].detach(), group=pair)
        parts = list(gathered[rank].chunk(2))
        received = [torch.empty_like(part) for part in parts]
        distributed.all_to_all(received, parts, group=pair)
        scattered = torch.empty_like(parts[0])
        distributed.reduce_scatter(scattered, received, op=distributed.ReduceOp.AVG, group=pair)
    print(f"step {step} rank {rank} loss {loss.item():.17g} sum {scattered.double().sum().item():.17g}", flush=True)
    torch.cuda.nvtx.range_pop()
distributed.destroy_process_group()
