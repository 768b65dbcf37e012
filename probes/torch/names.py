"""What things are called: modules by their path, nested values by theirs. Nothing is written into either.

No name depends on when garbage is collected, which is another time in each run: see Numbers."""
import dataclasses
import enum
import weakref
from collections.abc import Mapping

from torch import Tensor, strided
from torch.nn import Parameter

from . import _native as native
from . import made
from .made import Numbers, collecting, unless_at_the_end

LOAD, DATA, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER, STATE = range(7)
INPUT, OUTPUT, PARAMETER, GRADIENT, OPTIMIZER_STATE, BATCH, LOSS, SCALAR, RNG, SAMPLER, OTHER = range(11)
EVAL, RECOMPUTE = 1, 2
CANDIDATE = 4  # of a model in evaluation mode, between two steps: training where a backward pass follows, else EVAL

# Attribute of a wrapper that holds the module proper: a component that no name shows.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module"}
_MOST_VALUES, _MOST_DEPTH, _MOST_NAMES = 1024, 12, 65536


class Layer:
    """One module: its name and the interned frames of its phases (forward by flags: training, eval, recompute)."""

    __slots__ = ("name", "reference", "forward", "backward", "is_leaf", "tree", "number", "hooks")

    def __init__(self, name, reference, is_leaf):
        self.name = name
        self.reference = reference
        self.forward = [native.frame(FORWARD, name, "", 0, flags) for flags in range(5)]
        self.backward = native.frame(BACKWARD, name)
        self.is_leaf = is_leaf
        self.tree = None    # the Tree that it belongs to
        self.number = None  # (name, number) in tree.extra, of a module outside of the tree
        self.hooks = {}     # see backward._watch_one


class Tree:
    """All modules under one that has no parent: what names are relative to."""

    __slots__ = ("prefix", "label", "class_name", "number", "root", "children", "trains", "extra", "serial", "own",
                 "threads", "resting", "active")

    def __init__(self, root):
        self.root = root      # weak
        self.children = {}    # id of a module that lives -> Layer, in the order of named_modules
        self.trains = False   # it holds a parameter that wants a gradient
        self.extra = Numbers()  # of modules outside the tree that were called, under each name
        self.serial = 0       # of the last step in which it trained
        self.own = ()         # (name of the layer, role, name, weak reference): what the root itself holds
        self.resting = None   # see rest.py: of one that a step did not train
        self.active = 0       # serial of the last step whose update was of it
        self.threads = None   # [serial of a step, the thread that called it there, whether several did]


layers = {}        # id of a module -> Layer; an entry goes when its module does
trees = {}         # id of a root -> Tree
_parents = {}      # id of a module -> (weak module, weak parent)
_taken = Numbers()  # of trees, by class name
_unprefixed = []   # id of the root without prefix
on_gone = None     # function(tree), called when a root goes, while all below it is still there; endings.py sets it
_join = {}
_kinds = {}
lean = False       # launches are recorded: what layers are handed on a GPU is left to them (layers.py)
specials = {}      # type of a tensor -> function(frame, role, name, tensor, flags), or None: it is read as it is
layer_name = None  # function(name, module): another name of a part; megatron.py sets it
find_special = None  # function(type) that gives one; parallel.py sets it. Asked once a type.
_said = set()


def limit_once(what, detail=""):
    if (what, detail) not in _said:
        _said.add((what, detail))
        native.limit(what, detail)


def failed(where, error):
    """An error of the bridge itself: said once, never the host's problem."""
    text = "the torch bridge failed in %s: %s: %s" % (where, type(error).__name__, error)
    if (where, type(error)) not in _said:
        _said.add((where, type(error)))
        native.say(text)
    native.gap(text)


def unwrapped(module):
    """The module proper inside of any number of wrappers."""
    for _ in range(16):
        inner = inner_of(module)
        if inner is None:
            break
        module = inner
    return module


def inner_of(module):
    children = module._modules
    for name in _WRAPPED:
        if name in children and children[name] is not None:
            return children[name]
    if "module" in children and any(c.__name__ in _WRAPPERS for c in type(module).__mro__):
        return children["module"]
    return None


def registered(parent, name, child):
    """Global hook: `child` became a part of `parent`. So a root is found though a part of it is called by itself."""
    try:
        if child is None:
            return
        known = _parents.get(id(child))
        if known is None or known[1]() is None:
            key = id(child)
            _parents[key] = weakref.ref(child, unless_at_the_end(_parents.pop, key, None)), weakref.ref(parent)
        made.note(parent)
        made.fresh[id(parent)] = None
    except Exception as error:
        failed("the registration of a module", error)


def registered_parameter(module, name, parameter):
    """Global hook: `module` got a parameter."""
    try:
        made.note(module)
    except Exception as error:
        failed("the registration of a parameter", error)


def topmost(module):
    for _ in range(64):
        link = _parents.get(id(module))
        parent = link[1]() if link else None
        if parent is None or not any(child is module for child in parent._modules.values()):
            break
        module = parent
    return module


def _forget_layer(key):
    layer = layers.pop(key, None)
    if layer is not None and layer.tree is not None:  # forward() may make modules at each call: none of them stays
        layer.tree.children.pop(key, None)
        if layer.number is not None:
            layer.tree.extra.give_back(*layer.number)


def _forget_tree(key):
    tree = trees.pop(key, None)
    if tree is None:
        return
    try:
        if on_gone is not None and not collecting[0]:
            on_gone(tree)
    except Exception as error:
        failed("the end of a model", error)
    _taken.give_back(tree.class_name, tree.number)
    if not tree.prefix and not collecting[0]:
        _unprefixed.clear()


def _know(module, name, tree):
    key = id(module)
    layer = Layer(name, weakref.ref(module, unless_at_the_end(_forget_layer, key)), not module._modules)
    layer.tree = tree
    layers[key] = tree.children[key] = layer
    return layer


def _new_tree(root):
    key = id(root)
    tree = Tree(weakref.ref(root, unless_at_the_end(_forget_tree, key)))
    tree.class_name = type(unwrapped(root)).__name__
    if getattr(root, "_is_replica", False):  # of DataParallel: a new object in each forward
        tree.class_name = "replica of " + tree.class_name
    tree.number = _taken.take(tree.class_name)
    tree.label = tree.class_name if tree.number == 1 else "%s#%d" % (tree.class_name, tree.number)
    tree.prefix = tree.label + "."
    if not _unprefixed and next(iter(root.parameters()), None) is not None:
        _unprefixed.append(key)
        tree.prefix = ""
    trees[key] = tree
    return tree


def _walk(module, path, tree, seen):
    """Names `module` and all below; what has a name keeps it. The names of wrappers' components are left out."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) not in layers:
        _know(module, tree.prefix + path if path else tree.label, tree)
    inner = inner_of(module)
    for name, child in module._modules.items():
        if child is not None:
            if layer_name is not None:
                name = layer_name(name, child)
            below = path if child is inner else (path + "." + name if path else name)
            _walk(child, below, tree, seen)


def name_tree(module):
    """Layer of a module that is called while no other is: names all that lies under its topmost parent."""
    root = topmost(module)
    tree = trees.get(id(root)) or _new_tree(root)
    _walk(root, "", tree, set())
    layer = layers.get(id(module))
    return layer if layer is not None else name_stray(module, None)


def name_stray(module, outer):
    """Layer of a module that is called inside of `outer` and is no part of it: in a plain list, made on the fly."""
    if outer is None:
        return name_tree(module)
    tree = outer.tree
    known = tree.root()
    # It may have been put into the tree since the tree was named.
    if known is not None and id(module) in _parents and topmost(module) is known:
        _walk(known, "", tree, set())
        if id(module) in layers:
            return layers[id(module)]
    name = "%s.%s" % (outer.name, type(unwrapped(module)).__name__) if outer.name != tree.label or tree.prefix \
        else type(unwrapped(module)).__name__
    number = tree.extra.take(name)
    label = name if number == 1 else "%s#%d" % (name, number)
    layer = _know(module, label, tree)
    layer.number = name, number
    for child_name, child in module._modules.items():
        if child is not None:
            _walk(child, label[len(tree.prefix):] + "." + child_name, tree, set())
    return layer


def join(prefix, key):
    try:
        return _join[prefix, key]
    except KeyError:
        if len(_join) > _MOST_NAMES:
            _join.clear()
        name = _join[prefix, key] = "%s.%s" % (prefix, key)
        return name


def _kind_of(kind):
    """How values of a type are looked into: 0 not at all, 1 a tensor, 2 a sequence, 3 a mapping, else its fields."""
    if issubclass(kind, Tensor):
        return 1
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if issubclass(kind, Mapping):  # before dataclasses: a ModelOutput is both
        return 3
    if issubclass(kind, (tuple, list)):
        return 2
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, enum.Enum):
        return 0
    if kind.__module__ not in ("builtins", "torch", "numpy") and kind.__flags__ & (1 << 9):  # made by a class statement
        limit_once("values of this type are not looked into", "%s.%s" % (kind.__module__, kind.__qualname__))
    return 0


def flatten(value, name, into, depth=0):
    """Appends (name, tensor) of each tensor in a nested value."""
    kind = _kinds.get(type(value))
    if kind is None:
        kind = _kinds[type(value)] = _kind_of(type(value))
    if kind == 0:
        return
    if kind == 1:
        into.append((name, value))
    elif depth >= _MOST_DEPTH or len(into) >= _MOST_VALUES:
        limit_once("nested values beyond %d levels or %d tensors" % (_MOST_DEPTH, _MOST_VALUES), name)
    elif kind == 2:
        for i, item in enumerate(value):
            flatten(item, join(name, i), into, depth + 1)
    elif kind == 3:
        for key, item in value.items():
            flatten(item, join(name, key if type(key) is str else str(key)), into, depth + 1)
    else:
        for key in kind:
            flatten(getattr(value, key, None), join(name, key), into, depth + 1)


def flatten_call(args, kwargs, name, into):
    """The same of a call: one positional argument is `name` itself, others are `name.0`, `name.1`, `name.mask`."""
    if len(args) == 1:
        flatten(args[0], name, into)
    else:
        flatten(args, name, into)
    if kwargs:
        for key, value in kwargs.items():
            flatten(value, join(name, key), into)


plain = (Tensor, Parameter)
# id of a parameter -> (shape of the whole tensor, where this part begins in it, its own shape), of a plain tensor that is
# a part of a larger one; ids of those that are not complete between two steps. Made anew for each step by megatron.py.
boxes = {}
unsettled = set()


def are_plain(parameters, settled=False):
    """Of a module's table: none has a way of its own to be recorded. settled: see put_held."""
    for parameter in parameters.values():
        if parameter is not None and (type(parameter) not in plain or boxes and id(parameter) in boxes):
            return False
    return settled or not unsettled


def special_of(kind):
    try:
        return specials[kind]
    except KeyError:
        special = specials[kind] = find_special(kind) if find_special is not None else None
        return special


def fits(box, tensor):
    """A parameter's state may hold other things too, such as a count."""
    return box is not None and tuple(tensor.shape) == box[2]


def put(frame, role, name, tensor, flags=0, box=None):
    """Records one tensor of any kind. box: see boxes."""
    special = special_of(type(tensor)) if type(tensor) not in plain else None
    if special is not None:
        special(frame, role, name, tensor, flags)
    elif fits(box, tensor):
        if not native.tensor(frame, role, name, tensor, flags, box[0], box[1]):
            unread(tensor, role)
    elif not native.tensor(frame, role, name, tensor, flags):
        unread(tensor, role)


def put_held(frame, role, parameters, settled=False):
    """Of a module's table: those that can be read. settled: whatever brings them in has done so."""
    for name, parameter in parameters.items():
        if parameter is None or not settled and id(parameter) in unsettled:
            continue
        special = special_of(type(parameter)) if type(parameter) not in plain else None
        box = boxes.get(id(parameter))
        if special is not None:
            special(frame, role, name, parameter, 0)
        elif fits(box, parameter):
            native.tensor(frame, role, name, parameter, 0, box[0], box[1])
        else:
            native.tensor(frame, role, name, parameter)


_state = {PARAMETER, GRADIENT, OPTIMIZER_STATE, OTHER, BATCH, LOSS}


def unread(tensor, role=OUTPUT):
    """What a step is compared by must have been looked at: without it no two runs are identical. The rest is declared."""
    kind = type(tensor).__name__
    if type(tensor) in plain and tensor.layout is not strided:
        kind = "%s %s" % (kind, tensor.layout)
    if role in _state:
        native.gap("parameters, gradients or other state that could not be read: %s" % kind)
    limit_once("tensors that have no bytes of their own to read (a wrapper, sparse, meta, on another device)", kind)


class Many:
    """Tensors that there are at one moment, in their order: few calls, and few launches, record them. flush() before anything
    that they must come before, and before the host's code goes on."""

    __slots__ = ("entries",)

    def __init__(self):
        self.entries = []

    def add(self, frame, role, name, tensor, box=None):
        """box: see boxes."""
        if type(tensor) in plain:
            self.entries.append((frame, role, name, tensor, box if fits(box, tensor) else None))
        else:  # it may have a way of its own to be recorded
            self.flush()
            put(frame, role, name, tensor)

    def flush(self):
        if self.entries:
            frames, roles, names, tensors, parts = zip(*self.entries)
            self.entries = []
            for place in native.tensors_at(frames, roles, names, tensors, 0, parts if boxes else None) or ():
                unread(tensors[place], roles[place])
