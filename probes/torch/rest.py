"""Modules that no optimizer updates in a step: frozen ones, averages of the weights, teachers. And what the program
leaves behind its last step.

What was called to be trained in a step, or had an optimizer step what it holds, is there in both of two equal runs. Of
anything else nobody knows whether it is garbage that waits to be collected. So that is marked as an evaluation is:
compared where both runs have it, and no difference in itself where only one does. Modules that nobody calls are found
by the hooks that tell of parts and parameters, and by Module.__setstate__ (copies)."""
import weakref

from torch import strided
from torch.nn.parameter import is_lazy

from . import _native as native
from . import made, names, state
from .made import unless_at_the_end
from .names import EVAL, OPTIMIZER, OTHER, PARAMETER, SCALAR, STATE, Many, limit_once

_kept = {}  # id of a root that nobody has called -> (weak root, _Resting)
on_kept_gone = None  # function(_Resting), called when such a root goes, while its parts are still there; endings.py sets it


class _Resting:
    """A root that a step does not train. Its name depends on when it was made, and not on whether it was called: of two runs one
    may evaluate an average, or evaluate it earlier. Nor on whether an earlier step trained it: of two runs one may begin later."""

    __slots__ = ("layers", "held", "serial")

    def __init__(self, root):
        inner = names.unwrapped(root)
        number = made.modules[id(inner) if id(inner) in made.modules else id(root)][1]
        label = "kept." + type(inner).__name__ + ("" if number == 1 else "#%d" % number)
        self.layers = [("%s.%s" % (label, path) if path else label, weakref.ref(part)) for path, part in _paths(root)]
        self.held = _held(label, root)
        self.serial = 0  # of the step in which it was recorded last


def _paths(root):
    """(path, module) of a root and all below, without the components that wrappers add: as layers of a tree are named."""
    found = []
    _add_paths(root, "", found, set())
    return found


def _add_paths(module, path, found, seen):  # no closure: one that calls itself is a cycle, and would hold the modules
    if id(module) in seen:
        return
    seen.add(id(module))
    found.append((path, module))
    inner = names.inner_of(module)
    for name, child in module._modules.items():
        if child is not None:
            if names.layer_name is not None:
                name = names.layer_name(name, child)
            _add_paths(child, path if child is inner else (path + "." + name if path else name), found, seen)


def _held(layer, root):
    """What a root itself holds, which is out of reach once it goes."""
    return [(layer, role, name, weakref.ref(tensor))
            for role, table in ((PARAMETER, root._parameters), (OTHER, root._buffers))
            for name, tensor in table.items() if tensor is not None]


def _look():
    """Finds out where modules belong that came since the last time."""
    keys = list(made.fresh)
    made.fresh.clear()
    roots = {}
    for key in keys:
        module = made.modules[key][0]() if key in made.modules else None
        if module is None:
            continue
        parts = module._modules.values()
        if key not in names.layers or not all(part is None or id(part) in names.layers for part in parts):
            root = names.topmost(module)
            roots[id(root)] = root
    for key, root in roots.items():
        if key in names.trees:
            names.name_tree(root)
            names.trees[key].resting = None  # it has other parts now
        elif key in made.modules and next(root.parameters(), next(root.buffers(), None)) is not None:
            _keep(key, root)


def _keep(key, root):
    resting = _Resting(root)
    _kept[key] = weakref.ref(root, unless_at_the_end(_kept_gone, key)), resting


def _kept_gone(key):
    entry = _kept.pop(key, None)
    try:
        if entry is not None and on_kept_gone is not None and not made.collecting[0]:
            on_kept_gone(entry[1])
    except Exception as error:
        names.failed("the end of a module that rests", error)


def _all_kept():
    if made.fresh:
        _look()
    for key, (reference, resting) in list(_kept.items()):
        root = reference()
        if root is None or key in names.layers or names.topmost(root) is not root:
            _kept.pop(key, None)  # it was called, or became a part of another
        else:
            yield resting


def _layers_of(tree, serial):
    """serial: of the step that they are recorded in."""
    if tree.active != serial:
        root = tree.root()
        if root is not None and tree.resting is None and id(root) in made.modules:
            tree.resting = _Resting(root)
        if tree.resting is not None:
            tree.resting.serial = serial
            return tree.resting.layers
    return [(layer.name, layer.reference) for layer in list(tree.children.values())]


def _is_readable(tensor):
    if type(tensor) not in names.plain:
        return names.special_of(type(tensor)) is not None
    return tensor.layout is strided and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")


def _add(many, layers, phase, seen):
    for layer, reference in layers:
        module = reference()
        if module is not None:
            _add_tensors(many, layer, PARAMETER, module._parameters.items(), phase, seen, module)
            _add_tensors(many, layer, OTHER, module._buffers.items(), phase, seen)


def _add_tensors(many, layer, role, named, phase, seen, module=None):
    for name, tensor in named:
        if tensor is None or is_lazy(tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if _is_readable(tensor):
            owner, full = state.owners.get(id(tensor), (None, name))  # full: it says which part of a sharded one it is
            is_own = module is not None and owner is not None and owner.reference() is module
            box = names.boxes.get(id(tensor)) if is_own else None
            many.add(state.frame(phase, layer, EVAL), role, full if is_own else name, tensor, box)
        else:
            limit_once("what rests in modules that no step trains and cannot be read", type(tensor).__name__)


def record(stepped, serial):
    """At the end of a step. stepped: ids of the optimizers that stepped in it. serial: see Tree.serial."""
    many = Many()
    updated = {id(p) for o in state.living() if id(o) in stepped for group in o.param_groups for p in group["params"]}
    active = {state.owners[p][0].tree for p in updated if p in state.owners}
    updated |= names.unsettled
    active.update(tree for tree in list(names.trees.values()) if tree.trains and tree.serial == serial)
    for tree in list(names.trees.values()):
        if tree in active:
            tree.active = serial
            for layer in list(tree.children.values()):
                state.add_held(many, layer, OPTIMIZER, updated)
    seen = updated | {p for p, (layer, _) in state.owners.items() if layer.tree in active}
    for resting in list(_all_kept()):  # first: it gives names to what belongs to a tree
        resting.serial = serial
        _add(many, resting.layers, OPTIMIZER, seen)
    for tree in list(names.trees.values()):
        if tree not in active:
            _add(many, _layers_of(tree, serial), OPTIMIZER, seen)
    many.flush()


def record_final(serial):
    """When the program ends, behind the last step. serial: that step's."""
    state.own_all(False)
    many, seen = Many(), set(names.unsettled)
    for resting in list(_all_kept()):
        _add(many, resting.layers, STATE, seen)
    for tree in list(names.trees.values()):
        _add(many, _layers_of(tree, serial), STATE, seen)
    for optimizer in state.living():
        state.add_state(many, optimizer, STATE, state.by_layer(optimizer), EVAL)
    many.flush()
    native.scalar(state.frame(STATE, "", EVAL), SCALAR, "end_of_program", 1.0)


def record_gone(tree):
    """The last reference to a root went, and its parts are about to: no later look will find them."""
    _record_parts(tree.own, _layers_of(tree, tree.active))


def record_kept_gone(resting):
    _record_parts(resting.held, resting.layers)


def _record_parts(held, layers):
    many, seen = Many(), set()
    for layer, role, name, reference in held:
        _add_tensors(many, layer, role, [(name, reference())], STATE, seen)
    _add(many, layers, STATE, seen)
    many.flush()


def own(tree):
    """Remembers what a root itself holds."""
    root = tree.root()
    layer = names.layers.get(id(root)) if root is not None else None
    if layer is not None:
        tree.own = _held(layer.name, root)
