"""What is recorded of one framework op: what it reads before it runs, what it wrote right after.

Not recorded, since they are noise or not there yet: the bytes of tensors that empty() made and nobody has written as
a whole, what an op leaves of its scratch memory, and what a collective of c10d writes, which comes when it is waited
for."""
import hashlib

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import _native as native
from .names import INPUT, OUTPUT, RNG, failed, join, limit_once, put

_MOST_INDEX = 1024  # ops of one name in a call of a layer that have an index of their own; those beyond share the last
_ASYNC = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# They write all of the tensor that they are called on, and do not look at what was there.
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
              "log_normal_", "cauchy_"}
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_",
          "_empty_affine_quantized"}
# Parameters and numbered outputs that hold memory which was not written in full.
_SCRATCH = {
    "_scaled_dot_product_efficient_attention": {1}, "_scaled_dot_product_efficient_attention_backward": {"logsumexp"},
    "_efficient_attention_forward": {1}, "_efficient_attention_backward": {"logsumexp"},
    "_scaled_dot_product_flash_attention": {8}, "_flash_attention_forward": {4},
    "_scaled_dot_product_cudnn_attention": {8}, "_cudnn_rnn": {3, 4}, "_cudnn_rnn_backward": {"reserve"},
    "cudnn_batch_norm": {3}, "cudnn_batch_norm_backward": {"reserveSpace"}, "mkldnn_rnn_layer": {3},
    "mkldnn_rnn_layer_backward": {"workspace"}, "_embedding_bag": {1, 2, 3}, "log_sigmoid_forward": {1},
    "log_sigmoid_backward": {"buffer"},
}
_plain_words = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class _Op:
    """What is known of an op from its schema."""

    __slots__ = ("name", "parameters", "written", "read", "scratch", "is_async", "is_empty", "is_seeded", "is_view")

    def __init__(self, func):
        schema = func._schema
        short = schema.name.partition("::")[2]
        self.name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.parameters = [a.name for a in schema.arguments]
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = {a.name for a in written}
        fresh = {a.name for a in written if a.is_out} | ({"self"} if short in _OVERWRITE else set())
        self.read = {a.name for a in schema.arguments} - fresh
        self.is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
        self.scratch = _SCRATCH.get(short, ())
        self.is_async = schema.name.partition("::")[0] in _ASYNC and short != "wait_tensor"
        self.is_empty = short in _EMPTY
        self.is_seeded = torch.Tag.nondeterministic_seeded in func.tags


_ops = {}      # torch's op -> _Op; None: it has no schema
_frames = {}   # (layer, phase, flags, name) -> handle


def known(func):
    try:
        return _ops[func]
    except KeyError:
        op = _ops[func] = _Op(func) if hasattr(func, "_schema") else None
        return op


def frame_of(scope, name):
    """The frame of the next op of this name in the scope: `aten::mm#3` is the fourth of one call of the layer."""
    index = scope.counts.get(name, 0)
    scope.counts[name] = index + 1
    if index >= _MOST_INDEX:
        limit_once("ops of one name beyond the %dth of a layer's call share an index" % _MOST_INDEX, scope.layer.name)
        index = _MOST_INDEX
    key = scope.layer.name, scope.phase, scope.flags, name, index
    handle = _frames.get(key)
    if handle is None:
        handle = native.frame(scope.phase, scope.layer.name, "%s#%d" % (name, index), 0, scope.flags)
        _frames[key] = handle
    return handle


def _each(value, name):
    """(name, tensor) of a tensor or a list of them; a list may hold None."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(item, Tensor):
                yield join(name, i), item


def _words(value):
    """An argument that is no tensor, alike in every process; nothing of objects that only have an address."""
    if isinstance(value, torch.device):
        return value.type  # its number is where the rank was put
    if isinstance(value, _plain_words):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "(%s)" % ",".join(_words(item) for item in value)
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _generator_state(device, given):
    if device is None or device.type == "cpu":
        return "cpu", (given or torch.default_generator).get_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        index = device.index if device.index is not None else torch.cuda.current_device()
        return "cuda", (given or torch.cuda.default_generators[index]).get_state()
    return "", None


def record_inputs(frame, op, arguments, blanks):
    """arguments: [(parameter, value)]. blanks: Blanks of the thread. True: it reads memory that nobody wrote."""
    words, device, unwritten = [], None, False
    for name, value in arguments:
        if isinstance(value, (Tensor, list, tuple)):
            for place, tensor in _each(value, name):
                device = device or tensor.device
                if name not in op.read or name in op.scratch:
                    continue
                if blanks.known and blanks.holds(tensor):
                    unwritten = unwritten or not (op.is_empty or op.is_view)
                else:
                    put(frame, INPUT, place, tensor)
        elif name == "device" and value is not None:
            device = torch.device(value)
        if isinstance(value, (bool, int, float)) and abs(value) <= 2.0**53:
            native.scalar(frame, INPUT, name, float(value))
        elif not isinstance(value, Tensor):
            words.append("%s=%s" % (name, _words(value)))
    if words:  # of one size, whatever they are: another value is no other form
        native.state(frame, INPUT, "arguments", hashlib.blake2b(" ".join(words).encode(), digest_size=16).digest())
    if op.is_seeded:
        where, state = _generator_state(device, dict(arguments).get("generator"))
        if state is not None:
            native.tensor(frame, RNG, where + ".rng", state)
    if unwritten:
        limit_once("ops that read memory which empty() made and nobody had written as a whole", op.name)
    return unwritten


def _is_under_way(op, arguments, out):
    """A copy from a device to the host with non_blocking=True: the bytes come later."""
    if not isinstance(out, Tensor) or out.device.type != "cpu":
        return False
    if not any(name == "non_blocking" and value for name, value in arguments):
        return False
    return any(isinstance(v, Tensor) and v.device.type != "cpu" for _, v in arguments)


def record_outputs(frame, op, arguments, out, blanks, unwritten):
    if op.is_async:
        limit_once("what a collective of c10d writes, at the level of ops", op.name)
        return
    if op.is_empty or unwritten:
        for _, tensor in _each(out, ""):
            blanks.add(tensor)
        return
    if blanks.known and op.written:
        for name, value in arguments:
            if name in op.written:
                for _, tensor in _each(value, name):
                    blanks.wrote(tensor)
    if _is_under_way(op, arguments, out):
        limit_once("what a copy to the host gives that nobody has waited for, at the level of ops", op.name)
        return
    returned = set()
    outs = out if isinstance(out, (list, tuple)) else (out,)
    for i, value in enumerate(outs):
        name = "output" if len(outs) == 1 else join("output", i)
        for place, tensor in _each(value, name):
            returned.add(id(tensor))
            if i not in op.scratch and not (blanks.known and blanks.holds(tensor)):
                put(frame, OUTPUT, place, tensor)
        if isinstance(value, (bool, int, float)):  # item()
            native.scalar(frame, OUTPUT, name, float(value))
    for name, value in arguments if op.written else ():
        if name in op.written:
            for place, tensor in _each(value, name):
                if id(tensor) not in returned and not (blanks.known and blanks.holds(tensor)):
                    put(frame, OUTPUT, place, tensor)


def _range(tensor):
    """(storage, first byte, end) of what a tensor may touch, and whether it touches all of it; None: no storage."""
    try:
        storage = tensor.untyped_storage()
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    except (NotImplementedError, RuntimeError):  # sparse, a wrapper
        return None
    begin, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
    return storage, begin, begin + span * size, tensor.numel() == span


class Blanks:
    """Storages that empty() made, until they are written as a whole: what they hold differs in any two runs. They are
    told apart by weak references, which keep an address from being used again."""

    __slots__ = ("known",)

    def __init__(self):
        self.known = {}  # address of the storage -> [reference, ranges of bytes that were written, ascending]

    def add(self, tensor):
        if type(tensor) is Tensor and tensor.numel():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known[storage._cdata] = [StorageWeakRef(storage), []]

    def forget(self, tensor):
        place = _range(tensor)
        if place is not None:
            self.known.pop(place[0]._cdata, None)

    def holds(self, tensor):
        """It may have bytes that nobody wrote."""
        place = _range(tensor) if tensor.numel() else None
        entry = self.known.get(place[0]._cdata) if place is not None else None
        return entry is not None and not any(low <= place[1] and place[2] <= high for low, high in entry[1])

    def wrote(self, tensor):
        """All of `tensor` was written. What does not lie dense is not counted: it stays unknown."""
        place = _range(tensor) if tensor.numel() else None
        entry = self.known.get(place[0]._cdata) if place is not None else None
        if entry is None or not place[3]:
            return
        ranges = sorted([*entry[1], place[1:3]])
        merged = [ranges[0]]
        for low, high in ranges[1:]:
            if low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        entry[1] = merged
        if merged[0][0] == 0 and merged[0][1] >= place[0].nbytes():
            del self.known[place[0]._cdata]


def record_node(frame, gradients, role, name):
    """Of a node of autograd that runs unobserved: what it was handed, or what it gives on."""
    try:
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                put(frame, role, name if len(gradients) == 1 else join(name, i), gradient)
    except Exception as error:
        failed("a hook of a node", error)
