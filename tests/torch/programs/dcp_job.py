"""A rank of a data-parallel job that imports torch's distributed checkpoints where it first uses them:
dcp_job.py straight | saving FOLDER (behind step 1) | resumed FOLDER (goes on with step 2)."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

kind, folder = sys.argv[1], (sys.argv + [""])[2]


def save(model, optimizer):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load(model, optimizer):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": states}
    checkpoint.load(kept, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])


if __name__ == "__main__":
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=world)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 2 if kind == "resumed" else 0
    if first:
        load(model, optimizer)
    for step in range(first, 4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if kind == "saving" and step == 1:
            save(model, optimizer)
        if rank == 0:
            print(f"step {step} loss {loss.item().hex()}", flush=True)
    dist.destroy_process_group()
