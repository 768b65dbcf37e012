"""Megatron Core: what its parallel layers, its optimizers and its schedules say that PyTorch does not know of.

Its shards are plain tensors with attributes. Its optimizers update copies of the parameters, whole or cut flat over the
data-parallel ranks, with an optimizer of torch's inside, and write the parameters afterwards: the step ends behind that.
Its schedules call the engine of autograd themselves, with outputs whose memory was given up."""
import functools
import gc
import sys
import weakref

import torch
from torch import Tensor

from . import _native as native
from . import aside, backward, names, state, steps
from .names import BACKWARD, FORWARD, LOSS, OPTIMIZER, RNG, SCALAR, failed, limit_once, put
from .steps import Step

_cuts = {}        # id of a parameter of this step's modules -> what _cut says of it
_optimizers = []  # weak references, in the order in which they were made
_patched = set()  # what was replaced
_inside = [False]  # an outer step() is open


def _parallel_state():
    return sys.modules.get("megatron.core.parallel_state")


def _tensor_parallel(parameter):
    """(rank, size) of the group that the parameter is cut over; None: there is none."""
    module = _parallel_state()
    if module is None or not module.model_parallel_is_initialized():
        return None
    # An expert's parameters say so by allreduce=False: they have groups of their own.
    kind = "tensor_model_parallel" if getattr(parameter, "allreduce", True) else "expert_tensor_parallel"
    try:
        rank, size = (getattr(module, "get_%s_%s" % (kind, what)) for what in ("rank", "world_size"))
        return int(rank()), int(size())
    except (AttributeError, AssertionError, RuntimeError, ValueError):
        return None


# ---- Shards

def _cut(parameter, module):
    """(rank, size, dimension, stride) of a parameter that is cut over tensor-parallel ranks. stride: in so many pieces."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    place = _tensor_parallel(parameter)
    dim = getattr(parameter, "partition_dim", -1)
    if place is None or place[1] < 2 or not 0 <= dim < parameter.dim():
        return None
    stride = getattr(parameter, "partition_stride", 1)
    if stride == 1 and dim == 0 and _is_gated(module, parameter.shape[0] * place[1]):
        stride = 2  # some layers do not say so
    return (*place, dim, stride)


def _is_gated(module, whole):
    """Each rank has a piece of the gate and one of what it is multiplied with."""
    config = getattr(module, "config", None)
    widths = (getattr(config, name, None) for name in ("ffn_hidden_size", "moe_ffn_hidden_size",
                                                       "moe_shared_expert_intermediate_size"))
    return getattr(config, "gated_linear_unit", False) and any(type(w) is int and whole == 2 * w for w in widths)


def find_cut(module, parts):
    """Where a module's parameters lie in the whole ones; a label for those that lie there in several pieces."""
    if not _cuts and _parallel_state() is None:
        return
    for parameter in module._parameters.values():
        cut = _cut(parameter, module) if type(parameter) in names.plain else None
        if cut is None:
            _cuts.pop(id(parameter), None)
            continue
        _cuts[id(parameter)] = cut
        rank, size, dim, stride = cut
        if stride != 1:
            parts[id(parameter)] = _part_label(cut)
            continue
        shape, whole, offset = tuple(parameter.shape), list(parameter.shape), [0] * parameter.dim()
        whole[dim] *= size
        offset[dim] = rank * shape[dim]
        names.boxes[id(parameter)] = tuple(whole), tuple(offset), shape


def _part_label(cut):
    rank, size, dim, stride = cut
    return " (part %d of %d of dimension %d%s)" % (rank, size, dim, "" if stride == 1 else ", in %d pieces" % stride)


# ---- Copies of parameters, which the optimizers inside update

def _living():
    return [optimizer for optimizer in (reference() for reference in _optimizers) if optimizer is not None]


def find_copies():
    look()
    names.unsettled.clear()
    for optimizer in _living():
        try:
            _own_whole(optimizer)
            _own_flat(optimizer)
        except Exception as error:
            failed("the parameters of a Megatron optimizer", error)


def _pairs(optimizer, models, copies):
    """Parameters of the model and their copies, of the same place in two lists of groups."""
    groups = getattr(optimizer, models, None) or (), getattr(optimizer, copies, None) or ()
    return [pair for two in zip(*groups) for pair in zip(*two) if pair[0] is not pair[1] and pair[1] is not None]


def _own_whole(optimizer):
    for model, copy in _pairs(optimizer, "float16_groups", "fp32_from_float16_groups"):
        if id(model) in state.owners:
            layer, name = state.owners[id(model)]
            state.owners[id(copy)] = layer, name + ".main"
            if id(model) in names.boxes:
                names.boxes[id(copy)] = names.boxes[id(model)]


def _own_flat(optimizer):
    """Of the distributed optimizer: a rank's copy is a range of the parameter's elements, laid end to end."""
    if not hasattr(optimizer, "_get_model_param_range_map"):
        return
    overlapping = getattr(getattr(optimizer, "ddp_config", None), "overlap_param_gather", False)
    if overlapping:
        _unsettle(optimizer)
    kinds = ("model_float16_groups", "shard_fp32_from_float16_groups", ".main"), \
        ("model_float16_groups", "shard_float16_groups", ""), ("model_fp32_groups", "shard_fp32_groups", "")
    for models, copies, suffix in kinds:
        for model, copy in _pairs(optimizer, models, copies):
            if id(model) in state.owners and id(copy) not in state.owners:
                layer, name = state.owners[id(model)]
                first = int(optimizer._get_model_param_range_map(model)["param"].start)
                label, box = _flat_box(model, copy, first)
                state.owners[id(copy)] = layer, name + suffix + label
                names.boxes[id(copy)] = box


def _unsettle(optimizer):
    """From its step on, until the layer that uses them waits for them, the parameters that other ranks have updated are
    those of the step before, or are being written: also those of which this rank holds no part."""
    for buffer in getattr(optimizer, "buffers", None) or ():
        names.unsettled.update(id(parameter) for parameter in getattr(buffer, "params", ()))
    limit_once("parameters whose all-gather overlaps with the next forward pass: a step's end has each rank's own "
               "part, and what the others send is recorded where a layer uses it")


def _flat_box(model, copy, first):
    """(label, box). Over tensor-parallel ranks the elements of the whole are in one row only if dimension 0 is cut."""
    cut, shape = _cuts.get(id(model)), tuple(copy.shape)
    if cut is None:
        return " (flat)", ((model.numel(),), (first,), shape)
    rank, size, dim, stride = cut
    if dim == 0 and stride == 1:
        return " (flat)", ((model.numel() * size,), (rank * model.numel() + first,), shape)
    label = " (flat)" if stride != 1 else " (flat)" + _part_label(cut)  # its name has the label already
    return label, ((model.numel(),), (first,), shape)


# ---- The step, which ends when the parameters are written

def _inner(optimizer):
    """Those of torch.optim, in the order in which they step."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for part in chained for inner in _inner(part)]
    inner = getattr(optimizer, "optimizer", None)
    return [inner] if isinstance(inner, torch.optim.Optimizer) else []


def _stepping(original):
    @functools.wraps(original)
    def step(self, *args, **kwargs):
        if _inside[0] or not steps.listening:
            return original(self, *args, **kwargs)
        Step.stepped, Step.in_scaler, _inside[0] = None, True, True
        try:
            result = original(self, *args, **kwargs)
        finally:
            Step.in_scaler = _inside[0] = False
        try:
            _stepped(self, result)
        except Exception as error:
            failed("a hook of a Megatron optimizer", error)
        return result

    return step


def _stepped(optimizer, result):
    skipped, Step.stepped = Step.stepped is None, None
    inner = _inner(optimizer)
    if not inner or not Step.is_open or not native.active():
        return
    if native.wanted():
        where = state.frame(OPTIMIZER)
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            put(where, SCALAR, "scale", scaler.scale)
            native.scalar(where, SCALAR, "skipped", float(skipped))
        norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if isinstance(norm, Tensor):
            put(where, SCALAR, "grad_norm", norm)
        elif isinstance(norm, (int, float)):
            native.scalar(where, SCALAR, "grad_norm", float(norm))
        for each in inner if skipped else ():
            state.record_scalars(each)
            state.record_gradients(each)
            state.record_updated(each)
            Step.recorded.add(id(each))
    steps.stepped(inner[-1])


# ---- Schedules

def _calling_engine(original):
    frame = native.frame(BACKWARD, "loss")

    @functools.wraps(original)
    def custom_backward(output, grad_output, *args, **kwargs):
        handle = None
        try:
            steps.on_loss()
            if grad_output is None and output.grad_fn is not None:
                handle = output.grad_fn.register_prehook(lambda grads: native.set_backward(frame))
        except Exception as error:
            failed("a backward pass of Megatron's", error)
        try:
            return original(output, grad_output, *args, **kwargs)
        finally:
            backward.ended([handle] if handle is not None else [], steps.on_backward)

    return custom_backward


def _with_loss(original):
    """Where outputs are given up once they are sent, the loss is too: it is only there now."""
    frame = native.frame(FORWARD, "loss")

    @functools.wraps(original)
    def forward_step_calc_loss(model, output_tensor, loss_func, config, *args, **kwargs):
        result = original(model, output_tensor, loss_func, config, *args, **kwargs)
        try:
            loss = result[0] if isinstance(result, tuple) else result
            made = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
            if made and getattr(config, "deallocate_pipeline_outputs", False) and steps.recording():
                put(frame, LOSS, "loss", loss)
        except Exception as error:
            failed("the loss of a Megatron schedule", error)
        return result

    return forward_step_calc_loss


# ---- Generators

def record_generators(where):
    """Those that dropout draws from inside of tensor-parallel regions, kept beside the device's own."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
    if tracker is None:
        return
    for name, kept in tracker.get_states().items():
        if isinstance(kept, torch.Generator):
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                continue
            kept = kept.get_state()
        if isinstance(kept, Tensor):
            put(where, RNG, "megatron.%s" % name, kept)


# ---- Names

def layer_name(name, child):
    """A stage of a pipeline counts its layers from 0; their own number, from 1, is that of the whole model."""
    number = getattr(child, "layer_number", None)
    if type(number) is int and number > 0 and name.isdigit() and type(child).__module__.startswith("megatron."):
        return str(number - 1)
    return name


# ---- Installing: as soon as its modules are there

def _replace(owner, name, wrap):
    original = vars(owner).get(name) if owner is not None else None
    if original is not None and (owner, name) not in _patched:
        _patched.add((owner, name))
        setattr(owner, name, wrap(original))


def _noting(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        if not any(reference() is self for reference in _optimizers):
            _optimizers.append(weakref.ref(self, _optimizers.remove))
        original(self, *args, **kwargs)

    return __init__


def _kinds(kind):
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def look(at_making=False):
    """When an optimizer of torch's is made and when a step begins: what of Megatron was imported meanwhile gets its hooks."""
    if "megatron.core.parallel_state" not in sys.modules:
        return
    try:
        base = getattr(sys.modules.get("megatron.core.optimizer.optimizer"), "MegatronOptimizer", None)
        for kind in _kinds(base) if base is not None else ():
            _replace(kind, "step", _stepping)
            _replace(kind, "_init_optimizer_states_with_dummy_values", aside.quietly)
            _replace(kind, "has_grad_norm_group", aside.aside)  # asks all ranks in a process's first step, whichever that is
        if base is not None and (base, "__init__") not in _patched:
            _replace(base, "__init__", _noting)
            if not at_making:  # we were late: those that there are have no other list
                _optimizers.extend(weakref.ref(o, _optimizers.remove) for o in gc.get_objects() if isinstance(o, base))
        schedules = sys.modules.get("megatron.core.pipeline_parallel.schedules")
        _replace(schedules, "custom_backward", _calling_engine)
        _replace(schedules, "forward_step_calc_loss", _with_loss)
    except Exception as error:
        failed("the look for Megatron", error)


def install():
    names.layer_name = layer_name
    state.find_parts.append(find_cut)
    state.find_copies = find_copies
    state.on_generators.append(record_generators)
    state.on_made.append(lambda: look(at_making=True))
