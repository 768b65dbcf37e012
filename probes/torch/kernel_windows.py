"""Backward passes of pooling and padding: each element of the gradient sums the outputs that it went into, in their order.

What goes along one dimension at a time (averages, paddings, interpolation) is a sparse matrix a dimension, whose transpose is
applied by spread_along; what was chosen by an index (maxima) is added by that index."""
import math

import torch

from .kernel_indices import write_last
from .kernel_scatter import ADD, FLOATS, assert_within, by_destination, into, lines, plain, scatter_rows
from .kernels import override

_FEW_COLUMNS = 64  # below it a transposed copy costs less than a key for each element


def wide_type(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def spread_along(grad, dim, length, index, weights=None):
    """The gradient before a linear map along dim, of length `length` there. index [outputs, taps]: which elements output o was
    made of; `length` itself: none. weights: by how much, else 1. grad: of float or double."""
    lead, columns = math.prod(grad.shape[:dim]), math.prod(grad.shape[dim + 1:])
    if lead > 1 and columns < _FEW_COLUMNS:
        moved = spread_along(grad.movedim(dim, 0).contiguous(), 0, length, index, weights)
        return moved.movedim(0, dim).contiguous()
    outputs, taps = index.shape
    rows = length + 1  # the last is for what has no place
    out = torch.zeros(grad.shape[:dim] + (rows,) + grad.shape[dim + 1:], dtype=grad.dtype, device=grad.device)
    keys, places = lines(index.reshape(-1), lead, rows)
    if weights is not None:
        weights = weights.reshape(-1).to(grad.dtype).repeat(lead)[places]
    source = grad.contiguous().view(-1, columns)
    scatter_rows(out.view(-1, columns), keys, source, torch.div(places, taps, rounding_mode="floor"), weights, flags=ADD)
    return out.narrow(dim, 0, length).contiguous()


def like_input(result, self, dtype=None):
    """In the dtype and memory format that the gradient of self has."""
    result = result.to(self.dtype if dtype is None else dtype)
    if self.dim() == 4 and self.is_contiguous(memory_format=torch.channels_last) and not self.is_contiguous():
        return result.contiguous(memory_format=torch.channels_last)
    return result.contiguous()


def taken(grad, *tensors):
    return grad.dtype in FLOATS and plain(grad, *tensors) and grad.numel() > 0 and all(t.numel() > 0 for t in tensors)


def with_out(name, out_name, function):
    """Registers a function of an operation's arguments, that answers None where torch's kernel is to take it, for both forms
    of the operation (None: there is no such form)."""
    def functional(torchs, *arguments, **named):
        result = function(*arguments, **named)
        return torchs(*arguments, **named) if result is None else result

    def handed(torchs, *arguments, **named):
        out = named.get("grad_input", named.get("out"))
        result = function(*arguments) if out is not None and out.dtype == arguments[0].dtype else None
        return torchs(*arguments, **named) if result is None else into(out, result)

    if name:
        override(name)(functional)
    if out_name:
        override(out_name)(handed)


def _each(values, count):
    values = list(values)
    return values * count if len(values) == 1 else values


# ---- Paddings

def _padded(mode):
    def source(outputs, length, before, device):
        at = torch.arange(outputs, device=device) - before
        if mode == "replication":
            return at.clamp(0, length - 1)
        at = at.abs()
        return (length - 1) - ((length - 1) - at).abs()

    def backward(grad_output, self, padding):
        if not taken(grad_output, self) or grad_output.dim() != self.dim():
            return None
        grad = grad_output.to(wide_type(self.dtype))
        for i in range(len(padding) // 2):
            dim = self.dim() - 1 - i
            outputs = self.shape[dim] + padding[2 * i] + padding[2 * i + 1]
            if grad.shape[dim] != outputs:
                return None
            if padding[2 * i] or padding[2 * i + 1]:
                index = source(outputs, self.shape[dim], padding[2 * i], grad.device).unsqueeze(1)
                grad = spread_along(grad, dim, self.shape[dim], index)
        return grad.to(self.dtype).contiguous()

    return backward


for _mode in ("reflection", "replication"):
    for _count in (1, 2, 3):
        _name = "%s_pad%dd_backward" % (_mode, _count)
        with_out(_name, _name + ".grad_input", _padded(_mode))


# ---- Averages

def _adaptive(count):
    def backward(grad_output, self):
        good = taken(grad_output, self) and grad_output.dim() == self.dim() and self.dim() in (count + 1, count + 2)
        if not good or grad_output.shape[:-count] != self.shape[:-count]:
            return None
        grad = grad_output.to(wide_type(self.dtype))
        for dim in range(self.dim() - count, self.dim()):
            length, outputs = self.shape[dim], grad.shape[dim]
            at = torch.arange(outputs, device=grad.device)
            begin = torch.div(at * length, outputs, rounding_mode="floor")
            end = torch.div((at + 1) * length + outputs - 1, outputs, rounding_mode="floor")
            taps = begin.unsqueeze(1) + torch.arange(length // outputs + 2, device=grad.device)
            taps = torch.where(taps < end.unsqueeze(1), taps, length)
            grad = spread_along(grad / _along(end - begin, dim, self.dim()), dim, length, taps)
        return like_input(grad, self)

    return backward


def _along(values, dim, dims):
    return values.view((-1,) + (1,) * (dims - 1 - dim))


with_out("_adaptive_avg_pool2d_backward", None, _adaptive(2))
with_out("_adaptive_avg_pool3d_backward", None, _adaptive(3))
with_out(None, "adaptive_avg_pool3d_backward.grad_input", _adaptive(3))


def avg_pool3d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    if not taken(grad_output, self) or grad_output.dim() != self.dim() or self.dim() not in (4, 5):
        return None
    sizes, pads = _each(kernel_size, 3), _each(padding, 3)
    steps = _each(stride, 3) if len(stride) else sizes
    grad, divisor = grad_output.to(wide_type(self.dtype)), divisor_override or 1
    windows = []
    for i, dim in enumerate(range(self.dim() - 3, self.dim())):
        length = self.shape[dim]
        begin = torch.arange(grad.shape[dim], device=grad.device) * steps[i] - pads[i]
        taps = begin.unsqueeze(1) + torch.arange(sizes[i], device=grad.device)
        windows.append((dim, length, torch.where((taps >= 0) & (taps < length), taps, length)))
        if not divisor_override:
            end = (begin + sizes[i]).clamp(max=length + pads[i])
            count = end - begin if count_include_pad else end.clamp(max=length) - begin.clamp(min=0)
            divisor = divisor * _along(count, dim, self.dim())
    grad = grad / divisor
    for dim, length, taps in windows:
        grad = spread_along(grad, dim, length, taps)
    return grad.to(self.dtype).contiguous()


with_out("avg_pool3d_backward", "avg_pool3d_backward.grad_input", avg_pool3d_backward)


# ---- Maxima: the forward pass says which element of its plane each output was

def _by_index(count):
    def backward(grad_output, self, *arguments):
        indices = arguments[-1]
        good = taken(grad_output, self, indices) and self.dim() in (count + 1, count + 2) and indices.dtype == torch.int64
        if not good or grad_output.shape != indices.shape or grad_output.shape[:-count] != self.shape[:-count]:
            return None
        planes, elements = math.prod(self.shape[:-count]), math.prod(self.shape[-count:])
        keys = indices.reshape(planes, -1) + torch.arange(planes, device=self.device).unsqueeze(1) * elements
        keys, places = by_destination(keys.reshape(-1), planes * elements)
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        scatter_rows(out.view(-1, 1), keys, grad_output.contiguous().view(-1, 1), places, flags=ADD)
        return like_input(out, self)

    return backward


for _name, _count in (("max_pool2d_with_indices_backward", 2), ("max_pool3d_with_indices_backward", 3),
                      ("adaptive_max_pool2d_backward", 2), ("adaptive_max_pool3d_backward", 3),
                      ("fractional_max_pool2d_backward", 2), ("fractional_max_pool3d_backward", 3)):
    with_out(_name, _name + ".grad_input", _by_index(_count))


def _unpool(count):
    def forward(self, indices, output_size, *arguments):
        good = (taken(self, indices) and indices.dtype == torch.int64 and self.shape == indices.shape
                and self.dim() in (count + 1, count + 2) and len(output_size) == count and math.prod(output_size) > 0)
        if not good:
            return None
        planes, elements = math.prod(self.shape[:-count]), math.prod(output_size)
        assert_within(indices, 0, elements)
        keys = indices.reshape(planes, -1) + torch.arange(planes, device=self.device).unsqueeze(1) * elements
        out = torch.zeros(tuple(self.shape[:-count]) + tuple(output_size), dtype=self.dtype, device=self.device)
        write_last(out.view(-1), keys.reshape(-1), self.reshape(-1))
        return like_input(out, self)

    return forward


with_out("max_unpool2d", "max_unpool2d.out", _unpool(2))
with_out("max_unpool3d", "max_unpool3d.out", _unpool(3))
