"""The places of Megatron Core's shards: what its layers and its distributed optimizer cut off a tensor of numbered elements
is what lies in the box that the bridge says, or has a name of its own. Needs no Megatron."""
import importlib.util
import itertools
import pathlib
import sys
import types

import torch

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "probes" / "torch" / "megatron.py"


def bridge():
    """megatron.py by itself, with as much of the bridge as it reads here."""
    package = types.ModuleType("bridge")
    package.__path__ = []
    sys.modules["bridge"] = package
    for name in "_native", "aside", "backward", "names", "state", "steps":
        module = sys.modules[f"bridge.{name}"] = types.ModuleType(f"bridge.{name}")
        setattr(package, name, module)
    names, state = package.names, package.state
    for name in "BACKWARD FORWARD LOSS OPTIMIZER RNG SCALAR failed limit_once put".split():
        setattr(names, name, None)
    names.limit_once = lambda *words: None
    names.plain, names.boxes, names.unsettled = (torch.Tensor, torch.nn.Parameter), {}, set()
    state.owners, package.steps.Step = {}, None
    spec = importlib.util.spec_from_file_location("bridge.megatron", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, names, state


def be_rank(rank, size):
    """Of the tensor-parallel group; experts have one of their own, of a single rank."""
    core = types.ModuleType("megatron.core.parallel_state")
    core.model_parallel_is_initialized = lambda: True
    core.get_tensor_model_parallel_rank, core.get_tensor_model_parallel_world_size = lambda: rank, lambda: size
    core.get_expert_tensor_parallel_rank, core.get_expert_tensor_parallel_world_size = lambda: 0, lambda: 1
    sys.modules["megatron.core.parallel_state"] = core


def cut(whole, rank, size, dim, stride):
    """As Megatron Core cuts it: stride pieces a rank, each in the rank's place among the ranks."""
    pieces = torch.chunk(whole, size * stride, dim)
    return torch.nn.Parameter(torch.cat(pieces[rank::size], dim).clone())


def marked(parameter, dim, stride):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
    return parameter


def lies(box, held, whole):
    """The elements of `held` are those in the box of `whole`."""
    shape, offset, local = box
    assert tuple(whole.shape) == shape and tuple(held.shape) == local, (box, held.shape, whole.shape)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, local))]
    return torch.equal(part, held)


def check_whole(module, names, shape, size, dim, stride):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    labels = []
    for rank in range(size):
        be_rank(rank, size)
        layer = torch.nn.Module()
        layer.weight, layer.bias = marked(cut(whole, rank, size, dim, stride), dim, stride), torch.nn.Parameter(torch.ones(3))
        names.boxes.clear()
        parts = {}
        module.find_cut(layer, parts)
        what = f"{shape} over {size}, dimension {dim}, stride {stride}, rank {rank}"
        assert id(layer.bias) not in names.boxes and id(layer.bias) not in parts, f"{what}: a tensor that is not cut"
        if size > 1 and stride > 1:
            assert id(layer.weight) not in names.boxes, f"{what}: two pieces are no box"
            labels.append(parts[id(layer.weight)])
        elif size > 1:
            assert lies(names.boxes[id(layer.weight)], layer.weight.detach(), whole), f"{what}: other elements"
        else:
            assert not names.boxes and not parts, f"{what}: it is the whole"
    assert len(set(labels)) == len(labels), f"parts without names of their own: {labels}"


class Optimizer:
    """As the distributed optimizer: data-parallel rank `place` of two has these ranges of its parameters."""

    def __init__(self, parameters, place, ddp_config=None):
        self.ranges = {id(p): range(p.numel() * place // 2, p.numel() * (place + 1) // 2) for p in parameters}
        copies = [p.detach().view(-1)[self.ranges[id(p)].start : self.ranges[id(p)].stop].clone() for p in parameters]
        self.model_float16_groups, self.shard_fp32_from_float16_groups = [parameters], [copies]
        self.model_fp32_groups = self.shard_fp32_groups = self.shard_float16_groups = [[]]
        self.ddp_config = ddp_config

    def _get_model_param_range_map(self, parameter):
        return {"param": self.ranges[id(parameter)]}


def check_flat(module, names, state, dim, stride):
    whole = torch.arange(48.0).view(8, 6)
    seen = {}
    for rank, place in itertools.product(range(2), range(2)):
        be_rank(rank, 2)
        parameter = marked(cut(whole, rank, 2, dim, stride), dim, stride)
        state.owners.clear()
        label = f" (labelled {rank})" if stride > 1 else ""  # as find_cut would
        state.owners[id(parameter)] = "a layer", "weight" + label
        layer = torch.nn.Module()
        layer.weight = parameter
        module.find_cut(layer, {})
        optimizer = Optimizer([parameter], place)
        module._own_flat(optimizer)
        copy = optimizer.shard_fp32_from_float16_groups[0][0]
        name, box = state.owners[id(copy)][1], names.boxes[id(copy)]
        assert name.startswith("weight") and ".main" in name and "(flat)" in name, name
        in_one_row = dim == 0 and stride == 1
        assert lies(box, copy, whole.view(-1) if in_one_row else parameter.detach().view(-1)), (dim, stride, rank, place)
        seen.setdefault(name, []).append(box)
    expected = 1 if dim == 0 and stride == 1 else 2
    assert len(seen) == expected, f"dimension {dim}, stride {stride}: names {list(seen)}"
    for name, boxes in seen.items():
        offsets = sorted(box[1][0] for box in boxes)
        assert sum(box[2][0] for box in boxes) == boxes[0][0][0] and len(set(offsets)) == len(offsets), (name, boxes)


def check_rest(module, names, state):
    be_rank(1, 2)
    expert = marked(torch.nn.Parameter(torch.ones(4, 4)), 0, 1)
    expert.allreduce = False
    layer = torch.nn.Module()
    layer.weight = expert
    names.boxes.clear()
    module.find_cut(layer, {})
    assert not names.boxes, "an expert's weight is cut over its own group, which has one rank"

    gated = torch.nn.Module()
    gated.config = types.SimpleNamespace(gated_linear_unit=True, ffn_hidden_size=8)
    gated.weight, gated.other = marked(torch.nn.Parameter(torch.ones(8, 4)), 0, 1), marked(torch.nn.Parameter(torch.ones(6, 4)), 0, 1)
    parts = {}
    module.find_cut(gated, parts)
    assert id(gated.weight) in parts and id(gated.weight) not in names.boxes, "a gate and what it is multiplied with"
    assert id(gated.other) in names.boxes, "another layer's weight beside a gated one"

    block = type("TransformerLayer", (), {"__module__": "megatron.core.transformer.transformer_layer", "layer_number": 7})()
    other = type("Layer", (), {"layer_number": 7})()
    assert module.layer_name("0", block) == "6" and module.layer_name("mlp", block) == "mlp"
    assert module.layer_name("0", other) == "0", "a layer of somebody else's keeps its name"

    parameter, of_others = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    names.unsettled.clear()
    module._own_flat(Optimizer([parameter], 0))
    assert not names.unsettled
    overlapping = Optimizer([parameter], 0, types.SimpleNamespace(overlap_param_gather=True))
    overlapping.buffers = [types.SimpleNamespace(params=[parameter, of_others])]
    module._own_flat(overlapping)
    assert names.unsettled == {id(parameter), id(of_others)}, "what is gathered during the forward pass is not there before it"


if __name__ == "__main__":
    found = bridge()
    for shape, size, dim, stride in itertools.product([(8, 4), (16, 8)], (1, 2, 4), (0, 1), (1, 2)):
        if shape[dim] % (size * stride) == 0:
            check_whole(*found[:2], shape, size, dim, stride)
    for dim, stride in itertools.product((0, 1), (1, 2)):
        check_flat(*found, dim, stride)
    check_rest(*found)
    print("shards of Megatron Core lie where the bridge says")
