"""Operations that add to, or write, places named by index tensors, and the backward passes of embeddings."""
import math

import torch

from .kernel_scatter import (ADD, CHECK, FLOATS, MEAN, PRODUCT, REDUCTIONS, WRAP, add_lines, assert_within, by_destination,
                             copied, in_place, into, plain, scatter_, scatter_by_index, scatter_rows, takes, takes_index_add,
                             takes_scatter, writable)
from .kernels import override


def _wrapped(index, length):
    assert_within(index, -length, length)
    index = index.long()
    return torch.where(index < 0, index + length, index)


def write_last(flat, keys, values):
    """flat[keys] = values, of places that are named several times the last value."""
    sorted_keys, places = by_destination(keys, flat.numel())
    last = torch.searchsorted(sorted_keys, sorted_keys, right=True) - 1
    # Equal places get equal values, in whatever order they are written.
    flat.index_put_((sorted_keys.long(),), values[places[last]])


# ---- index_put_ and put_

def _block(self, indices, values):
    """(first indexed dimension, indices behind one another); None: torch's own kernel is to take it."""
    given = [d for d, index in enumerate(indices) if index is not None]
    tensors = [indices[d] for d in given]
    if not given or given[-1] - given[0] != len(given) - 1 or len(indices) > self.dim():
        return None
    good = (self.dtype in FLOATS and values.dtype == self.dtype and values.device == self.device and plain(self, values, *tensors)
            and all(t.dtype in (torch.int64, torch.int32) and t.device == self.device for t in tensors) and self.numel() > 0)
    if not good or not writable(self, values, *tensors):
        return None
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        whole = self.shape[:given[0]] + shape + self.shape[given[-1] + 1:]
        if math.prod(whole) == 0 or torch.broadcast_shapes(values.shape, whole) != whole:
            return None
    except RuntimeError:
        return None
    return given[0], tensors, shape, whole


@override("_index_put_impl_")
def index_put_(torchs, self, indices, values, accumulate=False, unsafe=False):
    block = _block(self, indices, values) if accumulate else None
    if block is None:
        return torchs(self, indices, values, accumulate, unsafe)
    first, tensors, shape, whole = block
    linear = tensors[0]
    if len(tensors) > 1:
        linear = None
        for d, index in enumerate(tensors, first):
            index = _wrapped(index, self.shape[d])
            linear = index if linear is None else linear * self.shape[d] + index
    linear = linear.expand(shape).reshape(-1)
    lines_shape = self.shape[:first] + (math.prod(self.shape[first:first + len(tensors)]),) + self.shape[first + len(tensors):]
    source = values.expand(whole)
    return in_place(self, lambda target: add_lines(target.view(lines_shape), first, linear, source, how=CHECK | WRAP))


@override("put_")
def put_(torchs, self, index, source, accumulate=False):
    taken = takes(self, index, source) and index.numel() == source.numel() > 0 and self.numel()
    if not taken or not writable(self, index, source):
        return torchs(self, index, source, accumulate)
    keys = _wrapped(index.reshape(-1), self.numel())
    values = source.reshape(-1)

    def put(target):
        if accumulate:
            sorted_keys, places = by_destination(keys, target.numel())
            scatter_rows(target.view(-1, 1), sorted_keys, values.contiguous().view(-1, 1), places)
        else:
            write_last(target.view(-1), keys, values)

    return in_place(self, put)


# ---- Embeddings

@override("embedding_dense_backward")
def embedding_dense_backward(torchs, grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    taken = (grad_output.dtype in FLOATS and plain(grad_output, indices) and indices.device == grad_output.device
             and indices.dtype in (torch.int64, torch.int32) and grad_output.shape[:-1] == indices.shape
             and grad_output.numel() and num_weights > 0)
    if not taken:
        return torchs(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    columns = grad_output.shape[-1]
    out = torch.zeros(num_weights, columns, dtype=grad_output.dtype, device=grad_output.device)
    keys, flags = indices.reshape(-1), MEAN if scale_grad_by_freq else 0
    scatter_by_index(out, columns, keys, (1, keys.numel(), 1), (0, keys.stride(0), 0), num_weights, grad_output.contiguous(),
                     flags=flags, how=0, padding=padding_idx if padding_idx >= 0 else -1)
    return out


@override("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(torchs, grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq,
                                 mode, per_sample_weights, padding_idx=-1):
    # Of mode max alone; for sums and means torch sorts.
    if mode != 2 or grad.dtype not in FLOATS or not plain(grad, maximum_indices) or not grad.numel() or num_weights < 1:
        return torchs(grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
                      per_sample_weights, padding_idx)
    columns = grad.shape[1]
    rows = maximum_indices.long()
    keys = torch.where(rows >= 0, rows * columns + torch.arange(columns, device=grad.device), -1)  # -1: an empty bag
    if bag_size.numel() == rows.shape[0]:
        keys = torch.where(bag_size.unsqueeze(1) == 0, -1, keys)
    keys, places = by_destination(keys.reshape(-1), num_weights * columns)
    out = torch.zeros(num_weights, columns, dtype=grad.dtype, device=grad.device)
    scatter_rows(out.view(-1, 1), keys, grad.contiguous().view(-1, 1), places, flags=ADD)
    return out


# ---- index_reduce, and scatter with a reduction

def _index_reduce(self, dim, index, source, reduce, include_self):
    dim %= self.dim()
    flags = REDUCTIONS[reduce] | (ADD if include_self else 0)
    return in_place(self, lambda target: add_lines(target, dim, index, source, 1, flags))


@override("index_reduce_")
def index_reduce_(torchs, self, dim, index, source, reduce, *, include_self=True):
    taken = reduce in ("mean", "prod") and takes_index_add(self, dim, index, source, 1) and writable(self, index, source)
    if not taken:
        return torchs(self, dim, index, source, reduce, include_self=include_self)
    return _index_reduce(self, dim, index, source, reduce, include_self)


@override("index_reduce")
def index_reduce(torchs, self, dim, index, source, reduce, *, include_self=True):
    if reduce not in ("mean", "prod") or not takes_index_add(self, dim, index, source, 1):
        return torchs(self, dim, index, source, reduce, include_self=include_self)
    return _index_reduce(copied(self), dim, index, source, reduce, include_self)


_OLD_REDUCTIONS = {"add": ADD, "multiply": ADD | PRODUCT}


@override("scatter_.reduce")
def scatter_reduce_(torchs, self, dim, index, src, *, reduce):
    if reduce not in _OLD_REDUCTIONS or not takes_scatter(self, dim, index, src) or not writable(self, index, src):
        return torchs(self, dim, index, src, reduce=reduce)
    return scatter_(self, dim, index, src, _OLD_REDUCTIONS[reduce])


@override("scatter.reduce")
def scatter_reduce(torchs, self, dim, index, src, *, reduce):
    if reduce not in _OLD_REDUCTIONS or not takes_scatter(self, dim, index, src):
        return torchs(self, dim, index, src, reduce=reduce)
    return scatter_(copied(self), dim, index, src, _OLD_REDUCTIONS[reduce])


@override("scatter.reduce_out")
def scatter_reduce_out(torchs, self, dim, index, src, *, reduce, out):
    taken = reduce in _OLD_REDUCTIONS and takes_scatter(self, dim, index, src) and out.dtype == self.dtype
    if not taken or not writable(out, index, src):
        return torchs(self, dim, index, src, reduce=reduce, out=out)
    return into(out, scatter_(copied(self), dim, index, src, _OLD_REDUCTIONS[reduce]))
