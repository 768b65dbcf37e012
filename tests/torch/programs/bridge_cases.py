"""Small training programs: bridge_cases.py NAME..., one after the other. Each prints its losses bit by bit and a hash of its weights."""
import collections
import copy
import dataclasses
import pickle
import random
import sys
import threading
import typing
import warnings

import torch
from torch import nn

from bridge_gpt import bits, hash_of

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Net(nn.Sequential):
    def __init__(self, *more):
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), *more, nn.Linear(8, 2))


def fit(model, optimizer=None, steps=3, loss_of=None, backward=None, batch=lambda: torch.randn(5, 4)):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = loss_of or (lambda x: model(x).square().mean())
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(batch())
        backward(loss) if backward else loss.backward()
        optimizer.step()
        print(f"step {step} loss {bits(loss.item())}", flush=True)
    print("weights", hash_of(model), flush=True)


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Answer:
    hidden: torch.Tensor
    both: Pair
    nothing: typing.Optional[torch.Tensor] = None


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: a dictionary whose keys are attributes too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@case
def nested():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 8)

        def forward(self, batch, *, scale):
            y = self.fc(batch["x"]) * scale
            return Answer(y, Pair(y.sum(), [y[0], {"deep": y[1]}]))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Inner(), nn.Linear(8, 2)

        def forward(self, x):
            answer = self.inner({"x": x, "name": "text"}, scale=torch.tensor(2.0))
            return ModelOutput(logits=self.out(answer.hidden), extra=(answer.both.left,))

    model = Outer()
    fit(model, loss_of=lambda x: (lambda o: o.logits.square().mean() + o["extra"][0])(model(x)))


@case
def views_and_in_place():
    class Shift(nn.Module):
        def forward(self, x):
            return x.add_(1)

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.shift, self.same = nn.Linear(4, 8), Shift(), nn.Identity()

        def forward(self, x):
            y = self.fc(x)
            y.mul_(2)                     # in place on a module's output
            self.shift(y[:, :4])          # in place on a view of it
            z = self.same(y)[:, 2:6]       # a view of it
            return z.add_(1), self.fc.weight

    model = Views()
    fit(model, loss_of=lambda x: (lambda o: o[0].square().mean() + o[1].abs().sum())(model(x)))


@case
def shared_and_stray():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.again = self.fc
            self.hidden = [nn.Linear(4, 4), nn.Linear(4, 4)]  # no registered parts

        def forward(self, x):
            for layer in (self.fc, self.again, *self.hidden):
                x = torch.tanh(layer(x))
            return nn.Softmax(dim=1)(x)

    fit(Shared())


@case
def modules_made_in_forward():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return nn.Softmax(dim=1)(nn.Sequential(nn.Tanh())(self.fc(x)))

    model = Fresh()
    fit(model, steps=40)
    names = sys.modules.get("_forkpoint_bridge.names")
    known = [len(tree.children) for tree in names.trees.values()] if names else [2]
    assert max(known) <= 5, f"modules that are gone are listed: {known}, expected the model's two and the last ones"


@case
def lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2))
    fit(model, torch.optim.Adam(model.parameters()))


@case
def seeding_functions():
    import numpy

    model = Net()
    loader = torch.utils.data.DataLoader(torch.randn(6, 4), 3, num_workers=1, multiprocessing_context="spawn",
                                         worker_init_fn=random.seed)
    fit(model, steps=1, batch=lambda: next(iter(loader)))
    for function in random.seed, random.setstate, numpy.random.seed, numpy.random.set_state:
        assert callable(pickle.loads(pickle.dumps(function))) and callable(copy.deepcopy(function))
        print(function.__name__, function.__doc__, flush=True)


@case
def own_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * 2, y * 3

        @staticmethod
        def backward(ctx, a, b):
            return a * 2, b * 3

    class Layer(nn.Module):
        def forward(self, x, y):
            return Double.apply(x, y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.two = nn.Linear(4, 4), Layer()

        def forward(self, x):
            y = self.fc(x)
            return self.two(y, x)[0] + self.two(y, y)[1]

    fit(Model())


@case
def double_backward():
    model = Net()
    model[1] = nn.Tanh()

    def loss_of(x):
        x.requires_grad_()
        y = model(x).square().sum()
        grad, = torch.autograd.grad(y, x, create_graph=True)
        return y + grad.square().sum()

    fit(model, loss_of=loss_of)


@case
def retain_graph():
    model = Net()
    fit(model, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward()))


@case
def frozen_and_unused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            self.unused(x)
            return self.norm(self.used(self.frozen(x)))

    fit(Model())


@case
def parameter_replaced():
    model = Net()
    fit(model, steps=2)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    fit(model, steps=2)


@case
def autocast():
    model = Net(nn.LayerNorm(8))

    def loss_of(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    fit(model, loss_of=loss_of)


@case
def transforms():
    model = Net()
    model[1] = nn.Tanh()

    def loss_of(x):
        parameters = dict(model.named_parameters())
        one = lambda p, row: torch.func.functional_call(model, p, (row,)).square().sum()
        per_row = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, x)
        return model(x).square().mean() + per_row["0.bias"].detach().mean()

    fit(model, loss_of=loss_of)


@case
def jit():
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(Net())
    traced = torch.jit.trace(Net(), torch.randn(5, 4))
    fit(scripted)
    fit(traced)


@case
def scaler():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        if step == 1:
            loss = loss * float("inf")
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        print(f"step {step} loss {bits(loss.item())}", flush=True)
    print("weights", hash_of(model), flush=True)


@case
def lbfgs():
    model, x = Net(), torch.randn(5, 4)
    model[1] = nn.Tanh()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        print(f"step {step} loss {bits(optimizer.step(closure).item())}", flush=True)
    print("weights", hash_of(model), flush=True)


@case
def own_optimizer():
    class Own:
        def __init__(self, parameters):
            self.parameters = list(parameters)

        def zero_grad(self):
            for p in self.parameters:
                p.grad = None

        @torch.no_grad()
        def step(self):
            for p in self.parameters:
                p -= 0.1 * p.grad

    model = Net()
    fit(model, Own(model.parameters()))


@case
def no_module():
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = (weight - torch.randn(3)).square().sum()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {bits(loss.item())}", flush=True)


@case
def copies():
    model = Net(nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(model))
        twin = copy.deepcopy(model)
        copy.deepcopy(optimizer)
        torch.save(model, "/dev/null")
    for module in (again, twin):
        assert hash_of(module) == hash_of(model)
        assert all(not p._post_accumulate_grad_hooks for p in module.parameters()), "a copy has hooks"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    fit(twin, steps=2)


@case
def many_models():
    for seed in range(4):
        torch.manual_seed(seed)
        fit(Net(), steps=1)


@case
def exceptions():
    class Fails(nn.Module):
        def forward(self, x):
            if random.random() < 0.5:
                raise (ValueError if random.random() < 0.5 else KeyboardInterrupt)("no")
            return x

    random.seed(3)
    model = Net(nn.Sequential(Fails()))

    def loss_of(x):
        while True:
            try:
                return model(x).square().mean()
            except (ValueError, KeyboardInterrupt) as error:
                print("raised", type(error).__name__, flush=True)

    fit(model, loss_of=loss_of, steps=4)


@case
def threads():
    models = [Net() for _ in range(4)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    x = torch.randn(5, 4)
    for step in range(3):
        optimizer.zero_grad()
        out = [None] * 4

        def run(i):
            out[i] = models[i](x).square().mean()
            out[i].backward()

        workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        optimizer.step()
        print(f"step {step} loss {bits(sum(o.item() for o in out))}", flush=True)
    print("weights", *map(hash_of, models), flush=True)


@case
def compiled():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Net(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(model, backend=count, fullgraph=True)
        fit(compiled)
    print("graphs", len(graphs), flush=True)


@case
def compiled_part():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Net(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    model[2].compile(backend=count)
    fit(model)

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x)

    fit(torch.compile(Breaks(), backend=count))
    print("graphs", len(graphs), flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        CASES[name]()
