"""The usual calls of index_add_, scatter_add_ and the gradient of an embedding, without the detours of the general functions:
the kernels of the probe are enqueued within some tens of microseconds. What is unusual (a view, another dimension, a smaller
index, memory that is shared) is answered by None, and taken by the general functions, which do the same sums."""
import torch

from . import kernel_scatter, kernels
from .kernel_scatter import ADD, CHECK, FLOATS, INDEX_FLAGS, MEAN, MOST_KEYS, launch_by_index, native_devices
from .kernels import direct


def _share_memory(self, source, index):
    storage = self.untyped_storage().data_ptr()
    return source.untyped_storage().data_ptr() == storage or index.untyped_storage().data_ptr() == storage


def _kind(self, index, source):
    """What the probe calls the type; None: not for us, or there is no probe."""
    device = self.device
    if (kernels.scatter_native() is None or device.type not in native_devices or device != index.device
            or device != source.device or self.dtype is not source.dtype or index.dtype not in INDEX_FLAGS
            or not (self.is_contiguous() and source.is_contiguous())):
        return None
    return FLOATS.get(self.dtype)


def _add(self, kind, index, source, rows, count, stride, columns, alpha):
    if not 0 < count <= kernel_scatter.MOST_OF_OUR_SORT or not 0 < rows <= MOST_KEYS or columns == 0:
        return None
    if _share_memory(self, source, index):
        return None
    done = launch_by_index(self, kind, columns, index, (1, count, 1), (0, stride, 0), rows, source, alpha, ADD, CHECK, -1)
    return self if done else None


@direct("index_add_")
def index_add_(self, dim, index, source, alpha=1):
    kind = _kind(self, index, source)
    if kind is None or dim != 0 or index.dim() != 1 or not isinstance(alpha, (int, float)):
        return None
    shape, other = self.shape, source.shape
    if len(shape) == 0 or len(shape) != len(other) or shape[1:] != other[1:] or index.shape[0] != other[0]:
        return None
    rows = shape[0]
    columns = self.numel() // rows if rows else 0
    return _add(self, kind, index, source, rows, other[0], index.stride(0), columns, alpha)


@direct("scatter_add_")
def scatter_add_(self, dim, index, source):
    """Of an index that is the same for all columns."""
    kind = _kind(self, index, source)
    if kind is None or dim != 0:
        return None
    shape, given, strides = self.shape, index.shape, index.stride()
    if len(given) == 0 or len(shape) != len(given) or given != source.shape or given[1:] != shape[1:]:
        return None
    for length, stride in zip(given[1:], strides[1:]):
        if stride != 0 and length != 1:
            return None
    rows = shape[0]
    columns = self.numel() // rows if rows else 0
    return _add(self, kind, index, source, rows, given[0], strides[0], columns, 1)


@direct("embedding_dense_backward")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    kind = _kind(grad_output, indices, grad_output)
    count = indices.numel()
    if kind is None or not indices.is_contiguous() or grad_output.shape[:-1] != indices.shape:
        return None
    if not 0 < count <= kernel_scatter.MOST_OF_OUR_SORT or not 0 < num_weights <= MOST_KEYS or grad_output.numel() == 0:
        return None
    columns = grad_output.shape[-1]
    out = torch.zeros((num_weights, columns), dtype=grad_output.dtype, device=grad_output.device)
    done = launch_by_index(out, kind, columns, indices, (1, count, 1), (0, 1, 0), num_weights, grad_output, 1,
                           MEAN if scale_grad_by_freq else 0, 0, padding_idx if padding_idx >= 0 else -1)
    return out if done else None
