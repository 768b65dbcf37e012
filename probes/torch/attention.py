"""Attention under deterministic mode: flash_attn's functions are asked for their deterministic backward, and PyTorch's
own runs under the only mode in which it is deterministic."""
import functools
import inspect
import os
import threading

import torch

from .early import limit
from .modes import mode, set_mode


def ask_flash_attn(module):
    """flash_attn's functions take `deterministic`, which is False where the caller does not say."""
    for function in list(vars(module).values()):
        if not inspect.isfunction(function) or "deterministic" not in function.__code__.co_varnames:
            continue
        if function.__kwdefaults__ and function.__kwdefaults__.get("deterministic") is False:
            function.__kwdefaults__["deterministic"] = True
        defaults = list(function.__defaults__ or ())
        names = function.__code__.co_varnames[:function.__code__.co_argcount]
        for at, name in enumerate(names[len(names) - len(defaults):]):
            if name == "deterministic" and defaults[at] is False:
                defaults[at] = True
        function.__defaults__ = tuple(defaults) or None


_ATTENTION = ("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0",
              "ScaledDotProductCudnnAttentionBackward0")
_before_strict = None  # the mode that comes back when the op of attention is over
_strict_depth = 0      # ops of attention that are being enqueued
_strict_lock = threading.Lock()


def watch():
    """PyTorch's own attention is deterministic only where deterministic algorithms are on and do not merely warn. So
    they are, for as long as its forward and its backward take."""
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def scaled_dot_product_attention(query, *args, **kwargs):
        if torch.compiler.is_compiling() or not getattr(query, "is_cuda", False) or not _may_be_strict():
            return original(query, *args, **kwargs)
        if _strict_depth and torch._C._current_graph_task_id() == -1:
            forget()
        strict = _begin_strict()
        try:
            out = original(query, *args, **kwargs)
        finally:
            if strict:
                _end_strict()
        node = _attention_node(getattr(out, "grad_fn", None))
        if node is not None and strict:
            node.register_prehook(_before_attention)
            node.register_hook(_after_attention)
        return out

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def _may_be_strict():
    """Else a matrix product would raise where the program did not ask for that."""
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8"):
        return True
    limit("deterministic mode: attention of PyTorch is left as it is, since CUBLAS_WORKSPACE_CONFIG does not fit")
    return False


def _attention_node(node):
    for _ in range(4):  # padding and views lie behind it
        if node is None or node.name() in _ATTENTION:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _begin_strict():
    """Whether an _end_strict is due. The mode is the process's: backward passes of several devices may want it."""
    global _before_strict, _strict_depth
    with _strict_lock:
        if _strict_depth == 0:
            found = mode()
            if found == (True, False):
                return False
            _before_strict = found
            set_mode(True, False)
        _strict_depth += 1
        return True


def _end_strict():
    global _strict_depth
    with _strict_lock:
        if _strict_depth > 0:
            _strict_depth -= 1
            if _strict_depth == 0:
                set_mode(*_before_strict)


def forget():
    """No backward pass is running: one that raised has left the mode behind."""
    global _strict_depth
    with _strict_lock:
        if _strict_depth > 0:
            _strict_depth = 0
            set_mode(*_before_strict)


def _before_attention(grads):
    _begin_strict()  # a hook that returns anything would be taken to replace the gradients


def _after_attention(grad_inputs, grad_outputs):
    _end_strict()
