"""Trains a small mixture-of-experts GPT on the bytes of a text: an ordinary PyTorch program, which knows nothing of forkpoint.

    python samples/torch/train.py --steps 20
    torchrun --nproc-per-node 2 samples/torch/train.py --steps 20          # DDP: NCCL on GPUs, else gloo

Saves OUT/ckpt_STEP.pt every --every steps and goes on from one with --from. Two runs are equal to the last bit, on one GPU
each or on the CPU. The exceptions are faults that can be switched on:
    --unordered STEP  from that step on the last rank adds up the experts of blocks.1 with index_add, whose additions are atomic
                      on a GPU (and come in a drawn order on a CPU): another sum each time
    --wrong-lr STEP   that step is made with half the learning rate
"""
import argparse
import os
import pathlib
import random
import time

import torch
import torch.distributed as distributed
from torch import nn

EXPERTS, CHOSEN = 8, 4
TEXT = pathlib.Path(__file__).resolve().parents[1] / "minigpt" / "text.txt"


class Experts(nn.Module):
    """Each row is handled by CHOSEN experts; what they give is added up, weighted."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * dim, dim) / (2 * dim) ** 0.5)
        self.unordered = False

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(rows).softmax(-1).topk(CHOSEN)
        weight = torch.zeros(len(rows), EXPERTS, device=x.device).scatter(1, chosen, weight)
        given = torch.relu(rows @ self.up) @ self.down  # EXPERTS, rows, dim: small enough to let every expert work
        return self.combine(given * weight.T[..., None]).view_as(x)

    def combine(self, parts):
        if not self.unordered:
            return parts.sum(0)
        count, rows, dim = parts.shape
        row = torch.arange(rows, device=parts.device).repeat(count)
        parts = parts.reshape(-1, dim)
        if parts.device.type == "cpu":
            order = torch.tensor(random.SystemRandom().sample(range(len(row)), len(row)))
            row, parts = row[order], parts[order]
        return torch.zeros(rows, dim, device=parts.device, dtype=parts.dtype).index_add(0, row, parts)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(dim, dim=-1))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(mask, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.experts = nn.LayerNorm(dim), Experts(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.experts(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(256, options.dim)
        self.places = nn.Parameter(0.02 * torch.randn(options.length, options.dim))
        self.blocks = nn.ModuleList(Block(options.dim, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, 256)

    def forward(self, tokens):
        # One-hot: the gradient of an embedding is added up with atomics on a GPU.
        x = nn.functional.one_hot(tokens, 256).to(self.tokens.weight.dtype) @ self.tokens.weight + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("steps", 20), ("every", 10), ("layers", 2), ("dim", 32), ("heads", 2), ("length", 32), ("batch", 4),
                        ("unordered", -1), ("wrong-lr", -1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    parser.add_argument("--from", dest="start")
    parser.add_argument("--pace", type=float, default=0, help="seconds to sleep after each step")
    return parser.parse_args()


def batch_of(text, step, rank, options):
    """Depends on the step and the rank alone."""
    generator = torch.Generator().manual_seed(1000003 * step + rank)
    begins = torch.randint(0, len(text) - options.length - 1, (options.batch,), generator=generator)
    return torch.stack([text[begin:begin + options.length + 1] for begin in begins.tolist()])


def save(options, step, model, optimizer):
    path = f"{options.out}/ckpt_{step}.pt"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".part")
    os.rename(path + ".part", path)


def main():
    options = parse()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(1)
    model = whole = GPT(options).to(device)
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(whole, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    first = 0
    if options.start:
        saved = torch.load(options.start, map_location=device, weights_only=True)
        first = saved["step"]
        whole.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, options.steps):
        whole.blocks[1].experts.unordered = 0 <= options.unordered <= step and rank == ranks - 1
        optimizer.param_groups[0]["lr"] = 5e-4 if step == options.wrong_lr else 1e-3
        tokens = batch_of(text, step, rank, options).to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step:5d}  loss {loss.item():.6f}", flush=True)
            if options.out and (step + 1) % options.every == 0:
                save(options, step + 1, whole, optimizer)
        time.sleep(options.pace)
    if ranks > 1:
        distributed.destroy_process_group()


main()
