"""Trains on the CPU with layers that launch kernels, forward and backward, on a libcuda that needs no GPU:
launch_layers.py LIBCUDA. Each kernel is named after the place that it is launched from; it does nothing."""
import ctypes
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Gpu:
    def __init__(self, path):
        self.cuda = ctypes.CDLL(path)
        self.nothing = KERNEL(lambda call, user: None)
        self.kernels = {}
        assert self.cuda.cuInit(0) == 0

    def define(self, *names):
        for name in names:
            self.cuda.fake_cuda_define_kernel(name.encode(), self.nothing, None, None, ctypes.c_size_t(0))
        image, module = ctypes.create_string_buffer(b"FAKE CUDA IMAGE"), ctypes.c_void_p()
        assert self.cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
        for name in names:
            kernel = ctypes.c_void_p()
            assert self.cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()) == 0
            self.kernels[name] = kernel

    def launch(self, name):
        one = ctypes.c_uint(1)
        kernel, none = self.kernels[name], ctypes.c_uint(0)
        status = self.cuda.cuLaunchKernel(kernel, one, one, one, one, one, one, none, None, None, None)
        assert status == 0, f"cuLaunchKernel: {status}"


class Launching(torch.autograd.Function):
    @staticmethod
    def forward(context, x, name):
        context.name = name
        context.save_for_backward(x)  # so that a checkpoint makes it again
        gpu.launch(name)
        return x * 2

    @staticmethod
    def backward(context, grad):
        context.saved_tensors
        gpu.launch(context.name + "_backward")
        return grad * 2, None


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = Launching.apply(self.fc(x), self.name)
        gpu.launch(self.name + "_after")
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.again = Layer("first"), Layer("second"), Layer("again")

    def forward(self, x):
        x = torch.ops.planted.launches(x)
        x = self.second(self.first(x))
        return checkpoint(self.again, x, use_reentrant=sys.argv[2:] == ["reentrant"])


class Launches(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        gpu.launch("update")
        return super().step(closure)


gpu = Gpu(sys.argv[1])
gpu.define("net", "update", "outside",
           *(name + end for name in ("first", "second", "again") for end in ("", "_after", "_backward")))
torch.manual_seed(0)
net = Net()
optimizer = Launches(net.parameters(), lr=0.1)
library = torch.library.Library("planted", "DEF")
library.define("launches(Tensor x) -> Tensor")
library.impl("launches", lambda x: gpu.launch("net") or x * 1, "CPU")
for step in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    gpu.launch("outside")
    optimizer.step()
print("done", flush=True)
