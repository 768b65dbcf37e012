"""Trains a small model whose parameters and gradients are in place only when somebody has waited for them, as those of sharded
optimizers are: between two steps memory holds random bytes, and a module's own pre-hook brings the weights in, the optimizer's
own pre-hook the gradients.

late_parameters.py [FAULT]: of step 2, one element of one of them is another: "position" (of the root itself), "weight" (of a layer
that reduces its output over the ranks, of which there is one), "gradient" (of that weight). "observed": in step 2 a layer that
writes its parameter itself, in forward(), writes another value. "hooks": trains nothing, but looks at its modules' hooks."""
import copy
import os
import pickle
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Reduced(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = x @ self.weight
        dist.all_reduce(y.detach().clone())
        return y


class Observed(nn.Module):
    """As a quantizer's observer: has no other modules, and its parameter is another one before forward() and behind it."""
    altered = False

    def __init__(self):
        super().__init__()
        self.largest = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        largest = x.detach().abs().max() + self.altered
        self.largest.copy_(torch.stack([self.largest[1], largest]))
        return x / (1 + self.largest.mean())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.first, self.norm, self.observed, self.reduced = nn.Linear(8, 8), nn.BatchNorm1d(8), Observed(), Reduced()

    def forward(self, x):
        return self.reduced(self.observed(self.norm(self.first(x * self.scale + self.position))))


def scramble(tensor):
    """To numbers that no two runs share."""
    with torch.no_grad():
        tensor.copy_(torch.frombuffer(bytearray(os.urandom(tensor.numel() * 2)), dtype=torch.int16).view(tensor.shape))


class Late:
    """What is waited for: the true values, by parameter."""

    def __init__(self):
        self.kept = {}

    def leave(self, tensors):
        for tensor in tensors:
            self.kept[tensor] = tensor.detach().clone()
            scramble(tensor)

    def bring(self, tensors):
        with torch.no_grad():
            for tensor in tensors:
                if tensor in self.kept:
                    # What is under way here is no part of the layer: other modules, operators and collectives.
                    self.idle(torch.ones(2) + 1)
                    dist.all_reduce(torch.ones(2))
                    tensor.copy_(self.kept.pop(tensor))

    idle = nn.Identity()


def train():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())
    torch.manual_seed(5)
    model, weights, gradients = Model(), Late(), Late()
    model.idle = weights.idle
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: weights.bring(module.parameters(recurse=False)))
    optimizer.register_step_pre_hook(lambda *_: gradients.bring(p.grad for p in trained))
    for step in range(4):
        if step == 2 and FAULT in ("position", "weight"):
            weights.kept[model.position if FAULT == "position" else model.reduced.weight].view(-1)[3] += 1
        model.observed.altered = step == 2 and FAULT == "observed"
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        if step == 2 and FAULT == "gradient":
            model.reduced.weight.grad[1, 1] += 1
        gradients.leave([p.grad for p in trained])
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item().hex(), flush=True)
        if step < 3:
            weights.leave(list(model.parameters()))


def doubled(module, args):
    return (args[0] * 2,)


def raised(module, args):
    return (args[0] + 1,)


def hooks_are_as_without_a_recording():
    """What a program can see of the hooks of its modules."""
    torch.manual_seed(6)
    module = nn.Linear(2, 2)
    handles = [module.register_forward_pre_hook(doubled), module.register_forward_pre_hook(raised, prepend=True)]
    table = module._forward_pre_hooks
    print(len(table), [hook.__name__ for _, hook in table.items()], [hook.__name__ for hook in table.values()])
    loaded = pickle.loads(pickle.dumps(table))
    print(type(loaded), [hook.__name__ for hook in loaded.values()], len(pickle.dumps(table)))
    others = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.compile(module, backend="eager", fullgraph=True)
    handles[1].remove()
    for each in (module, *others):
        print(each(torch.ones(1, 2)).tolist())
    handles[0].remove()
    print(len(table), module(torch.ones(1, 2)).tolist(), module._forward_pre_hooks is table)


if __name__ == "__main__":
    if FAULT == "hooks":
        hooks_are_as_without_a_recording()
    else:
        train()
        dist.destroy_process_group()
