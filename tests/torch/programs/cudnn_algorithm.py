"""Convolutions: arm A asks cuDNN for deterministic algorithms, arm B for the fastest that a benchmark finds."""

import sys

import torch

arm = sys.argv[1] if len(sys.argv) > 1 else "A"
torch.manual_seed(0)
torch.backends.cudnn.benchmark = arm == "B"
torch.backends.cudnn.deterministic = arm == "A"
model = torch.nn.Sequential(
    torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    torch.cuda.nvtx.range_push("step")
    images = torch.randn(32, 64, 56, 56, device="cuda")
    loss = model(images).double().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.17g}")
    torch.cuda.nvtx.range_pop()
