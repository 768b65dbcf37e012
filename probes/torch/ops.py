"""Framework ops (aten, c10d, custom ones) inside of the layers that --ops names, forward and backward.

A dispatch mode sees them. It stands on torch's stack of modes only while such a layer runs: from the layer's pre-hook
to its hook, and around each node of autograd that was made inside of it, on whichever thread the node runs. It is put
there without entering it as a context, so that torch.compile goes on as if it were not there; whatever is compiled runs
without it."""
import fnmatch
import threading
import weakref

import torch
from torch import is_grad_enabled
from torch._C import _current_graph_task_id as graph_task
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack, _pop_torch_dispatch_stack
from torch._C import _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from . import _native as native, steps
from .backward import _LEAF, sequence_number
from .names import BACKWARD, FORWARD, INPUT, OUTPUT, failed, flatten, limit_once
from .op_compile import is_compiled, watch_compiled, watch_higher_order
from .op_records import Blanks, frame_of, known, record_inputs, record_node, record_outputs

is_compiling = torch.compiler.is_compiling
_globs = [glob.strip() for glob in native.OPS.split(",") if glob.strip()]
_matches = {}  # name of a layer -> it, or a layer that it is a part of, is named by a glob
# Nodes whose backward takes another formula, with other bits, where a mode is entered, and compiled ones. They are
# recorded as one op each.
_UNOBSERVED = ("CompiledFunction", "CumprodBackward", "ProdBackward")
_MOST_NODES = 1_000_000
_no_dispatch = torch.Tensor.__torch_dispatch__  # of a type that has none of its own
_with_scopes = native.LEVEL >= 2  # launches are told the op that they are part of


def matches(name):
    known_match = _matches.get(name)
    if known_match is None:
        parts = name.split(".")
        paths = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        known_match = _matches[name] = any(fnmatch.fnmatchcase(p, glob) for p in paths for glob in _globs)
    return known_match


class _Scope:
    """One call of a layer, or its backward."""

    __slots__ = ("layer", "phase", "flags", "counts", "oldest", "made", "pass_number", "pushed", "claimed")

    def __init__(self, layer, phase, flags):
        self.layer = layer
        self.phase = phase
        self.flags = flags
        self.counts = {}      # name of an op -> how many there were
        self.oldest = 0       # number of autograd's next node when the call began
        self.made = []        # weak references to what its ops made
        self.pass_number = -1  # of the backward pass that counts are of
        self.pushed = False   # the mode was put onto the stack for it
        self.claimed = None   # nodes that belong to calls inside of the outermost one; shared with them


class _Thread(threading.local):
    def __init__(self):
        self.current = None   # _Scope in which ops are recorded now
        self.outer = []       # (scope, pushed) around it, for nodes
        self.scopes = []      # open forward scopes
        self.compiled = 0     # how many compiled functions are running
        self.forgotten = 0    # how often all open calls were
        self.blanks = Blanks()


_thread = _Thread()


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        thread = _thread
        scope = thread.current
        if scope is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        for kind in types:
            if kind.__torch_dispatch__ is not _no_dispatch:
                return NotImplemented  # a subclass is asked first; the ops on what it wraps come by here
        op = known(func)
        if op is None:
            limit_once("ops inside of higher-order operators", str(func))
            return func(*args, **kwargs) if kwargs else func(*args)
        return _run(thread, scope, op, func, args, kwargs or {})


_mode = _Mode()


def _run(thread, scope, op, func, args, kwargs):
    frame, unwritten, arguments = 0, False, ()
    try:
        if scope.phase == FORWARD:
            steps.settle()
        frame = frame_of(scope, op.name)
        arguments = [*zip(op.parameters, args), *kwargs.items()]
        unwritten = record_inputs(frame, op, arguments, thread.blanks)
    except Exception as error:
        failed("a hook before an op", error)
    if not _with_scopes:
        out = func(*args, **kwargs)
    else:
        native.push(frame)
        try:
            out = func(*args, **kwargs)
        finally:
            native.pop()
    try:
        record_outputs(frame, op, arguments, out, thread.blanks, unwritten)
        if scope.phase == FORWARD and isinstance(out, torch.Tensor):
            scope.made.append(weakref.ref(out))
    except Exception as error:
        failed("a hook after an op", error)
    return out


# ---- Torch's stack of modes


def _place():
    """Where the mode stands on this thread's stack; -1: nowhere. It may be there by way of the thread that called
    backward(), whose modes autograd takes along."""
    for place in range(_len_torch_dispatch_stack() - 1, -1, -1):
        if _get_dispatch_stack_at(place) is _mode:
            return place
    return -1


def _on():
    if _place() >= 0:
        return False
    _push_on_torch_dispatch_stack(_mode)
    return True


def _off():
    """Takes it away, also from under modes that the host entered meanwhile and left there."""
    place = _place()
    if place < 0:
        return False
    above = []
    while _len_torch_dispatch_stack() > place + 1:
        above.append(_pop_torch_dispatch_stack(None))
    _pop_torch_dispatch_stack(None)
    for mode in reversed(above):
        _push_on_torch_dispatch_stack(mode)
    return True


# ---- Forward, called by layers.py


def enter(layer, flags, module):
    """A recorded call of a layer begins. Returns what leave() wants; None: its ops are not recorded."""
    thread = _thread
    watch_compiled(_compiled_begins)
    if thread.compiled or is_compiled(module):
        if thread.compiled == 0 and (thread.scopes or matches(layer.name)):
            limit_once("ops inside of compiled functions", layer.name)
        return None
    if not (thread.scopes or matches(layer.name)):
        return None
    scope = _Scope(layer, FORWARD, flags)
    scope.oldest = sequence_number()
    scope.claimed = thread.scopes[-1].claimed if thread.scopes else set()
    thread.scopes.append(scope)
    thread.outer.append((thread.current, False))
    thread.current = scope
    scope.pushed = _on()
    return scope


def leave(scope, output=None, edges=None):
    """It has ended; without an output when it raised, or returned None."""
    thread = _thread
    if scope not in thread.scopes:
        return
    while thread.scopes:
        top = thread.scopes.pop()
        thread.current = thread.outer.pop()[0] if thread.outer else None
        if top.pushed:
            _off()
        if top is scope:
            break
    outputs = []
    try:
        if output is not None:
            flatten(output, "output", outputs)
        if not thread.scopes:
            thread.blanks.known.clear()
        elif thread.blanks.known:
            for _, tensor in outputs:
                thread.blanks.forget(tensor)  # the layer's output is recorded, whatever it holds
        if is_grad_enabled():
            _watch_nodes(scope, [t for _, t in outputs], edges)
    finally:
        scope.made = []


def _watch_nodes(scope, outputs, edges):
    made = [t for t in (reference() for reference in scope.made) if t is not None]
    starts = [t.grad_fn for t in (*outputs, *made) if t.grad_fn is not None]
    if not starts:
        return
    stop = {node for _, node, _, _ in edges or () if node is not None}
    nodes = _nodes_of(starts, stop, scope)
    if not nodes:
        return
    scope.claimed.update(nodes)
    backward = _Scope(scope.layer, BACKWARD, 0)
    for node in nodes:
        kind = type(node).__name__  # of a Function of the host, `name` may be what that has put there
        if kind.startswith(_UNOBSERVED):
            before, after = _unobserved_hooks(backward, kind)
        else:
            before, after = _observed_hooks(backward)
        node.register_prehook(before)
        node.register_hook(after)


def _nodes_of(starts, stop, scope):
    """Nodes made during the call that no call inside of it has: not older than its beginning, on this thread."""
    found, seen, queue = [], set(stop), list(starts)
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        made = node._sequence_nr()
        if made == _LEAF or made < scope.oldest:
            continue
        if node not in scope.claimed:
            found.append(node)
        if len(seen) > _MOST_NODES:
            limit_once("ops in the backward of a layer with more than %d nodes" % _MOST_NODES, scope.layer.name)
            return []
        queue.extend(following for following, _ in node.next_functions if following is not None)
    return found


# ---- Backward


def _begin_pass(scope):
    task = graph_task()
    if scope.pass_number != task:
        scope.pass_number = task
        scope.counts.clear()
    if is_grad_enabled():
        limit_once("ops of the backward of a backward (create_graph=True)", scope.layer.name)


def _observed_hooks(scope):
    def before(grads):
        if is_compiling():
            return None
        try:
            thread = _thread
            _begin_pass(scope)
            wanted = native.wanted() and not thread.compiled
            thread.outer.append((thread.current, _on() if wanted else False))
            thread.current = scope if wanted else None
        except Exception as error:
            failed("a hook before a node's ops", error)
        return None

    def after(grad_inputs, grad_outputs):
        if is_compiling():
            return None
        try:
            _end_node(_thread)
        except Exception as error:
            failed("a hook after a node's ops", error)
        return None

    return before, after


def _end_node(thread):
    if thread.outer:
        thread.current, pushed = thread.outer.pop()
        if pushed:
            _off()
    if thread.current is None:
        thread.blanks.known.clear()


def _unobserved_hooks(scope, kind):
    frames = []

    def before(grads):
        if is_compiling():
            return None
        try:
            thread = _thread
            _begin_pass(scope)
            removed = _off()  # a mode that came along from the thread that called backward()
            thread.outer.append((thread.current, removed))
            thread.current = None
            frames.append(frame_of(scope, kind))
            record_node(frames[-1], grads, INPUT, "grad_output")
        except Exception as error:
            failed("a hook before a node", error)
        return None

    def after(grad_inputs, grad_outputs):
        if is_compiling():
            return None
        try:
            thread = _thread
            if thread.outer:
                thread.current, removed = thread.outer.pop()
                if removed:
                    _on()
            if frames:
                record_node(frames.pop(), grad_inputs, OUTPUT, "grad_input")
        except Exception as error:
            failed("a hook after a node", error)
        return None

    return before, after


# ---- torch.compile


def _compiled_begins():
    """Called by torch as a compiled function begins; what it returns, when that ends."""
    thread = _thread
    outer, removed, forgotten = thread.current, False, thread.forgotten
    thread.compiled += 1
    if outer is not None:
        limit_once("ops inside of compiled functions", outer.layer.name)
        thread.current = None
        removed = _off()

    def ends():
        thread.compiled -= 1
        if forgotten == thread.forgotten:
            thread.current = outer
            if removed:
                _on()

    return ends


def forget_open_calls():
    """An optimizer steps on this thread: no layer is running, whatever exceptions passed."""
    thread = _thread
    thread.current = None
    thread.forgotten += 1
    del thread.scopes[:], thread.outer[:]
    thread.blanks.known.clear()
    _off()


def install():
    from . import layers

    watch_higher_order(_off, _on)
    layers.ops_enter, layers.ops_leave = enter, leave
    steps.on_optimizer.append(forget_open_calls)
    limit_once("ops outside of the layers that --ops names", native.OPS)
