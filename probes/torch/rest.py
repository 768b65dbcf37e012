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

_kept = {}  # id of a root that nobody has called -> (weak root, [(name of the layer, weak module)])


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
        elif key in made.modules and next(root.parameters(), next(root.buffers(), None)) is not None:
            _keep(key, root)


def _keep(key, root):
    number = made.modules[key][1]
    label = "kept." + type(names.unwrapped(root)).__name__ + ("" if number == 1 else "#%d" % number)
    layers = [("%s.%s" % (label, path) if path else label, weakref.ref(part)) for path, part in root.named_modules()]
    _kept[key] = weakref.ref(root, unless_at_the_end(_kept.pop, key, None)), layers


def _kept_layers():
    if made.fresh:
        _look()
    for key, (reference, layers) in list(_kept.items()):
        root = reference()
        if root is None or key in names.layers or names.topmost(root) is not root:
            _kept.pop(key, None)  # it was called, or became a part of another
        else:
            yield layers


def _layers_of(tree):
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
            for layer in list(tree.children.values()):
                state.add_held(many, layer, OPTIMIZER, updated)
    seen = updated | {p for p, (layer, _) in state.owners.items() if layer.tree in active}
    for layers in list(_kept_layers()):  # first: it gives names to what belongs to a tree
        _add(many, layers, OPTIMIZER, seen)
    for tree in list(names.trees.values()):
        if tree not in active:
            _add(many, _layers_of(tree), OPTIMIZER, seen)
    many.flush()


def record_final():
    """When the program ends, behind the last step."""
    state.own_all(False)
    many, seen = Many(), set(names.unsettled)
    for layers in list(_kept_layers()):
        _add(many, layers, STATE, seen)
    for tree in list(names.trees.values()):
        _add(many, _layers_of(tree), STATE, seen)
    for optimizer in state.living():
        state.add_state(many, optimizer, STATE, state.by_layer(optimizer), EVAL)
    many.flush()
    native.scalar(state.frame(STATE, "", EVAL), SCALAR, "end_of_program", 1.0)


def record_gone(tree):
    """The last reference to a root went, and its parts are about to: no later look will find them."""
    many, seen = Many(), set()
    for layer, role, name, reference in tree.own:
        _add_tensors(many, layer, role, [(name, reference())], STATE, seen)
    _add(many, _layers_of(tree), STATE, seen)
    many.flush()


def own(tree):
    """Remembers what a root itself holds, which is out of reach once it goes."""
    root = tree.root()
    layer = names.layers.get(id(root)) if root is not None else None
    if layer is None:
        return
    held = []
    for role, table in (PARAMETER, root._parameters), (OTHER, root._buffers):
        held += [(layer.name, role, name, weakref.ref(t)) for name, t in table.items() if t is not None]
    tree.own = held
