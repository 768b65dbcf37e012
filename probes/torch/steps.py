"""When a step begins and ends. What it holds is in state.py.

A step begins with the first training forward after the last one ended and ends when the optimizer has stepped; with
several optimizers it stays open until the next training forward, so that others that step right after still count.

Between two steps a forward of a model in evaluation mode (model.eval()) with gradients wanted is an evaluation, unless
a backward pass or an optimizer's step is the next thing of a step that follows: a model may be trained in that mode."""
import functools
import random
import sys
import threading

import torch

from . import _native as native
from . import backward, imports, names, rest, state
from .names import BATCH, CANDIDATE, DATA, OPTIMIZER, failed, flatten_call, limit_once, put

listening = True   # hooks have something to do in this process
captures = False   # a CUDA graph was captured: workspaces may be its own
opened = False     # the step base is settled: records may be made
deep = native.LEVEL >= 1   # layers are recorded: in this step, where a watch deepens some
_whole = native.LEVEL >= 1  # in all steps: then the gradients at their accumulation too
names.lean = native.LEVEL >= 2

on_optimizer = []  # functions called when an optimizer begins to step
on_step = []       # when a step begins
on_backward = []   # when a backward pass that is not a part of another has ended
on_stepped = []    # functions called with an optimizer that has stepped
current_layer = lambda: ("", 0)  # noqa: E731: (name, flags) of the module whose forward is open; layers.py puts its own
thread_number = lambda: 0  # noqa: E731: of the calling thread; layers.py puts its own
settle = lambda: None  # noqa: E731: called before what happens inside of a layer is recorded; layers.py puts its own
_lock = threading.RLock()
_thread = threading.local()  # .backward: the serial of the step in which this thread last ran a backward pass


class Step:
    number = -1
    counts = False       # that is the number of the last step
    is_open = False
    is_over = False      # the optimizer has stepped; the next training forward ends the step
    micro = 0
    serial = 0           # of the steps that began
    has_batch = False
    has_rest = False     # see _record_rest
    closer = None        # serial number of the optimizer that ends steps
    newest = 0           # that of the optimizer that was made last when it did
    running = []         # optimizers whose step() is open, the outermost first; each has a scope of its thread open
    stepper = 0          # number of the thread in which an optimizer stepped last; 0: none has
    thread = 0           # that the last of them was called in
    others = []          # serial numbers of those that stepped since the closer did, once a step
    candidates = {}      # trees whose forward, between two steps, may be training
    recorded = set()     # ids of those whose parameters this step holds
    in_scaler = False
    stepped = None       # an optimizer's step() has ended since a GradScaler asked for one
    own = True           # False: no optimizer of torch's, so no steps
    base = ""            # what says which number the first step has


def recording():
    """Values of this moment are kept."""
    return opened and listening and native.wanted()


def serial():
    """Another number in each step and micro-step."""
    return Step.serial, Step.micro


def trains(tree):
    if not tree.trains:
        root = tree.root()
        tree.trains = root is not None and any(p.requires_grad for p in root.parameters())
        if tree.trains and Step.is_open:
            state.own(tree, _whole)
    return tree.trains


def training_forward(tree, module, args, kwargs):
    """A root is called with gradients wanted. Gives the flags of what is recorded in it."""
    with _lock:
        if Step.running:
            end_raised()
        if Step.is_open and Step.is_over:
            end()
        if not Step.is_open:
            if not Step.own or not state.in_use:
                return 0
            if not module.training:
                return _candidate(tree, args, kwargs)
            begin()
        elif getattr(_thread, "backward", 0) == Step.serial:
            Step.micro += 1
            native.micro_step(Step.micro)
            Step.has_batch = False
        _thread.backward = 0
        tree.serial = Step.serial
        if Step.has_batch:
            return 0
        Step.has_batch = True
    _record_batch(args, kwargs, 0)
    return 0


def _record_batch(args, kwargs, flags):
    batch = []
    flatten_call(args, kwargs, "batch", batch)
    for name, tensor in batch:
        put(state.frame(DATA, "", flags), BATCH, name, tensor)


def _candidate(tree, args, kwargs):
    _open()
    Step.candidates[tree] = True
    _record_batch(args, kwargs, CANDIDATE)
    return CANDIDATE


def _open():
    """Before the first record."""
    global opened
    if not opened:
        Step.base = state.base()[1]
        native.set_base(Step.base)
        opened = True
        state.facts()


def begin(computed=False):
    """computed: what belongs to the step may have been computed already, in a model in evaluation mode."""
    global deep, _whole
    _whole = native.LEVEL >= 1
    names.lean = native.LEVEL >= 2
    _open()
    first, Step.counts = not Step.counts, True
    Step.number = state.base()[0] if first else Step.number + 1
    state.own_all(_whole)
    if first:
        state.record_load()
    trained = list(Step.candidates) if computed else ()
    native.begin_step(Step.number, Step.base, bool(trained))
    deep = _whole or native.level() >= 1
    Step.is_open, Step.is_over, Step.micro = True, False, 0
    Step.serial, Step.has_batch = Step.serial + 1, bool(trained)
    Step.recorded.clear()
    Step.has_rest = False
    if trained:
        limit_once("evaluations with gradients wanted, of a model that trains in evaluation mode: they count as training")
        for tree in trained:
            tree.serial = Step.serial
    Step.candidates.clear()
    for function in on_step:
        function()
    if native.wanted():
        state.record_generators()


def count_anew():
    """The process slept, so nobody counted: how far it has come is asked again."""
    global opened, deep, _whole
    with _lock:
        opened = False
        deep = _whole = native.LEVEL >= 1
        Step.is_open = Step.is_over = Step.counts = False
        Step.others.clear()
        Step.candidates.clear()


def end():
    _record_rest()
    native.end_step()
    Step.is_open = Step.is_over = False


def _record_rest():
    """Once a step, as soon as it is over: later, what trained in it may be garbage."""
    if Step.has_rest or not native.wanted():
        return
    Step.has_rest = True
    rest.record(Step.recorded, Step.serial)
    for tree in list(names.trees.values()):
        if tree.serial == Step.serial:
            rest.own(tree)


def on_loss():
    global opened
    if not listening or not native.active():  # in a forked child the lock may be held by a thread that is not there
        return
    with _lock:
        if not Step.is_open:
            if state.in_use:
                begin(computed=True)
            elif not opened:
                limit_once("no optimizer of torch.optim: the bridge sees no steps (--step-on REGEX can give them)")
                Step.base = "unknown"
                native.set_base(Step.base)
                opened = True
                state.own_all(_whole)
        _thread.backward = Step.serial


def _has_closure(args, kwargs):
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return callable(closure)


def _leave(optimizer):
    optimizer._optimizer_step_pre_hooks.pop(_LAST, None)
    if optimizer in Step.running:
        at = Step.running.index(optimizer)
        for _ in Step.running[at:]:
            native.pop()
        del Step.running[at:]


def _open_steps():
    """How many calls of an optimizer's step() this thread is in."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _step_code
        frame = frame.f_back
    return count


_step_code = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # of what is around each step()


def end_raised(own=0):
    """An optimizer whose step() raised has not called the hook behind it: the step ends with what it left. own: calls
    of step() that this thread is in, and that are not in `running`."""
    if Step.thread != threading.get_ident() or _open_steps() > own:
        return
    optimizer = Step.running[0]
    _leave(optimizer)
    if listening and Step.is_open and native.active():
        if native.wanted():
            state.record_updated(optimizer)
            Step.recorded.add(id(optimizer))
        stepped(optimizer)


def before_optimizer(optimizer, args, kwargs):
    if torch.compiler.is_compiling():
        return
    try:
        if Step.running:
            end_raised(own=1)
        for function in on_optimizer:
            function()
        Step.running.append(optimizer)
        Step.thread, Step.stepper = threading.get_ident(), thread_number()
        native.push(state.frame(OPTIMIZER))  # for launches
        if not listening or not native.active():
            return
        if _has_closure(args, kwargs):
            return  # it computes the gradients: they are recorded when it has
        with _lock:
            if not Step.is_open:
                state.own_all(_whole)
                begin(computed=True)
        own = optimizer._optimizer_step_pre_hooks
        if own:  # they run behind ours, and may be what waits for a reduction; torch looks there when ours have run
            own[_LAST] = _before_update
        else:
            _before_update(optimizer)
    except Exception as error:
        failed("a hook before an optimizer", error)


_LAST = "forkpoint"  # in the place of a hook's number


def _before_update(optimizer, args=(), kwargs=None):
    try:
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
        if not listening or not Step.is_open or not native.active():
            return
        if native.wanted():
            if _has_closure(args, kwargs):
                state.record_scalars(optimizer)
                state.record_gradients(optimizer)
            state.record_updated(optimizer)
            Step.recorded.add(id(optimizer))
        Step.stepped = True
        if not Step.running and not Step.in_scaler:
            stepped(optimizer)
    except Exception as error:
        failed("a hook after an optimizer", error)


def stepped(optimizer):
    """The step ends, or will: see above."""
    with _lock:
        serial = state.serial_of(optimizer)
        if Step.closer is not None and Step.closer != serial:
            Step.others.append(serial)
        # One that was made since the closer stepped, or steps a third time while it does not: the closer was of an
        # earlier part of the program.
        if Step.closer is None or serial > Step.newest or Step.others.count(serial) > 2:
            Step.closer = serial
        if Step.closer == serial and Step.is_open:
            Step.is_over = True
            Step.newest = state.newest()
            Step.others.clear()
            if len(state.in_use) <= 1:
                end()
            else:
                _record_rest()


def _freed(serial):
    if Step.closer == serial:
        Step.closer = None


def graph_begins():
    """A CUDA graph that holds an optimizer's step is about to be replayed."""
    with _lock:
        if Step.is_open and Step.is_over:
            end()
        if not Step.is_open:
            begin()


def graph_stepped(optimizer):
    stepped(optimizer)


def _made(original):
    @functools.wraps(original)
    def patch_step(self, *args, **kwargs):
        try:
            state.note(self)
        except Exception as error:
            failed("the making of an optimizer", error)
        return original(self, *args, **kwargs)

    return patch_step


def install(existing):
    """existing: optimizers made before we came."""
    from torch.optim import optimizer as module

    for optimizer in existing:
        state.note(optimizer)
    if len(existing) > 1:
        limit_once("the order in which optimizers were made before the recording began")
    state.on_freed.append(_freed)
    module.Optimizer._patch_step_function = _made(module.Optimizer._patch_step_function)
    module.register_optimizer_step_pre_hook(before_optimizer)
    module.register_optimizer_step_post_hook(after_optimizer)
    state.watch_seeds(random)
    imports.after("numpy.random", state.watch_seeds)  # NumPy 2 imports it when it is first used
    backward.install(on_loss, on_backward)
    from . import endings

    endings.install()
