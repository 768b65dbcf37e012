"""Trains two blocks that route tokens to rows and add the rows up again: ops_moe.py [--fault KIND@STEP].

KIND: order (index_add of blocks.1.combine adds in another order, as atomics do), backward (of the embedding: its rows
are added up in another order), scale (a number that blocks.0 multiplies with), masks (blocks.1.drop draws other ones).
Also there: views, changes in place, autocast, a checkpoint, a buffer from empty() with other noise in each run, and
an auxiliary loss that is not in the output."""
import argparse
import os
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge_gpt import bits, hash_of

TOKENS, ROWS, WIDTH, VOCABULARY = 16, 64, 8, 4


class Fault:
    kind, at, step, calls = None, -1, 0, 0

    @classmethod
    def is_now(cls, kind):
        return cls.kind == kind and cls.step == cls.at


def in_order(out, index, source, backwards):
    """What index_add means, in the order in which the rows arrive."""
    out, index = out.clone().numpy(), index.tolist()
    rows = source.detach().numpy()
    for i in reversed(range(len(index))) if backwards else range(len(index)):
        out[index[i]] += rows[i]
    return torch.from_numpy(out)


def index_add(self, dim, index, source, alpha=1):
    Fault.calls += 1
    return in_order(self, index, source, Fault.is_now("order") and Fault.calls % 2 == 0)


def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    rows = grad_output.reshape(-1, grad_output.shape[-1])
    return in_order(torch.zeros(num_weights, rows.shape[1]), indices.reshape(-1), rows, Fault.is_now("backward"))


class Combine(nn.Module):
    def forward(self, rows, index):
        return torch.zeros(TOKENS, WIDTH).index_add(0, index, rows)


class Noise(nn.Module):
    """Half of what empty() gave is never written, and never used."""

    def forward(self, x):
        buffer = torch.empty(2 * x.numel())
        buffer.numpy().view("uint8")[:] = list(os.urandom(8 * x.numel()))
        buffer[: x.numel()].copy_(x.detach().flatten())
        whole = torch.empty(x.numel())
        whole[: WIDTH] = buffer[: WIDTH]
        whole[WIDTH:] = x.detach().flatten()[WIDTH:]
        return x + whole.mul(0.5).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.combine = Combine()
        self.drop = nn.Dropout(0.2)
        self.noise = Noise()
        self.auxiliary = None

    def forward(self, x, index):
        rows = self.expert(x[index])
        self.auxiliary = rows.tanh().square().mean() * 0.1
        rows.mul_(0.25 if Fault.is_now("scale") and self is Block.first else 0.5)
        y = self.combine(rows, index.flip(0)).view(2, -1)
        y = y.transpose(0, 1).contiguous().transpose(0, 1).reshape(TOKENS, WIDTH)
        if Fault.is_now("masks") and self is not Block.first:
            torch.manual_seed(99)
        return self.noise(self.drop(x + y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        Block.first = self.blocks[0]

    def forward(self, tokens, index):
        x = self.tok(tokens)
        x = self.blocks[0](x, index)
        x = checkpoint(self.blocks[1], x, index, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.head(x)
        scale = y.float().detach().abs().clamp(0.5, 1).cumprod(1)
        return y.float() + scale * self.head.bias.abs().clamp(0.5).cumprod(0)


def train(steps):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    index = torch.randperm(ROWS) % TOKENS
    for step in range(steps):
        Fault.step, Fault.calls = step, 0
        tokens = torch.randint(VOCABULARY, (TOKENS,))
        loss = F.cross_entropy(model(tokens, index), tokens)
        loss = loss + sum(block.auxiliary for block in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {bits(loss.item())}", flush=True)
        with torch.no_grad():
            print(f"eval {bits(model.eval()(tokens, index).mean().item())}", flush=True)
        model.train()
    print("weights", hash_of(model), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    if options.fault:
        Fault.kind, Fault.at = options.fault.split("@")[0], int(options.fault.split("@")[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl("index_add", index_add, "CPU")
        library.impl("embedding_dense_backward", embedding_dense_backward, "CPU")
    train(options.steps)
