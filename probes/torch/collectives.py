"""Collectives of torch.distributed on tensors of the host, gloo's above all. Those on a GPU are recorded where NCCL is
called, whatever calls it.

Each call passes the operators c10d::*, from Python, from the reducer of DistributedDataParallel and from functional
collectives alike. Ours lie above theirs in the dispatcher (key BackendSelect) and hand everything on as it came. Inputs
are recorded before the call; outputs as soon as the job knows that the call has ended: at the end of Work.wait, of
wait_tensor, or of the backward pass that waits for what its reducer has started. Nothing waits that did not wait
before."""
import functools
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from . import _native as native
from . import aside, futures, steps
from .names import COLLECTIVE, INPUT, OUTPUT, failed, limit_once, put

BELOW = torch._C.DispatchKey.BackendSelect

# operator of c10d: (op, parameters that are its inputs, that are its outputs, its root, who has inputs, who outputs)
ALL, ROOT = True, False
_OPS = {
    "allreduce_": ("all_reduce", "tensors", "tensors", None, ALL, ALL),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors", None, ALL, ALL),
    "broadcast_": ("broadcast", "tensors", "tensors", "root_rank", ROOT, ALL),
    "reduce_": ("reduce", "tensors", "tensors", "root_rank", ALL, ROOT),
    "allgather_": ("all_gather", "input_tensors", "output_tensors", None, ALL, ALL),
    "allgather_coalesced_": ("all_gather", "input_list", "output_lists", None, ALL, ALL),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor", None, ALL, ALL),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs", None, ALL, ALL),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors", None, ALL, ALL),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor", None, ALL, ALL),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs", None, ALL, ALL),
    "gather_": ("gather", "input_tensors", "output_tensors", "root_rank", ALL, ROOT),
    "scatter_": ("scatter", "input_tensors", "output_tensors", "root_rank", ROOT, ALL),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors", None, ALL, ALL),
    "alltoall_base_": ("all_to_all", "input", "output", None, ALL, ALL),
    "send": ("send", "tensors", None, None, ALL, ALL),
    "recv_": ("recv", None, "tensors", None, ALL, ALL),
    "recv_any_source_": ("recv", None, "tensors", None, ALL, ALL),
}
_REDUCTIONS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}  # as NCCL counts them
# Said of every job: saving a checkpoint may be all that it does so, and that is no difference between two runs.
_ASIDE = ("collectives of saving and loading checkpoints, of objects that are exchanged pickled, of barriers, and of agreeing on "
          "the buckets of DistributedDataParallel")
_LATE = "output of a collective that nobody was seen to wait for, or that was changed before"

_libraries = []   # kept for ever: what they registered goes with them
_pending = {}     # id of a Work -> _Begun
_frames = {}
_groups = {}      # name of a process group -> (its table of ranks, _Group)


class _Group:
    """One process group: as it is called in both runs, and this rank's place in it."""

    __slots__ = ("handle", "place", "size", "world")

    def __init__(self, handle, place, size):
        self.handle = handle
        self.place = place
        self.size = size


class _Begun:
    """A collective whose output is not there yet. Holds its Work, so that nobody else gets its address."""

    __slots__ = ("work", "frame", "flags", "outputs", "step", "micro", "by_engine", "any_source")

    def __init__(self, work, frame, outputs, by_engine, any_source):
        self.work = work
        self.frame = frame
        self.outputs = outputs  # (name, tensor, its version)
        self.step = steps.serial()
        self.by_engine = by_engine
        self.any_source = any_source


def ranks_text(ranks):
    """"0-7", "0-6:2", "0,1,5": short, since there may be thousands."""
    if len(ranks) > 1:
        stride = ranks[1] - ranks[0]
        if stride > 0 and all(b - a == stride for a, b in zip(ranks, ranks[1:])):
            return "%d-%d%s" % (ranks[0], ranks[-1], "" if stride == 1 else ":%d" % stride)
    return ",".join(map(str, ranks))


def _words(group):
    """What the program says that it is for: "dp" of a mesh's group, nothing where it says nothing."""
    said = getattr(group, "group_desc", "") or ""
    if said in ("undefined", "default_pg", "mesh_default"):
        return ""
    return said[len("mesh_"):] if said.startswith("mesh_") else said


def listed():
    """[(process group, its name in both runs, its ranks, in the order of their places)], in the order of their making,
    which is one on all members."""
    world = dist.distributed_c10d._world
    out, taken = [], {}
    for group in list(world.pg_map):
        table = world.pg_group_ranks.get(group)
        if not table:
            continue
        ranks = sorted(table, key=table.get)
        is_world = group is world.default_pg
        words = _words(group)
        name = "world" if is_world else "%s %s" % (words or "ranks", ranks_text(ranks))
        taken[name] = taken.get(name, 0) + 1
        out.append((group, name if taken[name] == 1 else "%s #%d" % (name, taken[name]), ranks))
    return out


def _group(boxed):
    group = dist.ProcessGroup.unbox(boxed)
    table = dist.distributed_c10d._world.pg_group_ranks.get(group)
    key = group.group_name if table else "%s of %d" % (_words(group), group.size())
    known = _groups.get(key)
    if known is not None and known[0] is table:
        return known[1]
    if table:
        name, ranks = next((n, r) for g, n, r in listed() if g is group)
        made_from = "%s|%s|%s" % (group.group_name, name, ",".join(map(str, ranks)))
        found = _Group(native.communicator(name, ranks, made_from, group.rank()), group.rank(), len(ranks))
    else:
        limit_once("process groups that torch.distributed does not list: their members are not known", key)
        found = _Group(native.communicator(key, ()), group.rank(), group.size())
    _groups[key] = table, found
    return found


def _frame(op, group):
    layer, flags = steps.current_layer()
    key = op, group.handle, layer, flags
    handle = _frames.get(key)
    if handle is None:
        handle = _frames[key] = native.frame(COLLECTIVE, layer, op, group.handle, flags)
    return handle


def _flat(value, into):
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flat(item, into)
    return into


def _named(word, value):
    tensors = _flat(value, [])
    if len(tensors) == 1:
        return [(word, tensors[0])]
    return [("%s.%d" % (word, i), tensor) for i, tensor in enumerate(tensors)]


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version


def _called_by(depth):
    """(DistributedDataParallel's own code in C++, without Python between; something that exchanges pickled objects)"""
    frame, by_engine = sys._getframe(depth), False
    if frame is None:  # a thread of the engine's
        by_engine = True
    else:
        by_engine = frame.f_globals.get("__name__") in ("torch.autograd.graph", "torch.nn.parallel.distributed")
    for _ in range(8):
        if frame is None or not frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            break
        if frame.f_code.co_name in aside.PICKLED:
            return by_engine, True
        frame = frame.f_back
    return by_engine, False


def _reduction(caller):
    """"SUM", as the Python function was asked for; None: it came from C++, where the reducer's is always a sum."""
    if caller is None or caller.f_globals.get("__name__") != "torch.distributed.distributed_c10d":
        return None
    wanted = getattr(caller.f_locals.get("opts"), "reduceOp", None)
    wanted = getattr(wanted, "op", wanted)
    return None if wanted is None else str(wanted).rpartition(".")[2].partition(":")[0]


def _say_unseen(boxed, device):
    """NCCL's calls are recorded where it is called; those of others on a device nowhere."""
    group = dist.ProcessGroup.unbox(boxed)
    if group.group_name not in _on_device:
        _on_device.add(group.group_name)
        kind = group._get_backend(device).name().lower()
        if kind != "nccl":
            limit_once("collectives on a device that do not go through NCCL", kind)


_on_device = set()


class _Operator:
    """What stands in for one operator."""

    def __init__(self, name):
        self.real = getattr(torch.ops.c10d, name).default
        self.op, self.inputs, self.outputs, self.root, self.inputs_at, self.outputs_at = _OPS[name]
        self.places = {argument.name: i for i, argument in enumerate(self.real._schema.arguments)}
        self.has_work_only = len(self.real._schema.returns) == 1

    def value(self, name, args, kwargs):
        place = self.places.get(name, -1)
        return args[place] if 0 <= place < len(args) else kwargs.get(name)

    def __call__(self, keyset, *args, **kwargs):
        begun = None
        if steps.recording():
            try:
                steps.settle()
                begun = self.begin(args, kwargs)
            except Exception as error:
                failed("a collective", error)
        result = self.real.redispatch(keyset & torch._C._dispatch_keyset_full_after(BELOW), *args, **kwargs)
        if begun is not None:
            try:
                self.began(begun, result)
            except Exception as error:
                failed("a collective", error)
        return result

    def begin(self, args, kwargs):
        """(frame, outputs, by the engine), when there will be outputs to record."""
        given = _flat(self.value(self.inputs or self.outputs, args, kwargs), [])
        if not given:
            given = _flat(self.value(self.outputs, args, kwargs), []) if self.outputs else given
        device = next((tensor.device for tensor in given if tensor.device.type != "cpu"), None)
        if device is not None:
            if device.type != "meta":
                _say_unseen(self.value("process_group", args, kwargs), device)
            return None
        by_engine, pickled = _called_by(3)
        if pickled or aside.is_open():
            return None
        group = _group(self.value("process_group", args, kwargs))
        frame = _frame(self.op, group)
        root = self.value(self.root, args, kwargs) if self.root else None
        self.record_arguments(frame, root)
        peer = self.value("dst" if self.op == "send" else "src", args, kwargs)
        if self.inputs and (self.inputs_at or root == group.place):
            word = "input" if self.op != "send" else "input to %d" % peer
            for name, tensor in _named(word, self.value(self.inputs, args, kwargs)):
                put(frame, INPUT, name, tensor)
        if not self.outputs or not (self.outputs_at or root == group.place):
            return None
        word = "output" if peer is None or self.op != "recv" else "output from %d" % peer
        outputs = [(n, t, _version(t)) for n, t in _named(word, self.value(self.outputs, args, kwargs))]
        return frame, outputs, by_engine, "src" not in self.places and self.op == "recv"

    def record_arguments(self, frame, root):
        if "reduce_op" in self.places:
            kind = _reduction(sys._getframe(3))
            if kind is not None:
                native.argument(frame, "reduction", float(_REDUCTIONS.get(kind, 5)))
        if root is not None:
            native.argument(frame, "root", float(root))

    def began(self, begun, result):
        frame, outputs, by_engine, any_source = begun
        boxed = result if self.has_work_only else result[-1]
        if boxed is None:
            return
        work = dist.Work.unbox(boxed)
        _pending[id(work)] = _Begun(work, frame, outputs, by_engine, any_source)


def _ended(begun, is_sure):
    """is_sure: nobody can have changed the output since it was complete."""
    if begun.step != steps.serial() or not steps.recording():
        limit_once(_LATE)
        return
    source = begun.work._source_rank() if begun.any_source else -1
    for name, tensor, version in begun.outputs:
        if not is_sure and _version(tensor) != version:
            limit_once(_LATE)
        else:
            put(begun.frame, OUTPUT, name if source < 0 else "%s from %d" % (name, source), tensor)


def _waiting(original):
    @functools.wraps(original)
    def wait(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if _pending:
            begun = _pending.pop(id(self), None)
            if begun is not None:
                try:
                    _ended(begun, True)
                except Exception as error:
                    failed("the end of a collective", error)
        return result

    return wait


def _wait_tensor(keyset, tensor):
    real = torch.ops._c10d_functional.wait_tensor.default
    result = real.redispatch(keyset & torch._C._dispatch_keyset_full_after(BELOW), tensor)
    if _pending:
        try:
            address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
            for key, begun in list(_pending.items()):
                if address and any(output.data_ptr() == address for _, output, _ in begun.outputs):
                    del _pending[key]
                    _ended(begun, True)
        except Exception as error:
            failed("the end of a collective", error)
    return result


def backward_ended():
    """The reducer has waited for what it has started, and for what a communication hook has."""
    for key, begun in list(_pending.items()):
        if (begun.by_engine or futures.for_reducer(key)) and futures.is_complete(begun.work):
            del _pending[key]
            futures.forget(key)
            _ended(begun, False)


def step_begins():
    """What is open from the last one has nobody that waits, or waits too late to belong to it."""
    if _pending:
        limit_once(_LATE)
        for key in [k for k, begun in _pending.items() if begun.step != steps.serial()]:
            del _pending[key]
    futures.keep(_pending)


def _register():
    """Once, when the first process group is made that is not NCCL's alone."""
    if _libraries:
        return
    library = torch.library.Library("c10d", "IMPL")
    for name in _OPS:
        if hasattr(torch.ops.c10d, name):
            library.impl(name, _Operator(name), "BackendSelect", with_keyset=True)
        else:
            limit_once("collectives of torch.distributed that this torch has under another name", name)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    if hasattr(torch.ops._c10d_functional, "wait_tensor"):
        functional.impl("wait_tensor", _wait_tensor, "BackendSelect", with_keyset=True)
    _libraries.extend((library, functional))


def _registering(original):
    @functools.wraps(original)
    def register_backend(self, device, backend_type, *args, **kwargs):
        try:
            limit_once(_ASIDE)
            if device.type == "cpu":
                _register()
        except Exception as error:
            failed("the making of a process group", error)
        return original(self, device, backend_type, *args, **kwargs)

    return register_backend


def install():
    if not (dist.is_available() and hasattr(dist, "Work") and hasattr(dist.Work, "unbox")):
        limit_once("collectives of torch.distributed that do not go through NCCL, with this torch")
        return
    steps.on_step.append(step_begins)
    steps.on_backward.append(backward_ended)
    work = dist.Work
    work.wait, work.synchronize = _waiting(work.wait), _waiting(work.synchronize)
    futures.install(_pending)
    dist.ProcessGroup._register_backend = _registering(dist.ProcessGroup._register_backend)
    if dist.is_initialized():
        limit_once(_ASIDE)
        _register()
