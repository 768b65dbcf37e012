"""The backward pass, without wrappers in it: hooks on nodes of autograd's graph, which in-place operations and views
after a module do not disturb, and on parameters, at the accumulation of their gradients.

grad_output of a module is what its output's node is handed. grad_input is the module's own contribution: what the nodes
made inside of it send along the edges to where its input came from, before other consumers' contributions are added."""
import functools

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as graph_task
from torch.nn import Parameter

from . import _native as native, names
from .names import BACKWARD, FORWARD, GRADIENT, INPUT, LOSS, OUTPUT, failed, join, limit_once, put

_MOST_NODES = {True: 96, False: 24}  # that are walked over in search of a module's inputs: a leaf, a container
# Nodes are numbered as they are made: those of a module are not older than the number at its beginning.
_LEAF = 2**64 - 1  # the number of each AccumulateGrad
sequence_number = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

is_compiling = torch.compiler.is_compiling


def input_edges(inputs):
    """Where the inputs that want a gradient came from, taken before the module can change them in place."""
    edges = None
    for name, tensor in inputs:
        if tensor.requires_grad:
            node = tensor.grad_fn
            edges = edges or []
            edges.append((name, node, tensor.output_nr if node is not None else 0, tensor if node is None else None))
            if node is not None and tensor._is_view():
                base = _whole_base(tensor)
                if base is not None:
                    edges.append((name, base.grad_fn, base.output_nr, None))
    return edges


def _whole_base(view):
    """What a tensor is a view of, where that has the same elements, as for a Linear's output of a batch of sequences. A
    change in place replaces the node of the view, and the gradient then goes to the base's by another way."""
    base = view._base
    return base if base.grad_fn is not None and base.numel() == view.numel() else None


def _put_plain(frame, role, name, tensor):
    """put(), the short way where there is one: what hooks hand over is a plain tensor nearly always."""
    if type(tensor) is not Tensor or not native.tensor(frame, role, name, tensor):
        put(frame, role, name, tensor)


def _on_output(layer, places, done=None, innermost=True):
    """places: (number of the node's output, name). innermost: what the node launches is this layer's, and not that of one
    inside of it whose output is this layer's as well."""
    frame = layer.backward

    def before(grads):
        if is_compiling():
            return None
        try:
            if innermost:
                native.set_backward(frame)
            if done is not None:
                done[0] = True
            for number, name in places:
                grad = grads[number]
                if grad is not None and not (names.lean and grad.is_cuda):
                    _put_plain(frame, INPUT, name, grad)
        except Exception as error:
            failed("a hook before a node", error)
        return None

    return before


def _on_base(layer, number, name, done):
    """For an output that is a view: acts where the view's own node does not run, as a change in place replaced it."""
    hook = _on_output(layer, ((number, name),))

    def before(grads):
        if done[0]:
            done[0] = False
            return None
        return hook(grads)

    return before


def _on_input(layer, places, after_frame):
    frame = layer.backward

    def after(grad_inputs, grad_outputs):
        if is_compiling():
            return None
        try:
            for number, name in places:
                if grad_inputs[number] is not None:
                    _put_plain(frame, OUTPUT, name, grad_inputs[number])
            native.set_backward(after_frame)
        except Exception as error:
            failed("a hook after a node", error)
        return None

    return after


def watch(layer, edges, outputs, outer, oldest, taken):
    """Hooks onto the nodes of a call that just ended. outputs: (name, tensor). outer: Layer that the call was made in.
    oldest: sequence_number() at its beginning. taken: numbers of the nodes that gave the outputs of calls inside of the
    root's that ended before; this one's are added."""
    if len(outputs) == 1:
        tensor = outputs[0][1]
        node = tensor.grad_fn
        if node is not None and not tensor._is_view():
            return _watch_one(layer, edges, node, tensor.output_nr, outputs[0][0], outer, oldest, taken)
    nodes = {}  # node -> [(number, name)], in the order of the outputs
    bases = []  # (node of the view, node of the base, number, name)
    for name, tensor in outputs:
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is None:
            if type(tensor) is Parameter:  # handed on, as Megatron's layers do with a bias: recorded where it accumulates
                continue
            limit_once("gradient of a module's output that is a leaf of autograd's graph", layer.name)
            continue
        nodes.setdefault(node, []).append((tensor.output_nr, _grad_name(name)))
        if tensor._is_view():
            base = _whole_base(tensor)
            if base is not None and base.grad_fn._sequence_nr() >= oldest:
                bases.append((node, base.grad_fn, base.output_nr, _grad_name(name)))
    if not nodes:
        return
    origins = {node for _, node, _, _ in edges or () if node is not None}
    done = {view: [False] for view, _, _, _ in bases} if bases else {}
    for node, places in nodes.items():
        if node not in origins:  # else the module handed its input on: that gradient is another module's grad_output
            number = node._sequence_nr()
            node.register_prehook(_on_output(layer, places, done.get(node), number not in taken))
            taken.add(number)
    for view, node, number, name in bases:
        if node not in origins and view not in origins:
            node.register_prehook(_on_base(layer, number, name, done[view]))
    if edges:
        _watch_inputs(layer, edges, nodes, outer.backward if outer is not None else 0, oldest)


def _watch_one(layer, edges, node, number, name, outer, oldest, taken):
    """The same of a module with one output that is no view, as most have. It has the same hook in each call: kept."""
    for edge in edges or ():
        if edge[1] is node:
            return  # it handed its input on
    made = node._sequence_nr()
    key = number, name, made not in taken
    hook = layer.hooks.get(key)
    if hook is None:
        hook = layer.hooks[key] = _on_output(layer, ((number, _grad_name(name)),), None, key[2])
    node.register_prehook(hook)
    taken.add(made)
    if edges:
        _watch_inputs(layer, edges, (node,), outer.backward if outer is not None else 0, oldest)


def _watch_inputs(layer, edges, starts, outer_frame, oldest):
    found = native.contributions(starts, edges, oldest, _MOST_NODES[layer.is_leaf])
    if not found:
        if found is None and layer.is_leaf:
            limit_once("grad_input of a module with more than %d nodes" % _MOST_NODES[True], layer.name)
        return
    if len(found) == 3:
        name, node, place = found
        key = place, name, outer_frame, 0
        hook = layer.hooks.get(key)
        if hook is None:
            hook = layer.hooks[key] = _on_input(layer, ((place, _grad_name(name)),), outer_frame)
        node.register_hook(hook)
        return
    by_name, by_node = {}, {}
    for at in range(0, len(found), 3):
        by_name.setdefault(found[at], []).append(found[at + 1:at + 3])
    for name, places in by_name.items():
        for i, (node, number) in enumerate(places):
            full = _grad_name(name) if len(places) == 1 else "grad_%s/%dof%d" % (name, i + 1, len(places))
            by_node.setdefault(node, []).append((number, full))
    for node, places in by_node.items():
        node.register_hook(_on_input(layer, places, outer_frame))


_grad_names = {}


def _grad_name(name):
    full = _grad_names.get(name)
    if full is None:
        full = "grad_" + name
        if len(_grad_names) < 65536:
            _grad_names[name] = full
    return full


class _Gradient:
    """Hook of one parameter. Holds no reference to it."""

    __slots__ = ("frame", "name", "main_name")

    def __init__(self, frame, name):
        self.frame = frame
        self.name = join(name, "grad")
        self.main_name = join(name, "main_grad")

    def __call__(self, parameter):
        if is_compiling():
            return
        try:
            if getattr(parameter, "grad_added_to_main_grad", False):
                # Megatron's fused kernels have added it to what is accumulated, and nobody wrote what `grad` holds.
                put(self.frame, GRADIENT, self.main_name, parameter.main_grad, 0, names.boxes.get(id(parameter)))
            else:
                grad = parameter.grad
                if grad is None:
                    return
                if names.boxes or type(grad) is not Tensor or not native.tensor(self.frame, GRADIENT, self.name, grad):
                    put(self.frame, GRADIENT, self.name, grad, 0, names.boxes.get(id(parameter)))
        except Exception as error:
            failed("a parameter's hook", error)


def watch_parameter(parameter, layer, name):
    """Once a parameter, however often it is asked for: its own table of hooks tells, which cannot be out of date."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:
        for hook in hooks.values():
            if type(hook) is _Gradient:
                return
    parameter.register_post_accumulate_grad_hook(_Gradient(layer.backward, name))


def install(on_loss, on_end):
    """on_loss() is called before each backward pass that is not a part of another, the functions on_end behind it."""
    original = torch.autograd.backward
    frames = (native.frame(FORWARD, "loss"), native.frame(BACKWARD, "loss"))

    def backward(tensors, *args, **kwargs):
        if is_compiling() or graph_task() != -1:  # a checkpoint's backward runs one of its own
            return original(tensors, *args, **kwargs)
        handles = _begin(tensors, frames, on_loss)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            ended(handles, on_end)

    torch.autograd.backward = functools.wraps(original)(backward)


def _begin(tensors, frames, on_loss):
    handles = []
    try:
        on_loss()
        tensors = tensors if isinstance(tensors, (tuple, list)) else (tensors,)  # an iterator is not ours to use up
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            put(frames[0], LOSS, "loss" if len(tensors) == 1 else join("loss", i), tensor)
            if tensor.grad_fn is not None:
                handles.append(tensor.grad_fn.register_prehook(lambda grads: native.set_backward(frames[1])))
    except Exception as error:
        failed("backward()", error)
    return handles


def ended(handles, on_end):
    """A backward pass that is not a part of another. handles: of hooks that were for this pass alone."""
    try:
        native.set_backward(0)
        for function in on_end:
            function()
        for handle in handles:
            handle.remove()
    except Exception as error:
        failed("backward()", error)


