"""The backward pass of ctc_loss: the probability of each class at each time, summed over the places of the target that bear it.

Forward variables run over the target from its begin, backward ones from its end: the latter are torch's own forward variables of
all in reverse, whose kernel adds nothing atomically."""
import torch

from .kernel_scatter import ADD, lines, plain, scatter_rows
from .kernels import override


def _numbers(lengths):
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)]


def _padded(targets, lengths, width):
    """[batch, width], whatever form the targets came in; 0 behind their ends."""
    at = torch.arange(width, device=targets.device)
    ends = torch.tensor(lengths, device=targets.device).unsqueeze(1)
    if targets.dim() == 1:
        begins = torch.tensor([0] + lengths[:-1], device=targets.device).cumsum(0).unsqueeze(1)
        places = (begins + at).clamp(max=max(targets.numel() - 1, 0))
        rows = targets[places] if targets.numel() else torch.zeros_like(places)
    else:
        rows = targets[:, :width]
    return torch.where(at < ends, rows.long(), 0), ends


def _reversed(tensor, dim, ends):
    """The first ends[b] along dim (0, or 1 with the batch before it) the other way round."""
    at = torch.arange(tensor.shape[dim], device=tensor.device)
    places = (ends - 1 - at).clamp(min=0)  # [batch, along]
    if dim == 1:
        return tensor.gather(1, places)
    return tensor.gather(0, places.t().unsqueeze(2).expand(tensor.shape))


def _backward(grad, log_probs, targets, times, lengths, loss, log_alpha, blank, zero_infinity):
    steps, batch, classes = log_probs.shape
    width = (log_alpha.shape[2] - 1) // 2
    device = log_probs.device
    rows, ends = _padded(targets, lengths, width)
    durations = torch.tensor(times, device=device).unsqueeze(1)
    back = torch.ops.aten._ctc_loss(_reversed(log_probs, 0, durations), _reversed(rows, 1, ends), times, lengths, blank, False)[1]
    # back[b, t', s'] is of time duration - 1 - t' and place 2 length - s'
    back = _reversed(back.transpose(0, 1).contiguous(), 0, durations)
    places = 2 * width + 1
    s = torch.arange(places, device=device)
    mirrored = (2 * ends - s).clamp(min=0)  # [batch, places]
    beta = back.gather(2, mirrored.unsqueeze(0).expand(back.shape))
    labels = torch.full((batch, places), blank, device=device)
    labels[:, 1::2] = rows  # a blank, a label, a blank, ...
    emitted = log_probs.gather(2, labels.unsqueeze(0).expand(steps, batch, places))
    share = (log_alpha.transpose(0, 1)[:steps] + beta - emitted + loss.view(1, batch, 1)).exp()
    share = torch.where(s <= 2 * ends, share, 0).contiguous()
    keys, order = lines((torch.arange(batch, device=device).unsqueeze(1) * classes + labels).reshape(-1), steps, batch * classes)
    occupied = torch.zeros(steps * batch * classes, 1, dtype=log_probs.dtype, device=device)
    scatter_rows(occupied, keys, share.view(-1, 1), order, flags=ADD)
    result = (log_probs.exp() - occupied.view(log_probs.shape)) * grad.view(1, batch, 1)
    if zero_infinity:
        result = torch.where(torch.isinf(loss).view(1, batch, 1), 0, result)
    inside = torch.arange(steps, device=device).unsqueeze(1) < durations.view(1, batch)
    return torch.where(inside.unsqueeze(2), result, 0)


@override("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(torchs, grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank,
                      zero_infinity=False):
    good = (log_probs.dtype in (torch.float32, torch.float64) and log_probs.dim() == 3 and log_probs.numel()
            and targets.dim() in (1, 2) and plain(grad, log_probs, targets, log_alpha, neg_log_likelihood) and targets.device == log_probs.device
            and grad.numel() == log_probs.shape[1] == neg_log_likelihood.numel())
    if not good:
        return torchs(grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank,
                      zero_infinity)
    return _backward(grad, log_probs, targets, _numbers(input_lengths), _numbers(target_lengths), neg_log_likelihood, log_alpha,
                     blank, zero_infinity)
