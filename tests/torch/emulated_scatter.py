"""The probe's deterministic scatter kernels as kernels/scatter_launch.h and kernels/scatter_sort.h describe them, in Python and
on memory of the CPU: to see that what the bridge hands them means what it should."""
import ctypes

import torch

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WIDE, WRAP, CHECK = 1, 2, 4
STREAM = 77


def memory(address, dtype, count):
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype, count=count)


def matrix(address, dtype, rows, columns, stride):
    return memory(address, dtype, (rows - 1) * stride + columns).as_strided((rows, columns), (stride, 1))


class Emulated:
    def __init__(self, add):
        self.add, self.calls = add, {"scatter": 0, "scatter_by_index": 0, "sort_by_index": 0}
        self.said = []

    def say(self, *words):
        self.said.append(words)

    limit = fact = gap = say

    def scatter_scratch(self, kind, count, columns):
        assert 0 <= kind < len(TYPES) and count > 0 and columns >= 0
        return 64

    def index(self, numbers):
        """(keys in the order of the places, the key of what is left out)"""
        address, flags, *strides, blocks, length, inner, rows, padding = numbers
        shape = (blocks, length, inner)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
        elements = memory(address, torch.int64 if flags & WIDE else torch.int32, extent).as_strided(shape, strides)
        keys, limit = [], blocks * rows * inner
        for place, row in enumerate(elements.reshape(-1).tolist()):
            block, column = place // (length * inner), place % inner
            if row < 0 and flags & WRAP:
                row += rows
            inside = 0 <= row < rows
            if flags & CHECK and not inside:
                raise IndexError("index out of range")
            keys.append((block * rows + row) * inner + column if inside and row != padding else limit)
        return torch.tensor(keys), limit

    def sort_by_index(self, numbers):
        self.calls["sort_by_index"] += 1
        stream, keys, places, scratch, *index = numbers
        assert stream == STREAM and scratch != 0 and index[1] & CHECK == 0
        ordered, order = torch.sort(self.index(index)[0], stable=True)
        memory(keys, torch.int32, ordered.numel()).copy_(ordered)
        memory(places, torch.int64, ordered.numel()).copy_(order)
        return 0

    def scatter(self, numbers, alpha):
        self.calls["scatter"] += 1
        (stream, kind, flags, src, out, rows, weights, starts, partials, keys, count, wide, out_rows, columns, src_stride,
         out_stride) = numbers
        assert stream == STREAM and starts != 0 and (partials != 0) == (count > 128)
        dtype = TYPES[kind]
        keys = memory(keys, torch.int64 if wide else torch.int32, count)
        rows = memory(rows, torch.int64, count) if rows else None
        weights = memory(weights, torch.float64 if kind == 3 else torch.float32, count) if weights else None
        source = matrix(src, dtype, count if rows is None else int(rows.max()) + 1, columns, src_stride)
        self.add(matrix(out, dtype, out_rows, columns, out_stride), keys, source, rows, weights, alpha, flags)
        return 0

    def scatter_by_index(self, numbers, alpha):
        self.calls["scatter_by_index"] += 1
        stream, kind, flags, src, out, scratch, columns, src_stride, out_stride, *index = numbers
        assert stream == STREAM and scratch != 0
        keys, out_rows = self.index(index)
        source = matrix(src, TYPES[kind], keys.numel(), columns, src_stride)
        keys, places = torch.sort(keys, stable=True)
        self.add(matrix(out, TYPES[kind], out_rows, columns, out_stride), keys, source, places, None, alpha, flags)
        return 0
