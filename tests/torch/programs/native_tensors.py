"""Records tensors of every form through the bridge's native module: each as it lies, as a contiguous copy ("NAME copy"), and
as the bytes of that copy ("NAME bytes"). The last lines say what could not be read. With `attributes` as its argument torch has no
table of functions for exchanging tensors, as those before 2.10.
"""
import sys
import warnings

import torch

warnings.simplefilter("ignore")
if "attributes" in sys.argv:
    del torch.Tensor.__dlpack_c_exchange_api__
native = sys.modules["_forkpoint_bridge"]._native
frame = native.frame(2, "forms")


def record(name, t):
    whole = t.detach().contiguous()
    raw = bytes(whole.reshape(-1).view(torch.uint8).numpy()) if whole.numel() else b""
    assert native.tensor(frame, 1, name, t), name
    assert native.tensor(frame, 1, name + " copy", whole), name
    native.state(frame, 10, name + " bytes", raw)


def forms(name, x):
    record(name, x)
    record(name + " transposed", x.t())
    record(name + " every other", x[:, ::2])
    record(name + " offset", x[1:, 1:])
    record(name + " expanded", x[:1].expand(5, -1))
    record(name + " empty", x[:0])
    record(name + " number", x[1, 1])


native.begin_step(0, "unknown")
x = torch.arange(42.0).reshape(6, 7)
for name in "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128".split():
    forms(name, x.to(getattr(torch, name)))
for name in "float8_e4m3fn float8_e5m2 uint16 uint32 uint64 complex32".split():
    size = getattr(torch, name).itemsize
    forms(name, torch.arange(42 * size, dtype=torch.uint8).view(getattr(torch, name)).reshape(6, 7))
record("parameter", torch.nn.Parameter(x))
record("buffer", torch.nn.Buffer(x)) if hasattr(torch.nn, "Buffer") else record("buffer", x)
# Parts of larger tensors and whole ones in one call.
assert native.tensors_at([frame] * 3, [1] * 3, ["part", "whole", "flat"], [x, x, x.view(-1)], 0,
                         [((12, 7), (6, 0), (6, 7)), None, ((100,), (58,))]) is None
for box in (((12, 7), (6,)), ((12,), (6,)), ((12, 7),), 7):
    try:
        native.tensors_at([frame], [1], ["wrong"], [x], 0, [box])
        print("was taken for a box:", box)
    except (TypeError, ValueError):
        pass


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print("a mode was told of", function)
        return function(*args, **(kwargs or {}))


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print("dispatched", function)
        return function(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        print("a subclass was told of", function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, *all):
        raise NotImplementedError


sub, values = x.as_subclass(Sub), x.to(torch.complex64)
with Mode(), Dispatch():
    assert native.tensor(frame, 1, "under modes", x)
    assert native.tensor(frame, 1, "subclass", sub)
freed, parameter = torch.randn(1000), torch.nn.Parameter(torch.randn(1000))
view = freed[10:20]
freed.untyped_storage().resize_(0)
parameter.untyped_storage().resize_(0)
unreadable = {
    "meta": x.to("meta"), "sparse": x.to_sparse(), "csr": x.to_sparse_csr(), "wrapper": Wrapper(x), "conjugate": values.conj(),
    "negative": values.conj().imag, "freed": freed, "view of freed": view, "freed parameter": parameter,
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "17 dimensions": torch.ones([1] * 17),
    "zero tensor": torch._efficientzerotensor(3), "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "none": None,
}
with torch._subclasses.FakeTensorMode():
    unreadable["fake"] = torch.empty(3)
for name, t in unreadable.items():
    if native.tensor(frame, 1, "unreadable", t):
        print("was read:", name)
torch.func.vmap(lambda t: print("vmap", native.tensor(frame, 1, "unreadable", t)) or t)(x)
torch.func.grad(lambda t: print("grad", native.tensor(frame, 1, "unreadable", t)) or t.sum())(x)
native.end_step()
