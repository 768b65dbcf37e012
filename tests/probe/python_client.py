"""What probe_python_test runs under the probe. There is no torch here: objects that have its attributes, with memory of ctypes."""
import ctypes
import os
import sys
import threading
import types

FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER, STATE = 2, 3, 4, 5, 6
INPUT, OUTPUT, PARAMETER, LOSS, SCALAR, RNG, OTHER = 0, 1, 2, 6, 7, 8, 10
EVAL, RECOMPUTE = 1, 2

torch = types.ModuleType("torch")
native = getattr(sys.modules.get("_forkpoint_bridge"), "_native", None)


class Tensor:
    """As torch.Tensor: of these attributes and methods only the named ones may be asked for."""

    __torch_dispatch__ = len  # what a type without one of its own has
    is_cuda = False

    def __init__(self, memory, shape, strides, dtype, offset_bytes=0, device="cpu", neg=False, conj=False, nbytes=None):
        self.memory, self.shape, self.strides, self.dtype, self.offset_bytes = memory, tuple(shape), strides, dtype, offset_bytes
        self.is_cpu, self.neg, self.conj, self.nbytes = device == "cpu", neg, conj, nbytes

    def stride(self):
        return tuple(self.strides)

    def data_ptr(self):
        if isinstance(self.memory, Exception):
            raise self.memory
        return self.offset_bytes + (ctypes.addressof(self.memory) if self.memory is not None else 0)

    def is_neg(self):
        return self.neg

    def is_conj(self):
        return self.conj

    def untyped_storage(self):
        return types.SimpleNamespace(nbytes=lambda: self.nbytes if self.nbytes is not None else ctypes.sizeof(self.memory))


class DisableTorchFunction:
    depth = 0

    def __enter__(self):
        DisableTorchFunction.depth += 1

    def __exit__(self, *error):
        DisableTorchFunction.depth -= 1


def install_torch():
    torch.Tensor = Tensor
    torch.nn = types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    torch.modes = 0
    torch._C = types.SimpleNamespace(_len_torch_function_stack=lambda: torch.modes, DisableTorchFunction=DisableTorchFunction)
    for name in ("uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex64 complex128 "
                 "complex32 float8_e4m3fn float8_e5m2 float8_e8m0fnu quint8").split():
        setattr(torch, name, type(name, (), {})())
    sys.modules["torch"] = torch


def floats(count):
    """0, 1, 2, ... as the test has them."""
    return (ctypes.c_float * count)(*range(count))


def some_bytes(count):
    return (ctypes.c_uint8 * count)(*[(7 * i + 3) % 251 for i in range(count)])


def contiguous(shape, dtype, element_bytes=4, **more):
    strides, count = [], 1
    for size in reversed(shape):
        strides.insert(0, count)
        count *= max(size, 1)
    memory = floats(count) if dtype is torch.float32 else some_bytes(max(count, 1) * element_bytes)
    return Tensor(memory, shape, strides, dtype, **more)


def raises(kind, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except kind:
        return True
    return False


def forms():
    """Layouts and element types: every name says what the test expects."""
    frame = native.frame(FORWARD, "fc")
    record = lambda name, t, *more: print(name, native.tensor(frame, OUTPUT, name, t, *more))
    native.begin_step(3, "optimizer")
    record("plain", contiguous([3, 4], torch.float32))
    record("transposed", Tensor(floats(12), [4, 3], [1, 4], torch.float32))
    record("every other", Tensor(floats(12), [3, 2], [4, 2], torch.float32))
    record("expanded", Tensor(floats(4), [3, 4], [0, 1], torch.float32))
    record("offset", Tensor(floats(12), [2, 4], [4, 1], torch.float32, offset_bytes=16))
    record("number", Tensor(floats(1), [], [], torch.float32))
    record("empty", Tensor(None, [0, 4], [4, 1], torch.float32))
    record("shard", contiguous([2, 4], torch.float32), 0, (6, 4), [2, 0])
    record("parameter", torch.nn.Parameter(floats(12), [3, 4], [4, 1], torch.float32))
    for name, element_bytes in dict(uint8=1, int8=1, int16=2, int32=4, int64=8, uint16=2, uint32=4, uint64=8, bool=1,
                                    float16=2, bfloat16=2, float64=8, complex64=8, complex128=16, complex32=4,
                                    float8_e4m3fn=1, float8_e5m2=1, float8_e8m0fnu=1).items():
        record(name, contiguous([2, 5], getattr(torch, name), element_bytes))
    record("complex32 shard", contiguous([2, 5], torch.complex32, 4), 0, [2, 10], [0, 5])
    record("16 dimensions", contiguous([1] * 15 + [4], torch.float32))
    native.end_step()


def unreadable():
    """Nothing of these is recorded, and no error is left behind."""
    native.begin_step(0, "unknown")
    frame = native.frame(FORWARD, "fc")

    class Wrapper(Tensor):
        __torch_dispatch__ = classmethod(lambda *all: None)

    for name, t in {
        "none": None, "number": 3, "meta": contiguous([2], torch.float32, device="meta"),
        "wrapper": Wrapper(floats(2), [2], [1], torch.float32), "quantised": contiguous([2], torch.quint8, 1),
        "17 dimensions": contiguous([1] * 17, torch.float32), "functorch": Tensor(RuntimeError("no storage"), [2], [1], torch.float32),
        "symbolic": Tensor(floats(2), [object()], [1], torch.float32), "freed": Tensor(None, [8], [1], torch.float32, nbytes=0),
        "freed, offset": Tensor(None, [8], [1], torch.float32, offset_bytes=4096, nbytes=0),
        "negative": contiguous([2], torch.float32, neg=True), "conjugate": contiguous([2], torch.complex64, 8, conj=True),
        "other device": contiguous([2], torch.float32, device="xpu"),
    }.items():
        if native.tensor(frame, OUTPUT, name, t):
            print("was read:", name)
    print(native.tensors(frame, PARAMETER, ["a", "b", "c"], [contiguous([2], torch.float32), None, contiguous([3], torch.float32)]))
    print(native.tensors(frame, PARAMETER, ["d"], (contiguous([2], torch.float32),)))
    native.end_step()


def overridden():
    """Subclasses and modes that override functions are passed by."""
    native.begin_step(0, "unknown")
    frame = native.frame(FORWARD, "fc")

    class Watched(Tensor):
        @property
        def shape(self):
            print("depth", DisableTorchFunction.depth)
            return (2,)

        @shape.setter
        def shape(self, value):
            pass

    print(native.tensor(frame, OUTPUT, "subclass", Watched(floats(2), [2], [1], torch.float32)), DisableTorchFunction.depth)
    torch.modes = 1
    seen = []
    Tensor.is_neg = lambda self: seen.append(DisableTorchFunction.depth)
    print(native.tensor(frame, OUTPUT, "mode", contiguous([2], torch.float32)), seen, DisableTorchFunction.depth)
    native.end_step()


def records():
    """Frames, scopes, flags, step base, words."""
    print(native.LEVEL, native.OPS, native.FIRST_STEP, native.WATCH, native.ON_TRIGGER, native.active(), native.wanted())
    native.rank(0, 2)
    native.fact("tp_rank", "1")
    native.set_base("optimizer")
    frame = native.frame(FORWARD, "blocks.0.fc")
    print(frame == native.frame(FORWARD, "blocks.0.fc"), frame == native.frame(BACKWARD, "blocks.0.fc"),
          frame == native.frame(FORWARD, "blocks.0.fc", flags=EVAL), frame == native.frame(FORWARD, "blocks.0.fc", "aten::mm"))
    world = native.communicator("dp", (0, 1))
    print(world == native.communicator("dp", [0, 1]), world == native.communicator("dp", (0, 2)))
    x = contiguous([2, 2], torch.float32)
    for step in (7, 8):
        native.begin_step(step, "scheduler")
        native.tensor(frame, INPUT, "input", x)
        for _ in range(step - 6):  # one evaluation in the first step, two in the second
            native.tensor(frame, INPUT, "input", x, EVAL)
        native.tensor(frame, INPUT, "input", x, flags=RECOMPUTE)
        native.micro_step(1)
        native.tensor(frame, INPUT, "input", x)
        native.tensor(frame, INPUT, "input", x, EVAL)
        native.micro_step(0)
        native.tensor(native.frame(COLLECTIVE, "fc", op="all_reduce", communicator=world), INPUT, "input", x)
        native.tensor(native.frame(FORWARD, "blocks.0.fc", "aten::mm"), OUTPUT, "output", x)
        native.scalar(native.frame(OPTIMIZER, ""), SCALAR, "lr", 0.125)
        native.scalar(frame, LOSS, "loss", 3, EVAL)
        native.state(native.frame(STATE, ""), RNG, "rng", b"state")
        native.state(0, OTHER, "view", memoryview(bytearray(b"xstate"))[1:])
        native.push(native.frame(FORWARD, "outer", flags=EVAL))
        native.tensor(0, OUTPUT, "in scope", x)
        native.pop()
        native.tensor(0, OUTPUT, "out of scope", x)
        native.limit("something: of a layer", "its detail")
        native.gap("an error in a hook: ValueError")
        native.end_step()
    native.say("a line")


def many_notes():
    native.begin_step(0, "unknown")
    native.scalar(0, SCALAR, "x", 1.0)
    for i in range(300):
        native.limit("limit %d" % i, "")
        native.gap("gap %d" % i)
    native.end_step()


def errors():
    """Wrong arguments raise, and nothing is recorded."""
    x = contiguous([2], torch.float32)
    native.begin_step(0, "unknown")
    print(raises(TypeError, native.tensor), raises(TypeError, native.tensor, 1, 2, "x"), raises(TypeError, native.tensor, 1, 2, 3, x),
          raises(TypeError, native.tensor, "frame", 2, "x", x), raises(TypeError, native.tensor, 0, 2, "x", x, wrong=3),
          raises(TypeError, native.tensor, 0, 2, "x", x, 0, None, None, 4), raises(TypeError, native.tensor, 0, 2, "x", x, frame=3))
    print(raises(ValueError, native.tensor, 0, OUTPUT, "x", x, 0, (4,), None), raises(ValueError, native.tensor, 0, OUTPUT, "x", x, 0, (4, 4), (0, 0)),
          raises(ValueError, native.tensor, 0, OUTPUT, "x", x, 0, ("a",), (0,)), raises(ValueError, native.tensors, 0, 2, ["a"], [x, x]))
    print(raises(TypeError, native.scalar, 0, 2, "x", "text"), raises(TypeError, native.state, 0, 2, "x", 1.5), raises(TypeError, native.frame, 1),
          raises(TypeError, native.communicator, "dp", 3), raises(OverflowError, native.begin_step, 1 << 70, "unknown"), raises(TypeError, native.gap, None))
    native.push(0)
    native.pop()
    native.pop()
    native.set_backward(12345)
    native.set_backward(0)
    native.scalar(99999, SCALAR, "no such frame", 1.0)
    native.end_step()


def level():
    native.begin_step(0, "unknown")
    native.tensor(native.frame(FORWARD, "fc"), OUTPUT, "output", contiguous([2], torch.float32))
    native.tensor(native.frame(FORWARD, "fc"), PARAMETER, "weight", contiguous([2], torch.float32))
    native.end_step()


def threads():
    """Records of many threads at once, each in scopes of its own."""
    native.begin_step(0, "unknown")
    x = contiguous([4], torch.float32)

    def work(number):
        frame = native.frame(FORWARD, "thread.%d" % number)
        for i in range(200):
            native.push(frame)
            native.tensor(0, OUTPUT, "output", x)
            native.pop()

    all = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in all:
        thread.start()
    for thread in all:
        thread.join()
    native.end_step()


def fork():
    """A child of a rank records nothing of its own; the rank goes on."""
    native.begin_step(0, "unknown")
    native.scalar(0, SCALAR, "before", 1.0)
    child = os.fork()
    if child == 0:
        native.begin_step(0, "unknown")
        native.scalar(0, SCALAR, "of the child", 1.0)
        native.end_step()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    native.scalar(0, SCALAR, "after", 1.0)
    native.end_step()


def ended():
    """Once recording has ended, calls do nothing and complain of nothing."""
    x = contiguous([256], torch.float32)
    for step in range(400):
        native.begin_step(step, "unknown")
        for i in range(20):
            native.tensor(native.frame(FORWARD, "layer.%d" % i), OUTPUT, "output", x)
        native.end_step()
    print(native.active(), native.wanted(), native.tensor(0, OUTPUT, "late", None), native.tensors(0, 2, [], None), native.scalar(0, 2, "x", "y"))


if __name__ == "__main__":
    install_torch()
    globals()[sys.argv[1]]()
