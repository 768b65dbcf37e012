"""What a step holds besides layers: generators, gradients as the optimizer takes them, scalars, parameters, state."""
import functools
import itertools
import random
import sys
import weakref
from array import array

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy  # it gets its shape in the first forward

from . import _native as native
from . import backward, names
from .made import Numbers, collecting, unless_at_the_end
from .names import GRADIENT, LOAD, OPTIMIZER, OPTIMIZER_STATE, OTHER, PARAMETER, RNG, SCALAR, STATE, Many, join, put
from .values import record_value

optimizers = {}    # id -> Made, in the order in which they were made
in_use = set()     # serial numbers of optimizers, but of those that went with the last reference to them
on_facts = []      # functions called before the first record
on_made = []        # when an optimizer of torch's is made
on_generators = []  # functions called with the frame of the generators, when those are recorded
find_parts = []    # functions(module, {id of a parameter: what is added to its name}) of parallel.py and megatron.py
find_copies = None  # function() of megatron.py: which layer the copies of parameters belong to that an optimizer updates
_frames = {}
_switched = set()  # names of switches that were noted
_numbers = Numbers()
_serials = itertools.count(1)
on_freed = []      # functions called with the serial number of an optimizer that went so
owners = {}       # id of a parameter -> (Layer, its name); made anew for each step: it is valid only within one


class Made:
    """An optimizer. number: among those in use, see Numbers. serial: among all, never used again."""

    __slots__ = "reference", "number", "serial"

    def __init__(self, optimizer):
        key = id(optimizer)
        self.number, self.serial = _numbers.take(""), next(_serials)
        self.reference = weakref.ref(optimizer, unless_at_the_end(_gone, key, self.number, self.serial))
        in_use.add(self.serial)


def note(optimizer):
    if id(optimizer) not in optimizers:
        optimizers[id(optimizer)] = Made(optimizer)
        for function in on_made:
            function()


def _gone(key, number, serial):
    optimizers.pop(key, None)
    if not collecting[0]:
        in_use.discard(serial)
        _numbers.give_back("", number)
        for function in on_freed:
            function(serial)


def serial_of(optimizer):
    note(optimizer)
    return optimizers[id(optimizer)].serial


def newest():
    """Serial number of the optimizer that was made last."""
    return max((made.serial for made in list(optimizers.values())), default=0)


def frame(phase, layer="", flags=0, op=""):
    key = phase, layer, flags, op
    handle = _frames.get(key)
    if handle is None:
        handle = _frames[key] = native.frame(phase, layer, op, 0, flags)
    return handle


def own(tree, deep):
    """Which layer each parameter belongs to; a gradient's hook for each that lacks one."""
    parts = {}
    for layer in list(tree.children.values()):
        module = layer.reference()
        if module is None:
            continue
        for find in find_parts:
            find(module, parts)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in owners:
                continue
            name += parts.get(id(parameter), "")
            owners[id(parameter)] = layer, name
            if deep and parameter.requires_grad and not is_lazy(parameter) and parameter.is_leaf:
                backward.watch_parameter(parameter, layer, name)


def _find_parts():
    """A part that was called by itself before the whole was made is a tree of its own; it trains with the whole."""
    idle = []
    for tree in list(names.trees.values()):
        root = tree.root() if not tree.trains else None
        if root is not None and next(root.parameters(), next(root.buffers(), None)) is not None:
            idle.append((tree, root))
    if not idle:
        return
    roots = [tree.root() for tree in list(names.trees.values()) if tree.trains]
    training = {id(module) for root in roots if root is not None for module in root.modules()}
    for tree, root in idle:
        tree.trains = id(root) in training


def own_all(deep):
    owners.clear()
    names.boxes.clear()
    _find_parts()
    for tree in list(names.trees.values()):
        if tree.trains:
            own(tree, deep)
    if find_copies is not None:
        find_copies()


def living():
    """What can be recorded. Nothing is decided by it: when garbage is collected differs in any two runs."""
    return [o for o in (made.reference() for made in list(optimizers.values())) if o is not None]


def base():
    """(number of the first step, what says so). A count kept on a device is not read: that would wait for it."""
    if native.FIRST_STEP >= 0:
        return native.FIRST_STEP, "first-step"
    counts, stateless = [], True
    for optimizer in living():
        for group in optimizer.param_groups:
            if isinstance(group.get("step"), int):
                counts.append(group["step"])
        for state in optimizer.state.values():
            stateless = False
            count = state.get("step", state.get("n_iter")) if isinstance(state, dict) else None
            if isinstance(count, Tensor) and count.device.type == "cpu" and count.numel() == 1:
                count = count.item()
            if isinstance(count, (int, float)):
                counts.append(int(count))
    if counts:
        return max(counts), "optimizer"
    keeps_none = all(type(o).__name__ == "SGD" and not any(g.get("momentum") for g in o.param_groups) for o in living())
    # A fresh optimizer and one that never keeps a state look alike; of the second nobody knows how far it has come.
    return 0, "optimizer" if stateless and not keeps_none else "unknown"


def facts():
    """And what of the job is not seen, whatever it does later."""
    for function in on_facts:
        function()
    native.limit("what becomes of models and optimizers behind the last step, where they are gone when the program "
                 "ends, or it is killed", "")
    native.limit("copies of the weights that no module holds, such as an average kept in a list", "")
    for module, whose in ("random", "Python's"), ("numpy.random", "NumPy's"):
        if module in sys.modules and module not in _seeded:  # words that diff knows (lib/generators.h)
            native.limit(("whether %s generator was seeded before the recording began" if module in _older else
                          "the state of %s generator, which was not seen to be seeded before the first step") % whose, "")
    native.fact("torch", torch.__version__)
    native.fact("torch.cuda", str(torch.version.cuda))
    native.fact("torch.threads", str(torch.get_num_threads()))
    native.fact("torch.deterministic", str(torch.are_deterministic_algorithms_enabled()))
    native.fact("torch.float32_matmul", _float32_matmul())
    native.fact("torch.cudnn.benchmark", str(torch.backends.cudnn.benchmark))
    native.fact("torch.cudnn.deterministic", str(torch.backends.cudnn.deterministic))


def _float32_matmul():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has said it by the newer interface, fp32_precision of torch 2.9
        return {"tf32": "high", "bf16": "medium"}.get(torch.backends.cuda.matmul.fp32_precision, "highest")


def record_load():
    many = Many()
    for tree in list(names.trees.values()):
        if tree.trains:
            for layer in list(tree.children.values()):
                add_held(many, layer, LOAD, ())
    for optimizer in living():
        add_state(many, optimizer, LOAD, by_layer(optimizer))
    many.flush()


def add_held(many, layer, phase, without):
    """A module's own parameters, but those with an id in `without` and those of an earlier module, and its buffers."""
    module = layer.reference()
    if module is None or not (module._parameters or module._buffers):
        return
    where = frame(phase, layer.name)
    for parameter in module._parameters.values():
        if parameter is None or is_lazy(parameter) or id(parameter) in without:
            continue
        owner, name = owners.get(id(parameter), (None, ""))
        if owner is layer:
            many.add(where, PARAMETER, name, parameter, names.boxes.get(id(parameter)))
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_lazy(buffer):
            many.add(where, OTHER, name, buffer)


def record_generators():
    where = frame(STATE)
    native.tensor(where, RNG, "torch.rng", torch.default_generator.get_state())
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        for i, generator in enumerate(torch.cuda.default_generators):
            native.tensor(where, RNG, "cuda:%d.rng" % i, generator.get_state())  # kept on the host
    if "random" in _seeded or "random" in _older:
        version, words, gauss = random.getstate()
        native.state(where, RNG, "python.rng", array("I", words).tobytes() + repr(gauss).encode())
    for function in on_generators:
        function(where)
    numpy = sys.modules.get("numpy.random")
    watch_seeds(numpy)
    if numpy is not None and ("numpy.random" in _seeded or "numpy.random" in _older):
        name, key, position, has_gauss, gauss = numpy.get_state()
        native.state(where, RNG, "numpy.rng", key.tobytes() + repr((name, position, has_gauss, gauss)).encode())


_seeded = set()
_older = set()  # modules with a generator that were there before the recording began: they may have been seeded


def late():
    _older.update(module for module in ("random", "numpy.random") if module in sys.modules)


def watch_seeds(module):
    """A generator that nobody seeded differs in any two processes, whatever depends on it: not recorded."""
    if module is None or module.__name__ in _watched:
        return
    _watched.add(module.__name__)
    for name in ("seed", "setstate", "set_state"):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _Seeding(original, module.__name__))


_watched = set()


class _Seeding:
    """In place of a function that seeds a generator. It passes for that: copies and pickles are those of the function
    itself (a loader sends its worker_init_fn to its workers)."""

    def __init__(self, original, module):
        self.__dict__.update(__wrapped__=original, _module=module)
        functools.update_wrapper(self, original)

    def __call__(self, *args, **kwargs):
        # torch puts back what it has saved (dynamo, around each frame that it compiles): nobody was seeded by that.
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            # Who only puts a state back need not have seeded the one that was saved.
            (_seeded if self.__name__ == "seed" else _older).add(self._module)
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)

    def __repr__(self):
        return repr(self.__wrapped__)

    def __reduce_ex__(self, protocol):
        original = self.__wrapped__.__reduce_ex__(protocol)
        return self.__name__ if isinstance(original, str) else original


def label_of(optimizer):
    """Prefix of an optimizer's scalars: nothing for the first one."""
    note(optimizer)
    number = optimizers[id(optimizer)].number
    return "" if number == 1 else "%s#%d." % (type(optimizer).__name__, number)


def by_layer(optimizer):
    """[(name of the layer, names of its parameters, the parameters)] in the order of the groups."""
    out, last = [], None
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            layer, name = owners.get(id(parameter), (None, None))
            if layer is None:
                name = "%sgroup%d.param%d" % (label_of(optimizer), g, i)
            path = layer.name if layer is not None else ""
            if last is None or last[0] != path:
                last = (path, [], [])
                out.append(last)
            last[1].append(name)
            last[2].append(parameter)
    return out


def record_scalars(optimizer):
    where = frame(OPTIMIZER)
    label = label_of(optimizer)
    several = len(optimizer.param_groups) > 1
    for g, group in enumerate(optimizer.param_groups):
        known = optimizer.defaults or set(group) - {"params"}  # some optimizers name none
        prefix = "%sgroup%d." % (label, g) if several else label
        for key, value in group.items():
            if key in _SWITCHES:
                _note_switch(prefix + key, value)
            elif key in known or key in ("initial_lr", "step"):
                record_value(where, SCALAR, prefix + key, value)
            elif key != "params":  # a name, a time stamp, what a schedule computes the learning rate from
                names.limit_once("entries of an optimizer's groups that are none of its options", key)
    found = getattr(optimizer, "found_inf", None)  # of a fused optimizer under a GradScaler: it skips by itself
    if isinstance(found, Tensor):
        put(where, SCALAR, label + "found_inf", found)


# By which kernels an optimizer does what it does: no numbers of the training. Where they change its results, these differ.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}


def _note_switch(name, value):
    if value is not None and name not in _switched:
        _switched.add(name)
        native.fact("torch.optim %s" % name, str(bool(value)))


def record_gradients_of(parameters):
    """What clip_grad_norm_ is handed, of a model that is trained. Under a name of its own: a program that clips in another
    way has the same gradients at the optimizer's step."""
    many = Many()
    for parameter in parameters:
        layer, name = owners.get(id(parameter), (None, None))
        gradient = parameter.grad if layer is not None else None
        if gradient is not None:
            many.add(frame(OPTIMIZER, layer.name, 0, "clip_grad_norm_"), GRADIENT, join(name, "grad"), gradient, names.boxes.get(id(parameter)))
    many.flush()


def record_gradients(optimizer):
    many = Many()
    for path, own, parameters in by_layer(optimizer):
        where = frame(OPTIMIZER, path)
        for name, parameter in zip(own, parameters):
            gradient = parameter.grad
            if gradient is not None:
                many.add(where, GRADIENT, join(name, "grad"), gradient, names.boxes.get(id(parameter)))
    many.flush()


def record_updated(optimizer):
    many = Many()
    layers = by_layer(optimizer)
    for path, own, parameters in layers:
        where = frame(OPTIMIZER, path)
        for name, parameter in zip(own, parameters):
            many.add(where, PARAMETER, name, parameter, names.boxes.get(id(parameter)))
    add_state(many, optimizer, OPTIMIZER, layers)
    many.flush()


def add_state(many, optimizer, phase, layers, flags=0):
    """layers: by_layer(optimizer)."""
    states = optimizer.state
    for path, own, parameters in layers:
        where = frame(phase, path, flags)
        held = []
        for name, parameter in zip(own, parameters):
            state, box = states.get(parameter), names.boxes.get(id(parameter))
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    held.append((join(name, key), value, box))
                else:
                    many.flush()
                    record_value(where, OPTIMIZER_STATE, join(name, key), value)
        for name, value, box in held:
            many.add(where, OPTIMIZER_STATE, name, value, box)
    many.flush()
    for key, value in states.items():
        if not isinstance(key, Tensor):  # of no parameter
            record_value(frame(phase, "", flags), OPTIMIZER_STATE, "%sstate.%s" % (label_of(optimizer), key), value)
