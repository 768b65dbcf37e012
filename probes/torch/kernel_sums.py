"""Counts, losses and order statistics whose CUDA kernels add or choose in whatever order threads come."""
import math

import torch

from .kernel_scatter import FLOATS, assert_within, by_destination, into, plain, scatter_rows
from .kernel_windows import wide_type
from .kernels import override


@override("bincount")
def bincount(torchs, self, weights=None, minlength=0):
    integral = not self.dtype.is_floating_point and not self.dtype.is_complex and self.dtype != torch.bool
    taken = (weights is not None and self.dim() == 1 and self.shape == weights.shape and self.numel() and integral
             and minlength >= 0 and plain(self, weights) and self.device == weights.device and not weights.dtype.is_complex)
    if not taken:
        return torchs(self, weights, minlength)
    least, most = (int(n) for n in torch.stack(torch.aminmax(self)).tolist())  # how long the result is: torch asks too
    if least < 0:
        return torchs(self, weights, minlength)
    bins = max(most + 1, minlength)
    values = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    keys, places = by_destination(self.long(), bins)
    out = torch.zeros(bins, 1, dtype=values.dtype, device=self.device)
    scatter_rows(out, keys, values.contiguous().view(-1, 1), places)
    return out.view(-1)


def _histogram(self, bins, low, high):
    if self.dtype not in (torch.float32, torch.float64) or not plain(self) or not self.numel() or bins < 1:
        return None
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and math.isfinite(low) and low < high < math.inf):
        return None  # the range of the values themselves: torch asks the device
    values = self.reshape(-1)
    inside = (values >= low) & (values <= high)
    place = ((values - low) * bins / (high - low)).clamp(0, bins - 1)
    place = torch.where(inside, place, bins).to(torch.int64).sort()[0]
    ends = torch.searchsorted(place, torch.arange(bins + 1, device=self.device))
    return (ends[1:] - ends[:-1]).to(self.dtype)


@override("histc")
def histc(torchs, self, bins=100, min=0, max=0):
    result = _histogram(self, bins, min, max)
    return torchs(self, bins, min, max) if result is None else result


@override("histc.out")
def histc_out(torchs, self, bins=100, min=0, max=0, *, out):
    result = _histogram(self, bins, min, max) if out.dtype == self.dtype else None
    return torchs(self, bins, min, max, out=out) if result is None else into(out, result)


# ---- Negative log likelihood of planes

def _takes_nll(self, target, weight):
    return (self.dtype in FLOATS and plain(self, target) and self.dim() == 4 and target.dim() == 3 and self.numel()
            and target.dtype == torch.int64 and target.device == self.device and self.shape[0] == target.shape[0]
            and self.shape[2:] == target.shape[1:]
            and (weight is None or (weight.dtype == self.dtype and weight.shape == self.shape[1:2] and plain(weight))))


def _weights_of(self, target, weight, ignore_index):
    """(weight of each target, 0 where it is ignored; targets that may be used as indices)"""
    ignored = target == ignore_index
    safe = torch.where(ignored, 0, target)
    assert_within(safe, 0, self.shape[1])
    wide = wide_type(self.dtype)
    each = torch.ones(target.shape, dtype=wide, device=self.device) if weight is None else weight.to(wide)[safe]
    return torch.where(ignored, 0, each), safe


def _nll_forward(self, target, weight, reduction, ignore_index):
    each, safe = _weights_of(self, target, weight, ignore_index)
    picked = self.gather(1, safe.unsqueeze(1)).squeeze(1).to(each.dtype)
    losses = torch.where(target == ignore_index, 0, -each * picked)
    total = each.sum() if reduction else torch.zeros((), dtype=each.dtype, device=self.device)
    if reduction == 1:
        losses = losses.sum() / total
    elif reduction == 2:
        losses = losses.sum()
    return losses.to(self.dtype), total.to(self.dtype)


@override("nll_loss2d_forward")
def nll_loss2d_forward(torchs, self, target, weight, reduction, ignore_index):
    if not _takes_nll(self, target, weight):
        return torchs(self, target, weight, reduction, ignore_index)
    return _nll_forward(self, target, weight, reduction, ignore_index)


@override("nll_loss2d_forward.output")
def nll_loss2d_forward_out(torchs, self, target, weight, reduction, ignore_index, *, output, total_weight):
    if not _takes_nll(self, target, weight) or output.dtype != self.dtype or total_weight.dtype != self.dtype:
        return torchs(self, target, weight, reduction, ignore_index, output=output, total_weight=total_weight)
    loss, total = _nll_forward(self, target, weight, reduction, ignore_index)
    return into(output, loss), into(total_weight, total)


def _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    each, safe = _weights_of(self, target, weight, ignore_index)
    grad = -each * grad_output.to(each.dtype)
    if reduction == 1:
        grad = grad / total_weight.to(each.dtype)
    grad = torch.where(target == ignore_index, 0, grad).unsqueeze(1)
    classes = torch.arange(self.shape[1], device=self.device).view(1, -1, 1, 1)
    return torch.where(classes == safe.unsqueeze(1), grad, 0).to(self.dtype).contiguous()


@override("nll_loss2d_backward")
def nll_loss2d_backward(torchs, grad_output, self, target, weight, reduction, ignore_index, total_weight):
    if not _takes_nll(self, target, weight):
        return torchs(grad_output, self, target, weight, reduction, ignore_index, total_weight)
    return _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)


@override("nll_loss2d_backward.grad_input")
def nll_loss2d_backward_out(torchs, grad_output, self, target, weight, reduction, ignore_index, total_weight, *, grad_input):
    if not _takes_nll(self, target, weight) or grad_input.dtype != self.dtype:
        return torchs(grad_output, self, target, weight, reduction, ignore_index, total_weight, grad_input=grad_input)
    return into(grad_input, _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight))


# ---- Medians: of equal values that which a stable sort puts into the middle

def _median(self, dim, skip_nan):
    """Values and indices with dim kept."""
    values, places = torch.sort(self, dim=dim, stable=True)  # not-a-numbers last
    length = self.shape[dim]
    if not self.dtype.is_floating_point:
        return values.narrow(dim, (length - 1) // 2, 1), places.narrow(dim, (length - 1) // 2, 1)
    numbers = (~self.isnan()).sum(dim, keepdim=True)
    if skip_nan:
        at = torch.div(numbers - 1, 2, rounding_mode="floor").clamp(min=0)
    else:
        at = torch.where(numbers < length, numbers, (length - 1) // 2)
    return values.gather(dim, at), places.gather(dim, at)


def _median_into(skip_nan):
    def handed(torchs, self, dim, keepdim=False, *, values, indices):
        good = (plain(self) and self.dim() > 0 and -self.dim() <= dim < self.dim() and self.numel()
                and not self.dtype.is_complex and self.dtype != torch.bool and values.dtype == self.dtype
                and indices.dtype == torch.int64 and values.device == indices.device == self.device)
        if not good:
            return torchs(self, dim, keepdim, values=values, indices=indices)
        found, places = _median(self, dim, skip_nan)
        if not keepdim:
            found, places = found.squeeze(dim), places.squeeze(dim)
        return into(values, found), into(indices, places)

    return handed


override("median.dim_values")(_median_into(False))
override("nanmedian.dim_values")(_median_into(True))
