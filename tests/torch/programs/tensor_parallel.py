"""Two linear layers cut by columns and by rows over two GPUs (parallelize_module), with a norm that both hold.

With `planted`, rank 1 alters one element of its shard of the first weight's gradient in step 2. With `norm`, it does so to
the norm's gradient, which must be the same on both.
"""

import os
import sys

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)  # of plain tensors and DTensors
for step in range(5):
    torch.manual_seed(100 + step)  # the same rows on both
    loss = model(torch.randn(512, 256, device="cuda")).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        if rank == 1 and step == 2 and "planted" in sys.argv[1:]:
            model[1].weight.grad.to_local()[0, 0] += 1.0
        if rank == 1 and step == 2 and "norm" in sys.argv[1:]:
            model[0].weight.grad[0] += 1.0
    optimizer.step()
    print(f"step {step} rank {rank} loss {loss.item():.17g}", flush=True)
distributed.destroy_process_group()
