"""Deterministic mode inside of a Python process: the knobs of FORKPOINT_DETERMINISTIC that no variable sets (lib/knobs.h).

Everything is set before the first line of the program that could set it too, so the program has the last word, and what
it says is written into the run. Generators are seeded where they come to be: a program that seeds them later gets what
it gets without us. Works in processes of which nothing is recorded as well. What comes before torch is in early.py."""
import functools
import re
import sys

import torch

from . import _native as native
from . import early, imports
from .early import applied, guarded, has, limit
from .modes import mode, set_fill, set_mode

_own = []        # what the program has set itself, in words
_told = False    # the header of the stream is written


def install(late):
    """Right after torch's import. late: lines of the program may have run in between; what it set is left."""
    imports.finish()
    if has("seeds") and not late:
        guarded("seeds", _seed_torch)
    if has("cudnn"):
        guarded("cudnn", _set_cudnn)
    if has("torch-algorithms"):
        guarded("torch-algorithms", _set_algorithms)
        if has("torch-fill"):
            applied.append("torch-fill")
    if has("flash-attention"):
        guarded("flash-attention", _watch_attention)
    if has("torch-kernels"):
        guarded("torch-kernels", _install_kernels)


def _seed_torch():
    if not early.started:
        raise RuntimeError("other generators were not seeded before the program's first line")
    early.seed_python_again()
    torch.manual_seed(early.seed("torch"))


def _watch_attention():
    from . import attention

    attention.watch()
    if not has("torch-algorithms"):
        set_fill(has("torch-fill"))


def _install_kernels():
    from . import kernels

    kernels.install(torch, native)


def _set_cudnn():
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


_ours = False          # the mode of deterministic algorithms is the one that we have set
_program_fills = False  # it has said itself whether memory is filled


def _set_algorithms():
    global _ours
    if mode()[0]:
        return _program_says("deterministic algorithms were on before forkpoint came")
    set_mode(True, True)
    set_fill(has("torch-fill"))
    _ours = True
    _watch_calls()
    _listen()


def _watch_calls():
    """The program's own calls: afterwards the mode is what it says, with filling as if we had never been here."""
    for name in ("use_deterministic_algorithms", "set_deterministic_debug_mode"):
        setattr(torch, name, _announced(getattr(torch, name), name))
    kind = type(sys.modules.get("torch.utils.deterministic"))
    fill = getattr(kind, "fill_uninitialized_memory", None)
    if isinstance(fill, property):
        kind.fill_uninitialized_memory = property(fill.fget, _announced_fill(fill.fset), fill.fdel, fill.__doc__)


def _announced(original, name):
    @functools.wraps(original)
    def called(*args, **kwargs):
        global _ours
        words = ", ".join([repr(value) for value in args] + ["%s=%r" % item for item in kwargs.items()])
        _program_says("torch.%s(%s)" % (name, words))
        if _ours and not _program_fills:
            set_fill(True)  # as it is where nobody has said anything
        _ours = False
        return original(*args, **kwargs)

    return called


def _announced_fill(original):
    def called(self, mode):
        global _program_fills
        _program_fills = True
        _program_says("torch.utils.deterministic.fill_uninitialized_memory = %r" % (mode,))
        return original(self, mode)

    return called


def _program_says(words):
    if _told:
        limit("deterministic mode: set by the program itself: " + words)
    elif words not in _own:
        _own.append(words)


# ---- Ops that have no deterministic implementation: PyTorch warns of each, and we are told of the warning

class _Listener:
    """In the place of a pattern in warnings.filters: it is asked about each warning before any is shown or raised. It
    takes those of a mode that the program did not ask for (ignored: `forkpoint` names the ops) and lets others pass."""

    _known = (
        (re.compile(r"(\S+) does not have a deterministic implementation"), "%s"),
        (re.compile(r"(.+?) defaults to a non-deterministic algorithm"), "%s"),
        (re.compile(r"Deterministic behavior was enabled (with)"), "matrix products of cuBLAS (no CUBLAS_WORKSPACE_CONFIG)"),
    )

    def match(self, text):
        try:
            for pattern, words in self._known:
                found = pattern.match(text)
                if found:
                    limit("not deterministic: " + (words % found.group(1) if "%s" in words else words))
                    return _ours
        except Exception:
            pass
        return False


_filter = ("ignore", _Listener(), UserWarning, None, 0)


def _put_first(warnings):
    filters = warnings.filters
    if not filters or filters[0] is not _filter:
        if _filter in filters:
            filters.remove(_filter)
        filters.insert(0, _filter)


def _listen():
    """From now on ours is the first, whatever filters the program adds: else one that raises would end it for our mode."""
    import warnings

    _put_first(warnings)
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):
        original = getattr(warnings, name, None)
        if original is None or hasattr(original, "__wrapped__"):
            continue

        def mutated(*args, original=original, **kwargs):
            _put_first(warnings)
            return original(*args, **kwargs)

        mutated.__wrapped__ = original
        setattr(warnings, name, mutated)
        mutated()


# ---- What the run says of it

def watch():
    """Once the bridge's own hooks are in."""
    from . import state, steps

    state.on_facts.append(tell)
    steps.on_step.append(_look)


def tell():
    """Before the bridge's first record."""
    global _told
    _told = True
    native.fact("deterministic.in_process", ",".join(dict.fromkeys(applied)) or "none")
    if _own:
        native.fact("deterministic.set_by_program", "; ".join(_own))
    _look()
    for name, text in _precisions():
        native.fact(name, text)


def _precisions():
    """What floats of 32 bits are multiplied in. Where a program uses the newer interface (2.9) the older one raises."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(torch.backends, "fp32_precision"):
        return [("torch.matmul.fp32_precision", str(matmul.fp32_precision)),
                ("torch.cudnn.conv.fp32_precision", str(cudnn.conv.fp32_precision)),
                ("torch.cudnn.rnn.fp32_precision", str(cudnn.rnn.fp32_precision))]
    return [("torch.matmul.allow_tf32", str(matmul.allow_tf32)), ("torch.cudnn.allow_tf32", str(cudnn.allow_tf32))]


def _look():
    """When a step begins: has the program changed what we have set?"""
    attention = sys.modules.get(__package__ + ".attention")
    if attention is not None:
        attention.forget()
    cudnn = torch.backends.cudnn
    if has("cudnn") and (not cudnn.deterministic or cudnn.benchmark):
        limit("deterministic mode: set by the program itself: torch.backends.cudnn.deterministic = %s, benchmark = %s"
              % (cudnn.deterministic, cudnn.benchmark))
    if _ours:
        if mode() != (True, True):
            limit("deterministic mode: set by the program itself: deterministic algorithms %s, warn only %s" % mode())
        _listen()
    if has("megatron"):
        _look_at_megatron()


_MEGATRON = (("deterministic_mode", True, "add --deterministic-mode"),
             ("cross_entropy_loss_fusion", False, "leave out --cross-entropy-loss-fusion"),
             ("tp_comm_overlap", False, "leave out --tp-comm-overlap"))


def _look_at_megatron():
    """What Megatron's own deterministic mode demands, and only the command line can give."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    for name, wanted, advice in _MEGATRON if args is not None else ():
        if getattr(args, name, wanted) != wanted:
            limit("not deterministic: Megatron's %s is %s: %s" % (name, getattr(args, name), advice))
