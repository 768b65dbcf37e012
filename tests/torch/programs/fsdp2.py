"""fully_shard (FSDP2) on two GPUs: all-gathers and reduce-scatters of what each layer needs.

With `planted`, rank 1 combines its rows with atomics from step 2 on. With `factor`, gradients are divided by 3: NCCL is
then asked for a reduction of the program's own (PreMulSum).
"""

import os
import sys

import torch
import torch.distributed as distributed
from model import mlp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

planted, factor = ("planted" in sys.argv[1:]), ("factor" in sys.argv[1:])
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
mesh = init_device_mesh("cuda", (2,))
torch.manual_seed(0)
rows, width, tokens = 8192, 256, 1000
model = mlp(width).cuda()
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
        if factor:
            layer.set_gradient_divide_factor(3.0)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
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
