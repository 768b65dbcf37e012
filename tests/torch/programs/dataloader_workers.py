"""Batches from worker processes: one loader forks them before CUDA is used, another one each time that it is asked."""

import torch
from model import mlp
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(256, generator=torch.Generator().manual_seed(index))


torch.manual_seed(0)
training = DataLoader(
    Samples(512), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
)
batches = iter(training)  # the workers are there before CUDA is
model = mlp().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    torch.cuda.nvtx.range_push("step")
    batch = next(batches).cuda()
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        with torch.no_grad():
            checks = DataLoader(Samples(128), batch_size=64, num_workers=2, multiprocessing_context="fork")
            errors = [model(held_out.cuda()).square().mean().item() for held_out in checks]
        print("held out", *(f"{error:.9g}" for error in errors))
    print(f"step {step} loss {loss.item():.9g}")
    torch.cuda.nvtx.range_pop()
