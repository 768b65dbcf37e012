"""What a job does beside its training: checkpoints that it saves and loads, objects that its ranks exchange pickled, barriers,
and how DistributedDataParallel agrees on its buckets, which it lays out anew once in the life of each process.
The collectives of that are not recorded (probes/nccl_records.cpp knows them by the scope that is open here): a run that saves is
the same training as one that does not, and what saving sends is not what loading does. The run says so as a limit."""
import functools
import sys
import threading

import torch

from . import _native as native
from . import imports, steps
from .names import EVAL, STATE, failed

PICKLED = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list", "_broadcast_object_list")
BUCKETS = ("_rebuild_buckets",)  # of the reducer: broadcasts which gradient lies in which
BARRIERS = ("barrier", "monitored_barrier")  # of NCCL an all-reduce of one number, which nobody reads
_STATES = tuple("%s_%sstate_dict" % (verb, what) for verb in ("get", "set") for what in ("", "model_", "optimizer_"))
# Module, its functions, the package that has them under their names too.
_CHECKPOINTS = (
    ("megatron.core.dist_checkpointing.serialization", ("save", "load"), "megatron.core.dist_checkpointing"),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save"), "torch.distributed.checkpoint"),
    ("torch.distributed.checkpoint.state_dict_loader", ("load",), "torch.distributed.checkpoint"),
    ("torch.distributed.checkpoint.state_dict", _STATES, ""))
_thread = threading.local()
_wrapped = set()


def is_open():
    return getattr(_thread, "depth", 0) > 0


def aside(original):
    frame = native.frame(STATE, "", "", 0, EVAL)

    @functools.wraps(original)
    def call(*args, **kwargs):
        if not native.active() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        native.push(frame)
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            return original(*args, **kwargs)
        finally:
            _thread.depth -= 1
            native.pop()

    return call


def _wrap(names, *modules):
    """In all modules that have the function under its name."""
    for name in names:
        original = getattr(modules[-1], name, None)
        if original is None or (modules[-1].__name__, name) in _wrapped:
            continue
        _wrapped.add((modules[-1].__name__, name))
        wrapped = aside(original)
        for module in modules:
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)


def quietly(original):
    """A step on gradients of zero makes the states that a checkpoint is loaded into: none of the training's."""
    @functools.wraps(original)
    def step(*args, **kwargs):
        was, steps.listening = steps.listening, False
        try:
            return original(*args, **kwargs)
        finally:
            steps.listening = was

    return step


def _imported(names, package):
    def wrap(module):
        try:
            _wrap(names, *(sys.modules[name] for name in (package,) if name in sys.modules), module)
            if hasattr(module, "_init_optim_state"):
                module._init_optim_state = quietly(module._init_optim_state)
        except Exception as error:
            failed("the import of what saves and loads checkpoints", error)

    return wrap


def install():
    _wrap(PICKLED + BARRIERS, torch.distributed, torch.distributed.distributed_c10d)
    if hasattr(torch.distributed, "Reducer"):
        _wrap(BUCKETS, torch.distributed.Reducer)
    # Right behind their import, before anybody can have taken a function out of them: a job that imports them where it
    # first saves, or resumes, is the same training as one that does neither.
    for module, names, package in _CHECKPOINTS:
        imports.after(module, _imported(names, package))
