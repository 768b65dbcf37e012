"""Jobs of several ranks: shards with their place in the whole tensor, and each rank's coordinates. Collectives: see
collectives.py.

Read are `_local_tensor` and what the tensor says of itself. Nothing is gathered, no operator is dispatched."""
import functools
import os
import sys

import torch

from . import _native as native
from . import names, state
from .names import failed, limit_once, unread

_boxes = {}
_MOST_BOXES = 65536
_coordinates = {}  # fact -> text; in the stream's header when the first step begins
_told = [False]


# ---- DTensor

class Part:
    """What a rank holds of a tensor: a box of it where `shape` is set; the whole where it is not; and where `label` is
    not empty something that no other rank's part can be put together with, which has a name of its own."""

    __slots__ = ("label", "shape", "offset", "local")

    def __init__(self, label, shape, offset, local):
        self.label, self.shape, self.offset, self.local = label, shape, offset, local


def _chunk(ranges, parts, place):
    """Elements of `ranges` [(first, end)], laid end to end, that are the place-th of torch.chunk's parts."""
    total = sum(end - first for first, end in ranges)
    size = -(-total // parts) if total else 0
    return _cut(ranges, min(place * size, total), min((place + 1) * size, total))


def _cut(ranges, begin, finish):
    out, at = [], 0
    for first, end in ranges:
        low, high = max(begin - at, 0), min(finish - at, end - first)
        if low < high:
            out.append((first + low, first + high))
        at += end - first
    return out


def _strided(ranges, parts, place, factor):
    """As _StridedShard: cut into `factor` pieces, and of each the place-th part."""
    out = []
    for piece in range(factor):
        out += _chunk(_chunk(ranges, factor, piece), parts, place)
    return out


def _merged(ranges):
    out = []
    for first, end in ranges:
        if out and out[-1][1] == first:
            out[-1] = out[-1][0], end
        else:
            out.append((first, end))
    return out


def _order(placements, spec):
    """Dimensions of the mesh in the order in which they cut."""
    said = getattr(spec, "shard_order", None)
    if said and not any(type(p).__name__ == "_StridedShard" for p in placements):
        cutting = [d for entry in said for d in entry.mesh_dims]
        return cutting + [d for d in range(len(placements)) if d not in cutting]
    return range(len(placements))


def part_of(shape, mesh_shape, coordinate, placements, spec=None):
    """Part of the tensor that lies at `coordinate`. None: these placements are not known here."""
    ranges = {}
    labels = []
    for d in _order(placements, spec):
        placement, size, place = placements[d], mesh_shape[d], coordinate[d]
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            dim = placement.dim
            before = ranges.get(dim, [(0, shape[dim])])
            if kind == "Shard":
                ranges[dim] = _chunk(before, size, place)
            else:
                ranges[dim] = _strided(before, size, place, placement.split_factor)
        elif kind in ("Partial", "_NormPartial", "_MaskPartial", "MaskPartial"):
            labels.append("part %d of %d of a %s" % (place, size, getattr(placement, "reduce_op", "sum")))
        elif kind != "Replicate":
            return None
    if not ranges:
        return Part(", ".join(labels), None, None, tuple(shape))
    offset, local = [0] * len(shape), list(shape)
    for dim, found in ranges.items():
        found = _merged(found)
        local[dim] = sum(end - first for first, end in found)
        offset[dim] = found[0][0] if found else shape[dim]
        if len(found) > 1:
            labels.append("part %s of dimension %d" % (",".join("%d:%d" % r for r in found), dim))
    return Part(", ".join(labels), tuple(shape), tuple(offset), tuple(local))


def _part(spec):
    shape = tuple(spec.tensor_meta.shape)
    key = spec.mesh, spec.placements, shape, getattr(spec, "shard_order", None)
    try:
        return _boxes[key]
    except KeyError:
        coordinate = spec.mesh.get_coordinate()
        part = False
        if coordinate is not None:
            part = part_of(shape, tuple(spec.mesh.shape), coordinate, spec.placements, spec)
        if len(_boxes) >= _MOST_BOXES:
            _boxes.clear()
        _boxes[key] = part
        return part


def put_dtensor(frame, role, name, tensor, flags=0):
    local = tensor._local_tensor
    part = _part(tensor._spec)
    if part is False:
        return  # this rank is not in the mesh and holds nothing of it
    if type(local).__name__ == "AsyncCollectiveTensor":
        if not local.completed:
            return unread(local, role)
        local = local.elem
    with torch._C.DisableTorchFunction():
        fits = part is not None and tuple(local.shape) == part.local
    if not fits:
        limit_once("placements of a DTensor that are not known, or not what lies there", str(tensor._spec.placements))
        return unread(tensor, role)
    if part.label:
        name = "%s (%s)" % (name, part.label)
        read = native.tensor(frame, role, name, local, flags)
    elif part.shape is None:
        read = native.tensor(frame, role, name, local, flags)
    else:
        read = native.tensor(frame, role, name, local, flags, part.shape, part.offset)
    if not read:
        unread(local, role)


def put_awaited(frame, role, name, tensor, flags=0):
    """A functional collective's output: there once somebody has waited for it."""
    if not tensor.completed or not native.tensor(frame, role, name, tensor.elem, flags):
        unread(tensor, role)


def _find_special(kind):
    for base in kind.__mro__:
        if base.__module__.startswith("torch.distributed."):
            if base.__name__ == "DTensor":
                return put_dtensor
            if base.__name__ == "AsyncCollectiveTensor":
                return put_awaited
    return None


# ---- FSDP1: one flat parameter a unit, or (use_orig_params) slices of it, of any number of elements on a rank

def find_flat_parts(module, parts):
    """Ranks hold other parts under one name, and no box says which: so each part has a name of its own. They compare
    between runs of one world size, and between the replicas of a hybrid sharding."""
    handle = module.__dict__.get("_handle")
    flat = getattr(handle, "flat_param", None)
    if flat is None or not getattr(handle, "uses_sharded_strategy", True):
        return
    label = " (part %d of %d)" % (handle.rank, handle.world_size)
    for parameter in (flat, *(getattr(flat, "_params", None) or ())):
        parts[id(parameter)] = label
    limit_once("where the parts of FullyShardedDataParallel (FSDP1) lie: they compare between runs of one world size")


# ---- Coordinates

def _tell_place(name):
    for what in ("%s_rank" % name, "%s_size" % name):
        native.fact(what, _coordinates[what])


def _know(name, place, size):
    fresh = "%s_rank" % name not in _coordinates
    _coordinates["%s_rank" % name], _coordinates["%s_size" % name] = str(place), str(size)
    if fresh and _told[0]:
        _tell_place(name)


def _mesh_made(original):
    @functools.wraps(original)
    def made(self, *args, **kwargs):
        original(self, *args, **kwargs)
        try:
            dims, coordinate = self.mesh_dim_names, self.get_coordinate()
            if dims and coordinate is not None:
                for name, place, size in zip(dims, coordinate, tuple(self.shape)):
                    _know(str(name), place, size)
        except Exception as error:
            failed("the making of a device mesh", error)

    return made


_MEGATRON = (("tp", "tensor_model_parallel"), ("pp", "pipeline_model_parallel"), ("dp", "data_parallel"),
             ("cp", "context_parallel"), ("ep", "expert_model_parallel"), ("etp", "expert_tensor_parallel"))


def _ask_megatron():
    module = sys.modules.get("megatron.core.parallel_state")
    if module is None or not module.model_parallel_is_initialized():
        return
    for short, long in _MEGATRON:
        rank, size = (getattr(module, "get_%s_%s" % (long, what), None) for what in ("rank", "world_size"))
        try:
            if rank is not None and size is not None:
                _know(short, int(rank()), int(size()))
        except (AssertionError, RuntimeError, ValueError):
            pass  # this group was not made


def tell():
    """Before the bridge's first record."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return
    if "RANK" not in os.environ:
        native.rank(dist.get_rank(), dist.get_world_size())
    _ask_megatron()
    for name, text in sorted(_coordinates.items()):
        native.fact(name, text)
    _told[0] = True
    from . import collectives

    for group, name, ranks in collectives.listed()[:256]:
        native.fact("process group %s" % name, _backends(group) or "%d ranks" % len(ranks))


def _backends(group):
    config = torch.distributed.distributed_c10d._world.pg_backend_config
    return str(config.get(group, ""))


def install():
    names.find_special = _find_special
    state.find_parts.append(find_flat_parts)
    state.on_facts.append(tell)
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    if mesh is not None:
        mesh.__init__ = _mesh_made(mesh.__init__)
    if torch.distributed.is_available():
        from . import aside, collectives, megatron

        collectives.install()
        aside.install()
        megatron.install()
