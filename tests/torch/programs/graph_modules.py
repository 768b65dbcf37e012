"""CUDA graphs in training, on a GPU: graph_modules.py callables|step.

callables: a block is graphed (torch.cuda.make_graphed_callables) and called in an ordinary loop. step: the whole step,
optimizer and all, is captured once and replayed."""
import sys

import torch
from torch import nn

from bridge_gpt import bits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(16, 32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.block(self.inlet(x)))


def callables(net, optimizer):
    net.block = torch.cuda.make_graphed_callables(net.block, (torch.randn(8, 32, device="cuda", requires_grad=True),))
    for step in range(4):
        loss = net(torch.randn(8, 16, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", bits(loss.item()), flush=True)


def step(net, optimizer):
    x = torch.randn(8, 16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    for _ in range(4):
        x.copy_(torch.randn(8, 16, device="cuda"))
        graph.replay()
        print("loss", bits(loss.item()), flush=True)


torch.manual_seed(0)
model = Net().cuda()
{"callables": callables, "step": step}[sys.argv[1]](model, torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))
