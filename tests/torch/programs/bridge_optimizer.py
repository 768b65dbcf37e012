"""An optimizer that keeps other things than tensors and numbers: bridge_optimizer.py [CHANGE...]. A CHANGE names
what is another in one step: the first in step 2, the next in step 3; the weights do not depend on it. `unreadable`: it keeps an
object that nobody can look into, from then on."""
import sys

import numpy
import torch
from torch import nn


class Keeper(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "mode": "plain", "seed": 2**60, "norm": torch.norm, "none": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("array", numpy.zeros(3))
                kinds = {"dtype": torch.float32, "bytes": b"ab", "scalar": numpy.float32(1), "complex": 1j}
                state.setdefault("kinds", kinds)
                parameter -= group["lr"] * parameter.grad
        self.state.setdefault("shared", {"count": 0})["count"] += 1


def change(optimizer, parameter, what, back):
    """back: as it was."""
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    if what == "mode":
        group["mode"] = "plain" if back else "other"
    elif what == "seed":
        group["seed"] += -1 if back else 1
    elif what == "array":
        state["array"][1] = 0 if back else 1
    elif what == "shared":
        optimizer.state["shared"]["count"] += -1 if back else 1
    elif what == "scalar":
        state["kinds"]["scalar"] = numpy.float32(1 if back else 2)
    elif what == "unreadable":
        state["object"] = object()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Keeper(model.parameters())
    changes = dict(enumerate(sys.argv[1:], 2))
    for step in range(8):
        if step - 1 in changes:
            change(optimizer, model.weight, changes[step - 1], True)
        if step in changes:
            change(optimizer, model.weight, changes[step], False)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
