"""Runs a Megatron Core program on the CPU, for tests: megatron_on_cpu.py PROGRAM [ARGUMENT...].

Megatron Core asks for CUDA and NCCL by name in a hundred places. Here these names are answered by the CPU and gloo: what
is put on "cuda" lies on the host, CUDA's generator is torch's own, streams and events do nothing. Nothing of this is in
the sample, and no line of Megatron is changed.
"""

import contextlib
import importlib
import logging
import os
import pathlib
import sys
import types
import warnings

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def on_cpu(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class Device(TorchFunctionMode):
    """Whatever is asked for on a GPU is on the CPU; the optimizers ask a parameter's type by its CUDA name."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            result = result.replace("torch.", "torch.cuda.")
        return result


class Nothing:
    """In place of a stream or an event: all its methods do nothing."""

    def __init__(self, *args, **kwargs):
        self.device, self.cuda_stream = CPU, 0

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def replace_cuda():
    cuda, generator = torch.cuda, torch.default_generator
    cuda.current_device = lambda: "cpu"
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.device_count = lambda: 1
    cuda.current_stream = cuda.default_stream = cuda.Stream = cuda.Event = Nothing
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda.manual_seed = generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: generator.set_state(state)
    cuda.default_generators = {"cpu": generator}
    cuda.nvtx.range_push = lambda *args: 0
    cuda.nvtx.range_pop = lambda *args: 0


def replace_nccl():
    first, later, take = dist.init_process_group, dist.new_group, dist.ProcessGroup

    def init_process_group(backend=None, **more):
        more.pop("device_id", None)
        return first("gloo", init_method=os.environ.get("MEETING"), **more)

    def new_group(ranks=None, *args, backend=None, pg_options=None, **more):
        return later(ranks, *args, backend="gloo", **more)

    dist.init_process_group = init_process_group
    dist.new_group = new_group


def decorator(function=None, **kwargs):
    return function if callable(function) else lambda inner: inner


def replace_compilers():
    """Triton's decorators, as its kernels are never called here; and torch.compile, which takes longer than the tests."""
    torch.compile = decorator
    try:
        import triton  # noqa: F401
    except ImportError:
        importlib.import_module("torch._dynamo")  # (it takes another way where it finds Triton, and every optimizer imports it)

        triton, language = Words("triton"), Words("triton.language")
        triton.jit = triton.autotune = triton.heuristics = decorator
        triton.language, triton.__version__, triton.__spec__, language.__spec__ = language, "0", None, None
        sys.modules.update({"triton": triton, "triton.language": language})


class Words(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    # It says after each dropout that the CPU's generator changed: here both are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    replace_cuda()
    replace_nccl()
    replace_compilers()
    program = pathlib.Path(sys.argv[1])
    del sys.argv[0]
    sys.path[0] = str(program.parent)
    del __file__  # processes that the program starts have no main file to import, as this one would not do
    with Device():
        exec(compile(program.read_bytes(), program, "exec"))
