"""Trains with activation checkpointing: bridge_checkpoint.py {plain,reentrant,nonreentrant} [wrong-mask]
wrong-mask: the recomputation draws other dropout masks than the first pass did (preserve_rng_state=False)."""
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge_gpt import bits, hash_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(self.drop(torch.relu(self.fc1(x))))


class Net(nn.Module):
    def __init__(self, kind, keep):
        super().__init__()
        self.kind, self.keep = kind, keep
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            if self.kind == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant", preserve_rng_state=self.keep)
        return self.out(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net(sys.argv[1], "wrong-mask" not in sys.argv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        loss = model(torch.randn(6, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {bits(loss.item())}", flush=True)
    print("weights", hash_of(model), flush=True)
