"""The backward pass of grid_sample in 2 and 3 dimensions, linear and nearest: each corner that an output read from is a
contribution to the gradient of the input, and these are added in the order of the outputs."""
import itertools
import math

import torch

from .kernel_scatter import ADD, FLOATS, by_destination, plain, scatter_rows
from .kernel_windows import wide_type
from .kernels import override

_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_LINEAR, _NEAREST = 0, 1


def _reflected(at, low, high):
    """(coordinate, its derivative); low and high are doubled, so that they are whole."""
    if low == high:
        return torch.zeros_like(at), torch.zeros_like(at)
    least, span = low / 2, (high - low) / 2
    sign = torch.where(at < least, -1.0, 1.0).to(at.dtype)
    distance = (at - least).abs()
    flips = torch.floor(distance / span)
    extra = torch.fmod(distance, span)
    odd = torch.remainder(flips, 2) != 0
    return torch.where(odd, span - extra + least, extra + least), torch.where(odd, -sign, sign)


def _coordinate(grid, length, padding, corners):
    """(place in the input, its derivative by the grid's value)"""
    if corners:
        at, slope = (grid + 1) / 2 * (length - 1), torch.full_like(grid, (length - 1) / 2)
    else:
        at, slope = ((grid + 1) * length - 1) / 2, torch.full_like(grid, length / 2)
    if padding == _REFLECTION:
        at, turned = _reflected(at, 0, 2 * (length - 1)) if corners else _reflected(at, -1, 2 * length - 1)
        slope = slope * turned
    if padding != _ZEROS:
        slope = torch.where((at > 0) & (at < length - 1), slope, 0)
        at = at.clamp(0, length - 1)
    usable = (at > -(2.0**30)) & (at < 2.0**30)  # not a number and infinity lie outside of every input
    return torch.where(usable, at, -100.0), torch.where(usable, slope, 0)


def _corners_of(places, slopes, mode):
    """Of each corner that an output reads: (whole coordinates, weight, derivatives of the weight)."""
    if mode == _NEAREST:
        yield [p.round() for p in places], torch.ones_like(places[0]), None
        return
    lows = [p.floor() for p in places]
    parts = [p - low for p, low in zip(places, lows)]
    for corner in itertools.product((0, 1), repeat=len(places)):
        factors = [part if up else 1 - part for part, up in zip(parts, corner)]
        weight = math.prod(factors[1:], start=factors[0])
        derivatives = []
        for d, up in enumerate(corner):
            slope = slopes[d] if up else -slopes[d]
            derivatives.append(math.prod((f for i, f in enumerate(factors) if i != d), start=slope))
        yield [low + up for low, up in zip(lows, corner)], weight, derivatives


def _element(corner, sizes):
    """(flat element of the plane, whether it is inside)"""
    inside, flat = None, None
    for at, size in zip(corner, sizes):
        good = (at >= 0) & (at < size)
        whole = torch.where(good, at, 0).long()
        inside = good if inside is None else inside & good
        flat = whole if flat is None else flat * size + whole
    return flat, inside


def _backward(grad_output, input, grid, mode, padding, corners, output_mask):
    """(gradient of the input or None, gradient of the grid or None)"""
    wide = wide_type(input.dtype)
    count = grid.shape[-1]
    batch, channels, sizes = input.shape[0], input.shape[1], list(input.shape[2:])
    elements, outputs = math.prod(sizes), math.prod(grid.shape[1:-1])
    # The grid's last dimension begins with the input's last.
    found = [_coordinate(grid[..., count - 1 - d].reshape(batch, outputs).to(wide), sizes[d], padding, corners)
             for d in range(count)]
    places, slopes = [at for at, _ in found], [slope for _, slope in found]
    grad = grad_output.reshape(batch, channels, outputs).transpose(1, 2).contiguous().to(wide)  # a row an output
    read = None
    if output_mask[1] and mode == _LINEAR:
        read = input.reshape(batch, channels, elements).transpose(1, 2).contiguous().to(wide).view(batch * elements, channels)
    base = torch.arange(batch, device=input.device).unsqueeze(1) * elements
    keys, weights = [], []
    grad_grid = [torch.zeros_like(places[0]) for _ in range(count)]
    for corner, weight, derivatives in _corners_of(places, slopes, mode):
        flat, inside = _element(corner, sizes)
        keys.append(torch.where(inside, base + flat, -1))
        weights.append(weight)
        if read is not None:
            dot = (read[(base + flat).reshape(-1)].view(batch, outputs, channels) * grad).sum(2)
            dot = torch.where(inside, dot, 0)
            for d in range(count):
                grad_grid[d] += dot * derivatives[d]
    grad_input = _spread(grad, keys, weights, batch * elements, channels) if output_mask[0] else None
    if grad_input is not None:
        grad_input = grad_input.view(batch, elements, channels).transpose(1, 2).reshape(input.shape).to(input.dtype).contiguous()
    result = torch.stack(grad_grid[::-1], -1).view(grid.shape).to(grid.dtype) if output_mask[1] else None
    return grad_input, result


def _spread(grad, keys, weights, rows, channels):
    """Row by row of the outputs, and corner by corner of a row."""
    corners = len(keys)
    sorted_keys, places = by_destination(torch.stack(keys, -1).reshape(-1), rows)
    weights = torch.stack(weights, -1).reshape(-1)[places]
    out = torch.zeros(rows, channels, dtype=grad.dtype, device=grad.device)
    scatter_rows(out, sorted_keys, grad.view(-1, channels), torch.div(places, corners, rounding_mode="floor"), weights, flags=ADD)
    return out


def _sampler(count):
    def backward(torchs, grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
        good = (input.dtype in FLOATS and input.dtype == grid.dtype == grad_output.dtype and plain(grad_output, input, grid)
                and interpolation_mode in (_LINEAR, _NEAREST) and input.dim() == grid.dim() == grad_output.dim() == count + 2
                and grid.shape[-1] == count and input.shape[0] == grid.shape[0] and input.numel() and grad_output.numel()
                and grad_output.shape[:2] == input.shape[:2] and grad_output.shape[2:] == grid.shape[1:-1])
        if not good:
            return torchs(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask)
        return _backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask)

    return backward


# Torch takes cuDNN for float, double and half, up to 1,024 channels, linear, zeros outside, aligned corners.
@override("cudnn_grid_sampler_backward")
def cudnn_grid_sampler_backward(torchs, self, grid, grad_output):
    good = (self.dtype in FLOATS and self.dtype == grid.dtype == grad_output.dtype and plain(grad_output, self, grid)
            and self.dim() == 4 and self.numel() and grad_output.numel())
    if not good:
        return torchs(self, grid, grad_output)
    return _backward(grad_output, self, grid, _LINEAR, _ZEROS, True, (True, True))


override("grid_sampler_2d_backward")(_sampler(2))
override("grid_sampler_3d_backward")(_sampler(3))
