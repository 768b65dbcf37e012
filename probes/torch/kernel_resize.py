"""Backward passes of interpolation: along one dimension at a time, as kernel_windows.spread_along applies it."""
import math

import torch

from .kernel_windows import like_input, spread_along, taken, wide_type, with_out

_A, _A_SMOOTH = -0.75, -0.5  # of the cubic, as torch has it without and with anti-aliasing


def _scale(length, outputs, corners, given):
    if corners:
        return (length - 1) / (outputs - 1) if outputs > 1 else 0.0
    return 1.0 / given if given is not None and given > 0 else length / outputs


def _source(length, outputs, corners, given, dtype, device):
    at = torch.arange(outputs, device=device).to(dtype)
    scale = _scale(length, outputs, corners, given)
    return at * scale if corners else (at + 0.5) * scale - 0.5


def _linear(length, outputs, corners, given, dtype, device):
    source = _source(length, outputs, corners, given, dtype, device).clamp(min=0)
    low = source.floor().clamp(max=length - 1)
    part = (source - low).clamp(0, 1)
    low = low.long()
    return torch.stack([low, (low + 1).clamp(max=length - 1)], 1), torch.stack([1 - part, part], 1)


def _near(x, a):  # |x| <= 1
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x, a):   # 1 < |x| < 2
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _cubic(length, outputs, corners, given, dtype, device):
    source = _source(length, outputs, corners, given, dtype, device)
    low = source.floor()
    t = source - low
    weights = torch.stack([_far(t + 1, _A), _near(t, _A), _near(1 - t, _A), _far(2 - t, _A)], 1)
    index = low.long().unsqueeze(1) + torch.arange(-1, 3, device=device)
    return index.clamp(0, length - 1), weights


def _smooth(reach, window):
    """Anti-aliasing: a window over all elements that an output covers."""
    def taps(length, outputs, corners, given, dtype, device):
        scale = _scale(length, outputs, corners, given)
        support = reach * max(scale, 1.0)
        center = (torch.arange(outputs, device=device).to(dtype) + 0.5) * scale
        begin = (center - support + 0.5).to(torch.int64).clamp(min=0)  # towards zero, as torch's cast
        end = (center + support + 0.5).to(torch.int64).clamp(max=length)
        index = begin.unsqueeze(1) + torch.arange(math.ceil(support) * 2 + 1, device=device)
        weights = window((index - center.unsqueeze(1) + 0.5) * (1.0 / scale if scale >= 1 else 1.0))
        weights = torch.where(index < end.unsqueeze(1), weights, 0)
        total = weights.sum(1, keepdim=True)
        weights = torch.where(total != 0, weights / total, weights)
        return torch.where(index < end.unsqueeze(1), index, length), weights

    return taps


def _triangle(x):
    return (1 - x.abs()).clamp(min=0)


def _smooth_cubic(x):
    x = x.abs()
    return torch.where(x < 1, _near(x, _A_SMOOTH), torch.where(x < 2, _far(x, _A_SMOOTH), 0))


def _backward(taps, count):
    def backward(grad_output, output_size, input_size, align_corners, *scales):
        good = (taken(grad_output) and grad_output.dim() == count + 2 == len(input_size) and math.prod(input_size) > 0
                and list(grad_output.shape) == list(input_size[:2]) + list(output_size))
        if not good:
            return None
        given = list(scales) + [None] * (count - len(scales))
        grad = grad_output.to(wide_type(grad_output.dtype))
        for i in range(count):
            dim, length, outputs = 2 + i, input_size[2 + i], output_size[i]
            if length != outputs or _scale(length, outputs, align_corners, given[i]) != 1:
                index, weights = taps(length, outputs, align_corners, given[i], grad.dtype, grad.device)
                grad = spread_along(grad, dim, length, index, weights)
        return like_input(grad, grad_output)

    return backward


for _name, _taps, _count in (("upsample_linear1d", _linear, 1), ("upsample_bilinear2d", _linear, 2),
                             ("upsample_trilinear3d", _linear, 3), ("upsample_bicubic2d", _cubic, 2),
                             ("_upsample_bilinear2d_aa", _smooth(1, _triangle), 2),
                             ("_upsample_bicubic2d_aa", _smooth(2, _smooth_cubic), 2)):
    with_out(_name + "_backward", _name + "_backward.grad_input", _backward(_taps, _count))
