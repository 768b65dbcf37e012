"""What probe_many_test runs under the probe, with the fake libcuda: tensors of python_client.py that lie on its device, recorded
together."""
import ctypes
import os
import sys

import python_client
from python_client import OPTIMIZER, PARAMETER, OTHER, Tensor, floats, native, torch

cuda = ctypes.CDLL(os.environ["TEST_LIBCUDA"], mode=ctypes.RTLD_GLOBAL)
kept = []  # the device may read them until the process is gone


class FakeCall(ctypes.Structure):
    _fields_ = [("cbid", ctypes.c_uint32), ("name", ctypes.c_char_p), ("params", ctypes.c_void_p), ("symbol", ctypes.c_char_p)]


launches = []


@ctypes.CFUNCTYPE(None, ctypes.POINTER(FakeCall), ctypes.c_int)
def tracer(call, at_end):
    if not at_end and call.contents.name == b"cuLaunchKernel":
        launches.append((call.contents.symbol or b"").decode())


def on_device(count, shape=None, strides=None, adopt=True):
    memory = floats(count)
    kept.append(memory)
    if adopt:
        cuda.fake_cuda_adopt(memory, ctypes.c_size_t(ctypes.sizeof(memory)))
    t = Tensor(memory, shape or [count], strides or [1], torch.float32, device="cuda")
    t.is_cuda = True
    t.get_device = lambda: 0
    return t


def on_host(count):
    return Tensor(floats(count), [count], [1], torch.float32)


def mixed():
    """As an optimizer's state has them: every third on the host, and here and there one that is no run of bytes."""
    frames = [native.frame(OPTIMIZER, "layer.%d" % i) for i in range(4)]
    tensors = []
    for i in range(200):
        if i % 3 == 0:
            tensors.append(on_host(1 + i))
        elif i % 40 == 1:
            tensors.append(on_device(12 * i, [12, i], [1, 12]))
        else:
            tensors.append(on_device(1 + 50 * i))
    native.begin_step(0, "unknown")
    launches.clear()
    print(native.tensors_at([frames[i // 50] for i in range(200)], [PARAMETER if i % 2 else OTHER for i in range(200)],
                            ["t%d" % i for i in range(200)], tensors))
    print("launches", len(launches), sum("tensors" in name for name in launches))
    native.end_step()


def trouble():
    """What befalls one or all of them."""
    what = sys.argv[2]
    tensors = [on_device(1000 + i, adopt=not (what == "bad address" and i == 3)) for i in range(8)]
    tensors[5] = on_host(1005)
    if what == "unreadable":
        tensors[2] = None
    if what == "reentrant":
        stride, inner = tensors[4].stride, on_device(77)
        tensors[4].stride = lambda: native.tensors(0, PARAMETER, ["inner"], [inner]) or stride()
    native.begin_step(0, "unknown")
    native.tensor(0, OTHER, "before", on_device(5))
    if what == "captured":
        cuda.fake_cuda_set_capture(1)
    if what == "launch error":
        cuda.fake_cuda_set_launch_error(701)
    print(native.tensors(0, PARAMETER, ["t%d" % i for i in range(8)], tensors))
    cuda.fake_cuda_set_capture(0)
    cuda.fake_cuda_set_launch_error(0)
    native.tensor(0, OTHER, "after", on_device(6))
    native.end_step()


if __name__ == "__main__":
    python_client.install_torch()
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    cuda.fake_cuda_set_tracer(tracer)
    cuda.fake_cuda_set_mode(2)
    globals()[sys.argv[1]]()
    cuda.fake_cuda_set_tracer(None)
