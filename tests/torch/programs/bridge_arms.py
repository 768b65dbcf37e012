"""Trains models one after the other; runs that are told to do CASEs differently differ in one thing each, or in nothing that
counts: bridge_arms.py CASE[,CASE...] [CASE[,CASE...] to be done differently]."""
import copy
import gc
import sys
import threading

import torch
from torch import nn

CASES = {}
ARM = 0
STEPS = 4


def case(function):
    CASES[function.__name__] = function
    return function


def net(*more):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 2))


def fit(model, optimizer=None, after=None, loss_of=None, batch=lambda step: torch.randn(5, 4), steps=STEPS):
    """after(step) is called behind each step."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        x = batch(step)
        (loss_of(x) if loss_of else model(x).square().mean()).backward()
        optimizer.step()
        if after:
            after(step)


@case
def clamped_behind_the_last_step():
    model = net()

    def after(step):
        if ARM and step == STEPS - 1:
            model[0].weight.data.clamp_(-0.01, 0.01)

    fit(model, after=after)
    globals()["kept"] = model


@case
def clamped_and_freed():
    """The model goes with the function that made it, before the program ends."""
    model = net()
    fit(model)
    if ARM:
        model[0].weight.data.clamp_(-0.01, 0.01)


@case
def root_changed_and_freed():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bias = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.fc(x) + self.bias

    model = Own()
    fit(model)
    if ARM:
        model.bias.data[0] += 1


@case
def statistics_behind_the_last_step():
    model = globals()["kept"] = net(nn.BatchNorm1d(8))
    fit(model)
    with torch.no_grad():
        for _ in range(1 + ARM):
            model(torch.ones(5, 4).add(torch.arange(5.0)[:, None]))


@case
def evaluated_behind_the_last_step():
    model = globals()["kept"] = net()

    def after(step):
        if ARM or step == STEPS - 2:
            with torch.no_grad():
                model(torch.ones(2, 4))

    fit(model, after=after)


@case
def average_in_a_copy():
    model = net()
    average = globals()["kept"] = copy.deepcopy(model)

    def after(step):
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1 + 0.1 * ARM)

    fit(model, after=after)


@case
def averaged_model():
    model = net()
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8 + 0.1 * ARM)
    average = globals()["kept"] = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
    fit(model, after=lambda step: average.update_parameters(model))


@case
def teacher_without_gradients():
    model, teacher = net(), net()

    def loss_of(x):
        with torch.no_grad():
            teacher(x)
        return model(x).square().mean()

    def after(step):
        if ARM and step == 1:
            teacher[2].bias.data[0] += 1

    fit(model, after=after, loss_of=loss_of)


@case
def statistics_of_a_teacher():
    model, teacher = net(), net(nn.BatchNorm1d(8)).eval()

    def loss_of(x):
        with torch.no_grad():
            teacher(x)
        return model(x).square().mean()

    def after(step):
        if ARM and step == 1:
            teacher[2].running_mean[0] += 1

    fit(model, after=after, loss_of=loss_of)


@case
def buffer_of_a_layer():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            return x * self.scale

    model = net(Scaled())

    def after(step):
        if ARM and step == 1:
            model[2].scale[3] = 2

    fit(model, after=after)


@case
def garbage_optimizers():
    """Garbage that only the collector finds, which comes early in one run and never in the other."""
    gc.disable()
    for _ in range(2):
        model, holder = net(), []
        holder.append((holder, torch.optim.SGD(model.parameters(), lr=0.1), model))
        fit(model, holder[0][1])
        del model, holder
        if not ARM:
            gc.collect()


@case
def garbage_models():
    gc.disable()
    for _ in range(3):
        model = net()
        model.itself = [model]
        fit(model, steps=2)
        del model
        if not ARM:
            gc.collect()


@case
def threads_of_one_module():
    """Two threads call a layer twice each: one after the other, or taking turns."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            if ARM and threading.current_thread() is not threading.main_thread():
                turns.wait()
            return self.fc(x)

    turns, model = threading.Barrier(2), Twice()

    def loss_of(x):
        workers = [threading.Thread(target=model, args=(torch.ones(5, 4),)) for _ in range(2)]
        for worker in workers:
            worker.start()
            if not ARM:
                worker.join()
        for worker in workers:
            worker.join()
        return model(x).square().mean()

    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=loss_of)


@case
def evaluation_with_gradients():
    model = net(nn.Dropout(0.5))

    def after(step):
        if ARM or step == 1:
            model.eval()
            model(torch.ones(2, 4))
            model.train()

    fit(model, after=after)


@case
def trained_in_evaluation_mode():
    model = net(nn.BatchNorm1d(8)).eval()
    fit(model, batch=lambda step: torch.randn(5, 4) + (ARM and step == 2))


@case
def long_evaluation():
    native = sys.modules.get("_forkpoint_bridge._native")

    def after(step):
        if step == 1 and native is not None:
            where = native.frame(2, "evaluated", "", 0, 1)
            for i in range(270000 if ARM else 10):
                native.scalar(where, 7, "value", 1.0)

    fit(net(), after=after)


@case
def step_that_raises():
    class Raises(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            if self.steps == 2:
                raise ValueError

    model = net()
    optimizer = Raises(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 4) + (ARM and step == 3)).square().mean().backward()
        try:
            optimizer.step()
        except ValueError:
            pass


@case
def modules_made_in_forward():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(50))

        def forward(self, x):
            for layer in self.layers:
                x = nn.Softmax(dim=1)(layer(x))
            return x

    names, walks = sys.modules.get("_forkpoint_bridge.names"), []
    if names is not None:
        original = names._walk
        names._walk = lambda *args: (walks.append(1), original(*args))[1]
    fit(Fresh())
    # Each module of the tree once, when it is named; not once for each of the 200 that are made.
    assert len(walks) < 200, f"{len(walks)} modules were looked at to name them, expected about 52"


if __name__ == "__main__":
    torch.set_num_threads(1)
    changed = sys.argv[2].split(",") if len(sys.argv) > 2 else []
    for name in sys.argv[1].split(","):
        ARM = int(name in changed)
        globals().pop("kept", None)
        torch.manual_seed(0)
        CASES[name]()
        gc.enable()
