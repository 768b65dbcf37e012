"""Trains a small transformer: data loader with workers, gradient accumulation, two parameter groups, clipping, a
schedule, dropout, tied weights, an in-place activation, an evaluation after every second step. Prints each loss bit by
bit and a hash of the weights.

bridge_gpt.py [--steps N] [--fault KIND@STEP] [--foreach] [--resume FILE] [--save FILE [--save-at STEP]]
KIND: bitflip (one bit of a weight of blocks.1.fc1), dropout (other masks in blocks.0.drop), off (no masks there), lr, order (of
the data), init (other initial weights). --foreach: the optimizer's other implementation, which gives the same here."""
import argparse
import hashlib
import struct

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, LENGTH, BATCH, MICRO_STEPS = 31, 16, 8, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.share = 1  # of the attention in what the block computes by itself

    def forward(self, x, mask=None):
        y = self.ln1(x)
        x = torch.add(x, self.attn(y, y, y, attn_mask=mask, need_weights=False)[0], alpha=self.share)
        return x + self.drop(self.fc2(self.act(self.fc1(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask=self.mask)
        return {"logits": self.head(self.ln(x))}


class Text(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)


def bits(value):
    return struct.pack(">f", value).hex()


def hash_of(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def plant(fault, step, model, optimizer):
    kind, at = fault
    if step != at:
        return
    if kind == "bitflip":
        with torch.no_grad():
            model.blocks[1].fc1.weight.view(torch.int32)[3, 5] ^= 1 << 20
    elif kind == "share":
        model.blocks[1].share = 2
    elif kind == "off":
        model.blocks[0].drop.eval()
    elif kind == "lr":
        optimizer.param_groups[0]["lr"] *= 1.001
    elif kind == "dropout":
        state = []

        def reseed(module, args):
            state.append(torch.get_rng_state())
            torch.manual_seed(12345)

        def restore(module, args, output):
            torch.set_rng_state(state.pop())

        handles = [model.blocks[0].drop.register_forward_pre_hook(reseed)]
        handles.append(model.blocks[0].drop.register_forward_hook(restore))
        model.to_remove = handles


def save(step, model, optimizer, schedule, path):
    """Before the step."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                "rng": torch.get_rng_state(), "step": step}, path)


def train(options):
    fault = (options.fault.split("@")[0], int(options.fault.split("@")[1])) if options.fault else (None, -1)
    torch.manual_seed(1 if fault[0] != "init" else 2)
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=options.foreach or None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    first = 0
    if options.resume:
        saved = torch.load(options.resume, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        torch.set_rng_state(saved["rng"])
        first = saved["step"]
    order = [(7 * i) % 4096 for i in range(options.steps * BATCH * MICRO_STEPS)]
    if fault[0] == "order":
        at = fault[1] * BATCH * MICRO_STEPS
        order[at], order[at + 1] = order[at + 1], order[at]
    order = order[first * BATCH * MICRO_STEPS:]
    loader = iter(DataLoader(Text(), batch_size=BATCH, sampler=order, num_workers=2, generator=torch.Generator()))
    for step in range(first, options.steps):
        if step == options.save_at:
            save(step, model, optimizer, schedule, options.save)
        plant(fault, step, model, optimizer)
        for _ in range(MICRO_STEPS):
            tokens = next(loader)
            logits = model(tokens[:, :-1])["logits"]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_STEPS
            loss.backward()
        if fault == ("grad", step):
            with torch.no_grad():
                model.blocks[1].fc1.weight.grad.mul_(1.01)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault != ("skip", step):
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for handle in model.__dict__.pop("to_remove", []):
            handle.remove()
        print(f"step {step} loss {bits(loss.item())} norm {bits(norm.item())}", flush=True)
        if step % 2 == 1:
            model.eval()
            with torch.no_grad():
                print(f"eval {bits(model(tokens[:, :-1])['logits'].mean().item())}", flush=True)
            model.train()
    print("weights", hash_of(model), flush=True)
    if options.save and options.save_at < 0:
        save(options.steps, model, optimizer, schedule, options.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fault", default="")
    parser.add_argument("--foreach", action="store_true")
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--save-at", type=int, default=-1)
    train(parser.parse_args())
