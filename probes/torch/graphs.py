"""CUDA graphs. Hooks run while a graph is captured and not when it is replayed: of a replay the bridge records what goes
in and out of the module that it runs in, and the state that an optimizer's step inside of it leaves. The rest is
declared."""
import functools
import weakref

import torch

from . import _native as native
from . import layers, state, steps
from .names import failed, limit_once

_capturing = []                         # the graph that is being captured
_optimizers = weakref.WeakKeyDictionary()  # graph -> weak references to optimizers whose step it holds


def _stepped(optimizer):
    if _capturing:
        known = _optimizers.setdefault(_capturing[-1], [])
        if not any(reference() is optimizer for reference in known):
            known.append(weakref.ref(optimizer))


def _wrap_begin(original):
    @functools.wraps(original)
    def capture_begin(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        _capturing[:] = [self]
        steps.captures = True
        return result

    return capture_begin


def _wrap_end(original):
    @functools.wraps(original)
    def capture_end(self, *args, **kwargs):
        _capturing.clear()
        return original(self, *args, **kwargs)

    return capture_end


def _wrap_replay(original):
    @functools.wraps(original)
    def replay(self, *args, **kwargs):
        held = _before(self)
        result = original(self, *args, **kwargs)
        if held:
            _after(held)
        return result

    return replay


def _before(graph):
    """The optimizers whose step the replay holds; a step is open then."""
    try:
        if not steps.listening or not native.active():
            return None
        name = layers.current()[0]
        limit_once("layers inside of a CUDA graph when it is replayed (level launch sees its kernels)", name)
        held = [o for o in (r() for r in _optimizers.get(graph, ())) if o is not None]
        if held:
            steps.graph_begins()
        return held
    except Exception as error:
        failed("a replay of a CUDA graph", error)
        return None


def _after(held):
    try:
        for optimizer in held:
            if native.wanted():
                state.record_scalars(optimizer)
                state.record_gradients(optimizer)
                state.record_updated(optimizer)
            steps.graph_stepped(optimizer)
    except Exception as error:
        failed("a replay of a CUDA graph", error)


def install():
    graph = getattr(torch.cuda, "CUDAGraph", None)
    if graph is None:
        return
    graph.capture_begin = _wrap_begin(graph.capture_begin)
    graph.capture_end = _wrap_end(graph.capture_end)
    graph.replay = _wrap_replay(graph.replay)
    steps.on_stepped.append(_stepped)
