"""The place of a DTensor's shard in the whole: for all coordinates of several meshes and placements, what torch cuts off a
tensor of numbered elements is what lies in the box that the bridge says, or has a name of its own."""
import importlib.util
import itertools
import pathlib
import sys
import types

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "probes" / "torch" / "parallel.py"
SHAPES = [(8, 4), (7, 5), (3, 2), (1, 9), (12,)]
CASES = [  # shape of the mesh, placements, whether each part is a box
    ((2,), (Shard(0),), True),
    ((4,), (Shard(0),), True),
    ((3,), (Replicate(),), True),
    ((2, 2), (Shard(0), Shard(0)), True),
    ((2, 3), (Shard(0), Replicate()), True),
    ((2, 2), (Replicate(), Shard(0)), True),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), True),
    ((2,), (_StridedShard(0, split_factor=2),), False),
]


def bridge():
    """parallel.py by itself: what it imports of the bridge is not used here."""
    package = types.ModuleType("bridge")
    package.__path__ = []
    sys.modules["bridge"] = package
    for name in "_native", "names", "state":
        module = sys.modules[f"bridge.{name}"] = types.ModuleType(f"bridge.{name}")
        setattr(package, name, module)
    for name in "failed", "limit_once", "unread":
        setattr(sys.modules["bridge.names"], name, None)
    spec = importlib.util.spec_from_file_location("bridge.parallel", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cut(whole, mesh, coordinate, placements):
    for placement, size, place in zip(placements, mesh, coordinate):
        if isinstance(placement, (Shard, _StridedShard)):
            parts, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=True)
            whole = parts[place]
    return whole


def check(module, shape, mesh, placements, is_box):
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = []
    for coordinate in itertools.product(*map(range, mesh)):
        what = f"{shape} over {mesh}, {placements} at {coordinate}"
        held = cut(elements, mesh, coordinate, placements)
        part = module.part_of(shape, mesh, coordinate, placements)
        assert part.local == tuple(held.shape), f"{what}: {part.local}, torch cuts {tuple(held.shape)}"
        if part.label:
            assert not is_box, f"{what}: no box, but {part.label}"
        elif part.shape is None:
            assert torch.equal(held, elements), f"{what}: said to be the whole"
        else:
            box = elements[tuple(slice(o, o + n) for o, n in zip(part.offset, part.local))]
            assert torch.equal(box, held), f"{what}: at {part.offset} lies something else"
        seen.append(part.label)
    return seen


if __name__ == "__main__":
    module = bridge()
    for (mesh, placements, is_box), shape in itertools.product(CASES, SHAPES):
        check(module, shape, mesh, placements, is_box)
    assert all(check(module, (8, 4), (2,), (_StridedShard(0, split_factor=2),), False)), "rows 0, 1, 4, 5 are no box"
    check(module, (6, 8), (2, 2), (Shard(0), Shard(1)), True)
    parts = {module.part_of((4,), (2,), (place,), (Partial(),)).label for place in (0, 1)}
    assert parts == {"part 0 of 2 of a sum", "part 1 of 2 of a sum"}, f"parts of a sum must not have one name: {parts}"
    print("boxes are where torch cuts")
