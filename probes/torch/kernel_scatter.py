"""Sums by destination in a fixed order, and the operations that are made of one."""
import math

import torch

from .kernels import Torn, give_up_native, original, override, scatter_native

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}  # as enum ScatterType
ADD, MEAN, PRODUCT = 1, 2, 4                                                       # as ScatterFlags
_TORN = 1 << 20                                                                    # as probes/scatter.h
_PIECE = 128                                                                       # as kernels/scatter_plan.h
CHECK, WRAP = 4, 2                                                                 # as IndexFlags
INDEX_FLAGS = {torch.int64: 1, torch.int32: 0}                                    # as IndexFlags: kIndexWide
MOST_KEYS = 2**31 - 1                                                             # as kernels/scatter_sort.h
MOST_OF_OUR_SORT = 1 << 21  # keys; more than that torch sorts faster, and in the same order
_FEW_KEYS = 1 << 16


native_devices = {"cuda"}
_scratch_bytes = {}  # by type, places and columns


def _current_stream(device):
    return torch._C._cuda_getCurrentRawStream(device.index)


def _on_device(device, function, *arguments):
    """What the probe's function says: 0, or a CUDA error before anything was written."""
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        error = function(*arguments)
    else:
        with torch.cuda.device(device):
            error = function(*arguments)
    if error >= _TORN:
        raise Torn("forkpoint's kernels could not be launched: CUDA error %d" % (error - _TORN))
    if error:
        give_up_native("CUDA error %d" % error)
    return error


def _scratch(native, kind, count, columns, device):
    key = kind, count, columns
    size = _scratch_bytes.get(key)
    if size is None:
        if len(_scratch_bytes) > 4096:
            _scratch_bytes.clear()
        size = _scratch_bytes[key] = native.scatter_scratch(kind, count, columns)
    return torch.empty(size, dtype=torch.uint8, device=device)


def by_destination(keys, rows):
    """Keys of one dimension in ascending order, those that are equal in the order that they had, and where each was. Those that
    are not below `rows`, or negative, are of no row afterwards either."""
    device, count, native = keys.device, keys.numel(), scatter_native()
    if native is not None and device.type in native_devices and 0 < rows <= MOST_KEYS and 0 < count <= MOST_OF_OUR_SORT:
        if keys.dtype in INDEX_FLAGS:
            ordered = torch.empty(count, dtype=torch.int32, device=device)
            places = torch.empty(count, dtype=torch.int64, device=device)
            scratch = _scratch(native, 0, count, 0, device)
            numbers = (_current_stream(device), ordered.data_ptr(), places.data_ptr(), scratch.data_ptr(), keys.data_ptr(),
                       INDEX_FLAGS[keys.dtype], 0, keys.stride(0), 0, 1, count, 1, rows, -1)
            if _on_device(device, native.sort_by_index, numbers) == 0:
                return ordered, places
    if rows < 2**31 and keys.dtype != torch.int32:
        keys = keys.clamp(-1, rows).to(torch.int32)  # what is out of range stays so
    elif rows >= 2**31:
        keys = keys.long()  # lines() counts further than 32 bits hold
    return torch.sort(keys, stable=True)


def scatter_rows(out, keys, src, rows=None, weights=None, alpha=1, flags=ADD):
    """out[k] += alpha * sum of weights[p] * src[rows[p]] over the places p with keys[p] == k, in the order of the places; other
    flags: kernels/scatter_launch.h. keys: sorted; those outside of out are left out. All are contiguous, out and src have 2
    dimensions. The order of additions depends on the keys alone."""
    if keys.numel() == 0 or out.numel() == 0 or src.shape[1] == 0:
        return
    native = scatter_native()
    if native is None or out.device.type not in native_devices or _launch(native, out, keys, src, rows, weights, alpha, flags):
        _scatter_by_torch(out, keys, src, rows, weights, alpha, flags)


def _launch(native, out, keys, src, rows, weights, alpha, flags):
    device, count, columns = out.device, keys.numel(), out.shape[1]
    sum_bytes = 8 if out.dtype == torch.float64 else 4
    starts = torch.empty((count + 31) // 32, dtype=torch.int32, device=device)
    slots = 2 * -(-count // _PIECE) if count > _PIECE else 0
    partials = torch.empty(slots * -(-columns // 4) * 4 * sum_bytes, dtype=torch.uint8, device=device)
    numbers = (_current_stream(device), FLOATS[out.dtype], flags, src.data_ptr(), out.data_ptr(),
               0 if rows is None else rows.data_ptr(), 0 if weights is None else weights.data_ptr(), starts.data_ptr(),
               partials.data_ptr(), keys.data_ptr(), count, keys.dtype == torch.int64, out.shape[0], columns,
               src.stride(0), out.stride(0))
    return _on_device(device, native.scatter, numbers, float(alpha))


def scatter_by_index(out, columns, index, shape, strides, rows, src, alpha=1, flags=ADD, how=CHECK, padding=-1):
    """As scatter_rows, of rows of `columns` elements, for places that an index names: seen as a tensor [blocks, length, inner]
    of this shape and strides, its element at (b, l, i) sends row (b * length + l) * inner + i of src to row
    (b * rows + element) * inner + i of out. how: CHECK: an element that is no row is an assertion on the device, else it is
    left out; WRAP: negative ones count from the end. Elements equal to padding are left out. out and src are contiguous."""
    blocks, length, inner = shape
    count, device, native = blocks * length * inner, out.device, scatter_native()
    if count == 0 or columns == 0:
        return
    ours = native is not None and device.type in native_devices and count <= MOST_OF_OUR_SORT
    if (ours and 0 < blocks * rows * inner <= MOST_KEYS
            and launch_by_index(out, FLOATS[out.dtype], columns, index, shape, strides, rows, src, alpha, flags, how, padding)):
        return
    keys = keys_of(index, shape, strides, rows, how, padding)
    keys, places = by_destination(keys, blocks * rows * inner)
    scatter_rows(out.view(-1, columns), keys, src.view(-1, columns), places, None, alpha, flags)


def launch_by_index(out, kind, columns, index, shape, strides, rows, src, alpha, flags, how, padding):
    """scatter_by_index by the probe's kernels; kind: the type, as FLOATS has it. False: they cannot be launched."""
    native, device = scatter_native(), out.device
    blocks, length, inner = shape
    scratch = _scratch(native, kind, blocks * length * inner, columns, device)
    numbers = (_current_stream(device), kind, flags, src.data_ptr(), out.data_ptr(), scratch.data_ptr(), columns, columns,
               columns, index.data_ptr(), how | INDEX_FLAGS[index.dtype], *strides, blocks, length, inner, rows, padding)
    return _on_device(device, native.scatter_by_index, numbers, float(alpha)) == 0


def keys_of(index, shape, strides, rows, how, padding):
    """What kernels/scatter_sort.h has each place go to; what is left out goes to -1."""
    seen = index.as_strided([1 if stride == 0 else n for n, stride in zip(shape, strides)], strides, index.storage_offset())
    if how & CHECK:
        assert_within(seen, -rows if how & WRAP else 0, rows)
    seen = seen.long()
    if how & WRAP:
        seen = torch.where(seen < 0, seen + rows, seen)
    blocks, _, inner = shape
    block = torch.arange(blocks, device=index.device).view(-1, 1, 1)
    keys = (block * rows + seen) * inner + torch.arange(inner, device=index.device)
    left_out = (seen < 0) | (seen >= rows) | (seen == padding)
    return torch.where(left_out, -1, keys).expand(shape).reshape(-1)


def _scatter_by_torch(out, keys, src, rows, weights, alpha, flags):
    """The same sums, of torch's index_put, which sorts on CUDA and is serial on the CPU."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    count, columns = out.shape
    keys = torch.where((keys >= 0) & (keys < count), keys, count).long()  # a row more, for what is left out
    values = (src if rows is None else src.index_select(0, rows)).to(wide)
    if weights is not None:
        values = values * weights.unsqueeze(1)
    device = out.device.type
    places = torch.zeros(count + 1, dtype=torch.int64, device=out.device)
    original("_index_put_impl_", device)(places, [keys], torch.ones_like(keys), True)
    if flags & PRODUCT:
        sums = torch.ones(count + 1, columns, dtype=wide, device=out.device)
        original("scatter_reduce.two_out", device)(sums, 0, keys.unsqueeze(1).expand_as(values), values, "prod", out=sums)
    else:
        sums = torch.zeros(count + 1, columns, dtype=wide, device=out.device)
        original("_index_put_impl_", device)(sums, [keys], values, True)
    sums, places = sums[:count], places[:count].unsqueeze(1)
    before = out.to(wide)
    if flags & PRODUCT:
        result = before * sums if flags & ADD else sums
    else:
        result = before + alpha * sums if flags & ADD else alpha * sums
        if flags & MEAN:
            result = result / (places + (1 if flags & ADD else 0))
    out.copy_(torch.where(places > 0, result, before))


def assert_within(index, low, high):
    """As torch's kernels do: an assertion on the device (on the CPU an error)."""
    if index.numel():
        least, most = torch.aminmax(index)
        torch._assert_async((least >= low) & (most < high), "index out of range")


def plain(*tensors):
    return all(t.layout == torch.strided and not t.is_quantized for t in tensors)


def takes(self, index, source):
    return (self.dtype in FLOATS and source.dtype == self.dtype and index.dtype in (torch.int64, torch.int32)
            and plain(self, index, source) and self.device == index.device == source.device)


def writable(self, *others):
    """May self be written while the others are read? What torch refuses is torch's to refuse."""
    storage = self.untyped_storage().data_ptr()
    return torch._debug_has_internal_overlap(self) != 1 and all(
        other.untyped_storage().data_ptr() != storage or other.numel() == 0 for other in others)


def in_place(self, function):
    """function(contiguous self)"""
    if self.is_contiguous():
        function(self)
    else:
        copy = self.contiguous()
        function(copy)
        self.copy_(copy)
    return self


def copied(self):
    return self.clone(memory_format=torch.contiguous_format)


def into(out, result):
    """The form of an operation that is handed its result."""
    if out.shape != result.shape:
        from torch._prims_common.wrappers import _maybe_resize_out  # warns as torch's kernels do

        _maybe_resize_out(out, result.shape)
    out.copy_(result)
    return out


# ---- index_add

def lines(index, lead, rows):
    """Keys and places of `lead` blocks of `rows` rows that are all indexed alike."""
    keys, places = by_destination(index.reshape(-1), lead * rows)
    if lead > 1:
        blocks = torch.arange(lead, device=index.device, dtype=torch.int64).unsqueeze(1)
        keys = ((blocks * rows).to(keys.dtype) + keys).reshape(-1)
        places = (blocks * index.numel() + places).reshape(-1)
    return keys, places


def add_lines(self, dim, index, source, alpha=1, flags=ADD, how=CHECK):
    """self: contiguous, written. index: of one dimension. source: as self but for its length along dim."""
    lead, rows, columns = math.prod(self.shape[:dim]), self.shape[dim], math.prod(self.shape[dim + 1:])
    count, source = index.numel(), source.contiguous()
    if lead == 1 or lead * count <= _FEW_KEYS:
        shape, strides = (lead, count, 1), (0, index.stride(0), 0)
        return scatter_by_index(self, columns, index, shape, strides, rows, source, alpha, flags, how)
    # Sorting one line and repeating that costs less than sorting all.
    if how & CHECK:
        assert_within(index, -rows if how & WRAP else 0, rows)
    if how & WRAP:
        index = torch.where(index < 0, index + rows, index)
    keys, places = lines(index, lead, rows)
    scatter_rows(self.view(lead * rows, columns), keys, source.view(-1, columns), places, None, alpha, flags)


def takes_index_add(self, dim, index, source, alpha):
    return (takes(self, index, source) and 0 < self.dim() == source.dim() and index.dim() == 1
            and -self.dim() <= dim < self.dim() and self.numel() and source.shape[dim] == index.numel()
            and all(a == b for d, (a, b) in enumerate(zip(self.shape, source.shape)) if d != dim % self.dim())
            and isinstance(alpha, (int, float)))


def _index_add_(self, dim, index, source, alpha):
    dim %= self.dim()
    return in_place(self, lambda target: add_lines(target, dim, index, source, alpha))


@override("index_add_")
def index_add_(torchs, self, dim, index, source, *, alpha=1):
    if not takes_index_add(self, dim, index, source, alpha) or not writable(self, index, source):
        return torchs(self, dim, index, source, alpha=alpha)
    return _index_add_(self, dim, index, source, alpha)


@override("index_add")
def index_add(torchs, self, dim, index, source, *, alpha=1):
    if not takes_index_add(self, dim, index, source, alpha):
        return torchs(self, dim, index, source, alpha=alpha)
    return _index_add_(copied(self), dim, index, source, alpha)


@override("index_add.out")
def index_add_out(torchs, self, dim, index, source, *, alpha=1, out):
    if not takes_index_add(self, dim, index, source, alpha) or out.dtype != self.dtype or not writable(out, index, source):
        return torchs(self, dim, index, source, alpha=alpha, out=out)
    return into(out, _index_add_(copied(self), dim, index, source, alpha))


# ---- scatter_add and scatter_reduce

def _stride_of(index, dims):
    """That of these dimensions as one; None: they are not one."""
    stride, next_stride = 0, None
    for d in reversed(dims):
        length = index.shape[d]
        if length == 1:
            continue
        if next_stride is None:
            stride = index.stride(d)
        elif index.stride(d) != next_stride:
            return None
        next_stride = index.stride(d) * length
    return stride


def _strides_around(index, dim):
    """Strides of an index seen as [before dim, along dim, behind dim]; None: it cannot be seen so."""
    strides = _stride_of(index, range(dim)), index.stride(dim), _stride_of(index, range(dim + 1, index.dim()))
    return None if None in strides else strides


def _scatter_line_by_line(self, dim, index, src, flags):
    """self: contiguous, written. src: as large as the index."""
    shape, rows = self.shape, self.shape[dim]
    whole = index.shape[:dim] == shape[:dim] and index.shape[dim + 1:] == shape[dim + 1:]
    if not whole:
        return _scatter_by_keys(self, dim, index, src, flags)
    strides = _strides_around(index, dim)
    if strides is None:
        index = index.contiguous()
        strides = _strides_around(index, dim)
    lead, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1:])
    if strides[2] == 0:  # the same for all columns: whole rows are added
        if strides[0] == 0:
            line = index[(0,) * dim][(slice(None),) + (0,) * (index.dim() - dim - 1)]
            return add_lines(self, dim, line, src, 1, flags)
        scatter_by_index(self, inner, index, (lead, index.shape[dim], 1), strides, rows, src.contiguous(), 1, flags)
    else:
        scatter_by_index(self, 1, index, (lead, index.shape[dim], inner), strides, rows, src.contiguous(), 1, flags)


def _scatter_by_keys(self, dim, index, src, flags):
    """Of an index that is smaller than self along other dimensions too."""
    assert_within(index, 0, self.shape[dim])
    keys, step = None, 1
    for d in reversed(range(index.dim())):
        part = index if d == dim else torch.arange(index.shape[d], device=index.device).view((-1,) + (1,) * (index.dim() - 1 - d))
        keys = part * step if keys is None else keys + part * step
        step *= self.shape[d]
    keys, places = by_destination(keys.reshape(-1), self.numel())
    scatter_rows(self.view(-1, 1), keys, src.contiguous().view(-1, 1), places, None, 1, flags)


def takes_scatter(self, dim, index, src):
    return (takes(self, index, src) and self.dim() == index.dim() == src.dim() and self.dim() > 0
            and -self.dim() <= dim < self.dim() and index.numel() and self.numel()
            and all(i <= s and (d == dim % self.dim() or i <= t)
                    for d, (i, s, t) in enumerate(zip(index.shape, src.shape, self.shape))))


def scatter_(self, dim, index, src, flags=ADD):
    dim %= self.dim()
    index = index.long()
    if src.shape != index.shape:
        src = src[tuple(slice(0, length) for length in index.shape)]
    return in_place(self, lambda target: _scatter_line_by_line(target, dim, index, src, flags))


@override("scatter_add_")
def scatter_add_(torchs, self, dim, index, src):
    if not takes_scatter(self, dim, index, src) or not writable(self, index, src):
        return torchs(self, dim, index, src)
    return scatter_(self, dim, index, src)


@override("scatter_add")
def scatter_add(torchs, self, dim, index, src):
    return scatter_(copied(self), dim, index, src) if takes_scatter(self, dim, index, src) else torchs(self, dim, index, src)


@override("scatter_add.out")
def scatter_add_out(torchs, self, dim, index, src, *, out):
    if not takes_scatter(self, dim, index, src) or out.dtype != self.dtype or not writable(out, index, src):
        return torchs(self, dim, index, src, out=out)
    return into(out, scatter_(copied(self), dim, index, src))


REDUCTIONS = {"sum": 0, "mean": MEAN, "prod": PRODUCT}  # amax and amin need no order


@override("scatter_reduce_.two")
def scatter_reduce_(torchs, self, dim, index, src, reduce, *, include_self=True):
    if reduce not in REDUCTIONS or not takes_scatter(self, dim, index, src) or not writable(self, index, src):
        return torchs(self, dim, index, src, reduce, include_self=include_self)
    return scatter_(self, dim, index, src, REDUCTIONS[reduce] | (ADD if include_self else 0))


@override("scatter_reduce.two")
def scatter_reduce(torchs, self, dim, index, src, reduce, *, include_self=True):
    if reduce not in REDUCTIONS or not takes_scatter(self, dim, index, src):
        return torchs(self, dim, index, src, reduce, include_self=include_self)
    return scatter_(copied(self), dim, index, src, REDUCTIONS[reduce] | (ADD if include_self else 0))


@override("scatter_reduce.two_out")
def scatter_reduce_out(torchs, self, dim, index, src, reduce, *, include_self=True, out):
    taken = reduce in REDUCTIONS and takes_scatter(self, dim, index, src) and out.dtype == self.dtype
    if not taken or not writable(out, index, src):
        return torchs(self, dim, index, src, reduce, include_self=include_self, out=out)
    return into(out, scatter_(copied(self), dim, index, src, REDUCTIONS[reduce] | (ADD if include_self else 0)))
