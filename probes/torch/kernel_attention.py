"""Backward passes of attention: flash, memory-efficient and cuDNN's have a deterministic form, which torch takes only where
deterministic algorithms are on and are not to warn only. So the wish to be warned is taken back while one of them is enqueued."""
import threading

import torch

from .kernels import override

_lock = threading.Lock()
_inside = 0


class _NotWarnOnly:
    """Torch's switch is one for all threads: the first that comes turns it, the last that goes turns it back."""

    def __enter__(self):
        global _inside
        with _lock:
            if _inside == 0:
                torch._C._set_deterministic_algorithms(True, warn_only=False)
            _inside += 1

    def __exit__(self, *_):
        global _inside
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch._C._set_deterministic_algorithms(True, warn_only=True)


def _deterministically(torchs, *arguments, **named):
    with _lock:
        turned = _inside > 0
    if turned or (torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_algorithms_warn_only()):
        try:
            with _NotWarnOnly():
                return torchs(*arguments, **named)
        except RuntimeError:
            pass  # it has no such form here; who asked for warnings gets one, or the error that it is
    return torchs(*arguments, **named)


NAMES = ("_flash_attention_backward", "_efficient_attention_backward", "_cudnn_attention_backward",
         "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
         "_scaled_dot_product_cudnn_attention_backward")
override(*NAMES)(_deterministically)
