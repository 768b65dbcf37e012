"""When a step begins and ends. What it holds is in state.py.

A step begins with the first training forward after the last one ended and ends when the optimizer has stepped; with
several optimizers it stays open until the next training forward, so that others that step right after still count."""
import atexit
import functools
import random
import sys
import threading
import weakref

import torch
from torch import Tensor

from . import _native as native
from . import backward, names, state
from .names import BATCH, DATA, OPTIMIZER, SCALAR, failed, flatten_call, limit_once, put

listening = True   # hooks have something to do in this process
opened = False     # the step base is settled: records may be made
deep = native.LEVEL >= 1
names.lean = native.LEVEL >= 2

on_optimizer = []  # functions called when an optimizer begins to step
on_step = []       # when a step begins
on_backward = []   # when a backward pass that is not a part of another has ended
on_stepped = []    # functions called with an optimizer that has stepped
current_layer = lambda: ("", 0)  # noqa: E731: (name, flags) of the module whose forward is open; layers.py puts its own
_lock = threading.RLock()
_thread = threading.local()  # .backward: the serial of the step in which this thread last ran a backward pass


class _Step:
    number = -1
    is_open = False
    is_over = False      # the optimizer has stepped; the next training forward ends the step
    micro = 0
    serial = 0           # of the steps that began
    has_batch = False
    closer = None        # weak: the optimizer that ends steps
    running = []         # optimizers whose step() is open, the outermost first; each has a scope of its thread open
    others = []          # ids of those that stepped since the closer did, once a step
    recorded = set()     # ids of those whose parameters this step holds
    in_scaler = False
    own = True           # False: no optimizer of torch's, so no steps


def recording():
    """Values of this moment are kept."""
    return opened and listening and native.wanted()


def serial():
    """Another number in each step and micro-step."""
    return _Step.serial, _Step.micro


def trains(tree):
    if not tree.trains:
        root = tree.root()
        tree.trains = root is not None and any(p.requires_grad for p in root.parameters())
        if tree.trains and _Step.is_open:
            state.own(tree, deep)
    return tree.trains


def training_forward(args, kwargs):
    """A root is called with gradients wanted."""
    with _lock:
        if _Step.is_open and _Step.is_over:
            end()
        if not _Step.is_open:
            if not _Step.own or not state.living():
                return
            begin()
        elif getattr(_thread, "backward", 0) == _Step.serial:
            _Step.micro += 1
            native.micro_step(_Step.micro)
            _Step.has_batch = False
        _thread.backward = 0
        if _Step.has_batch:
            return
        _Step.has_batch = True
    batch = []
    flatten_call(args, kwargs, "batch", batch)
    for name, tensor in batch:
        put(state.frame(DATA), BATCH, name, tensor)


def begin():
    global opened, deep
    deep = native.LEVEL >= 1
    names.lean = native.LEVEL >= 2
    first = not opened
    if first:
        _Step.number, base = state.base()
        native.set_base(base)
        opened = True
        state.facts()
    else:
        _Step.number += 1
        base = ""
    state.own_all(deep)
    if first:
        state.record_load()
        _first_base[0] = base
    native.begin_step(_Step.number, _first_base[0])
    _Step.is_open, _Step.is_over, _Step.micro = True, False, 0
    _Step.serial, _Step.has_batch = _Step.serial + 1, False
    _Step.recorded.clear()
    for function in on_step:
        function()
    if native.wanted():
        state.record_generators()


_first_base = [""]


def count_anew():
    """The process slept, so nobody counted: how far it has come is asked again."""
    global opened, deep
    with _lock:
        opened, deep = False, native.LEVEL >= 1
        _Step.is_open = _Step.is_over = False
        _Step.others.clear()


def end():
    if native.wanted():
        state.record_rest(_Step.recorded)
    native.end_step()
    _Step.is_open = _Step.is_over = False


def on_loss():
    global opened
    if not listening or not native.active():  # in a forked child the lock may be held by a thread that is not there
        return
    with _lock:
        if not _Step.is_open:
            if state.living():
                begin()
            elif not opened:
                limit_once("no optimizer of torch.optim: the bridge sees no steps (--step-on REGEX can give them)")
                native.set_base("unknown")
                opened = True
                state.own_all(deep)
        _thread.backward = _Step.serial


def _has_closure(args, kwargs):
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return callable(closure)


def _leave(optimizer):
    if optimizer in _Step.running:
        at = _Step.running.index(optimizer)
        for _ in _Step.running[at:]:
            native.pop()
        del _Step.running[at:]


def before_optimizer(optimizer, args, kwargs):
    if torch.compiler.is_compiling():
        return
    try:
        _leave(optimizer)  # its last step() raised
        for function in on_optimizer:
            function()
        _Step.running.append(optimizer)
        native.push(state.frame(OPTIMIZER))  # for launches
        if not listening or not native.active():
            return
        if _has_closure(args, kwargs):
            return  # it computes the gradients: they are recorded when it has
        with _lock:
            if not _Step.is_open:
                state.own_all(deep)
                begin()
        if native.wanted():
            state.record_scalars(optimizer)
            state.record_gradients(optimizer)
    except Exception as error:
        failed("a hook before an optimizer", error)


def after_optimizer(optimizer, args, kwargs):
    if torch.compiler.is_compiling():
        return
    try:
        _leave(optimizer)
        for function in on_stepped:
            function(optimizer)
        if not listening or not _Step.is_open or not native.active():
            return
        if native.wanted():
            if _has_closure(args, kwargs):
                state.record_scalars(optimizer)
                state.record_gradients(optimizer)
            state.record_updated(optimizer)
            _Step.recorded.add(id(optimizer))
        _Step.stepped = optimizer
        if not _Step.running and not _Step.in_scaler:
            _stepped(optimizer)
    except Exception as error:
        failed("a hook after an optimizer", error)


def _stepped(optimizer):
    """The step ends, or will: see above."""
    with _lock:
        closer = _Step.closer() if _Step.closer is not None else None
        if closer is not None and closer is not optimizer:
            _Step.others.append(id(optimizer))
        # One that steps a third time while the closer does not: the closer was of an earlier part of the program.
        if closer is None or _Step.others.count(id(optimizer)) > 2:
            _Step.closer, closer = weakref.ref(optimizer), optimizer
        if closer is optimizer and _Step.is_open:
            _Step.is_over = True
            _Step.others.clear()
            if len(state.living()) <= 1:
                end()


def graph_begins():
    """A CUDA graph that holds an optimizer's step is about to be replayed."""
    with _lock:
        if _Step.is_open and _Step.is_over:
            end()
        if not _Step.is_open:
            begin()


def graph_stepped(optimizer):
    _stepped(optimizer)


_Step.stepped = None


def _scaler_step(original):
    @functools.wraps(original)
    def step(self, optimizer, *args, **kwargs):
        if not listening or not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        _Step.stepped, _Step.in_scaler = None, True
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            _Step.in_scaler = False
        _after_scaler(self, optimizer)
        return result

    return step


def _after_scaler(scaler, optimizer):
    """A skipped step shows in that the optimizer's hooks did not run: nothing is read from the device."""
    try:
        skipped, _Step.stepped = _Step.stepped is None, None
        if not _Step.is_open or not native.active():
            return
        if native.wanted():
            label = state.label_of(optimizer)
            if isinstance(scaler._scale, Tensor):
                put(state.frame(OPTIMIZER), SCALAR, label + "scale", scaler._scale)
            native.scalar(state.frame(OPTIMIZER), SCALAR, label + "skipped", float(skipped))
            if skipped:
                state.record_scalars(optimizer)
                state.record_gradients(optimizer)
                state.record_updated(optimizer)
                _Step.recorded.add(id(optimizer))
        _stepped(optimizer)
    except Exception as error:
        failed("a hook of a GradScaler", error)


def _made(original):
    @functools.wraps(original)
    def patch_step(self, *args, **kwargs):
        try:
            if not any(reference() is self for reference in state.optimizers):
                state.optimizers[:] = [r for r in state.optimizers if r() is not None]
                state.optimizers.append(weakref.ref(self))
        except Exception as error:
            failed("the making of an optimizer", error)
        return original(self, *args, **kwargs)

    return patch_step


def _clipping(original):
    @functools.wraps(original)
    def clip_grad_norm_(*args, **kwargs):
        norm = original(*args, **kwargs)
        try:
            if _Step.is_open and isinstance(norm, Tensor) and not torch.compiler.is_compiling():
                put(state.frame(OPTIMIZER), SCALAR, "grad_norm", norm)
        except Exception as error:
            failed("clip_grad_norm_", error)
        return norm

    return clip_grad_norm_


def at_exit():
    try:
        if listening and _Step.is_open and (_Step.is_over or _Step.others):
            end()
    except Exception as error:
        failed("the end of the program", error)


def install(existing):
    """existing: optimizers made before we came."""
    from torch.optim import optimizer as module

    state.optimizers.extend(weakref.ref(o) for o in existing)
    module.Optimizer._patch_step_function = _made(module.Optimizer._patch_step_function)
    module.register_optimizer_step_pre_hook(before_optimizer)
    module.register_optimizer_step_post_hook(after_optimizer)
    scaler = getattr(torch.amp, "GradScaler", None)
    if scaler is not None:
        scaler.step = _scaler_step(scaler.step)
    clip = _clipping(torch.nn.utils.clip_grad_norm_)
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip
    state.watch_seeds(random)
    state.watch_seeds(sys.modules.get("numpy.random"))
    backward.install(on_loss, on_backward)
    atexit.register(at_exit)
