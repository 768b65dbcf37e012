"""Steps under a GradScaler, and the norm that gradients are clipped to."""
import functools

import torch
from torch import Tensor

from . import _native as native
from . import state, steps
from .names import OPTIMIZER, SCALAR, failed, put
from .steps import Step


def _scaler_step(original):
    @functools.wraps(original)
    def step(self, optimizer, *args, **kwargs):
        if not steps.listening or not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        Step.stepped, Step.in_scaler = None, True
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            Step.in_scaler = False
        _after_scaler(self, optimizer)
        return result

    return step


def _after_scaler(scaler, optimizer):
    """A skipped step shows in that the optimizer's hooks did not run: nothing is read from the device."""
    try:
        skipped, Step.stepped = Step.stepped is None, None
        if not Step.is_open or not native.active():
            return
        if native.wanted():
            label = state.label_of(optimizer)
            if isinstance(scaler._scale, Tensor):
                put(state.frame(OPTIMIZER), SCALAR, label + "scale", scaler._scale)
            if isinstance(scaler._growth_tracker, Tensor):
                put(state.frame(OPTIMIZER), SCALAR, label + "growth_tracker", scaler._growth_tracker)
            native.scalar(state.frame(OPTIMIZER), SCALAR, label + "skipped", float(skipped))
            if skipped:
                state.record_scalars(optimizer)
                state.record_gradients(optimizer)
                state.record_updated(optimizer)
                Step.recorded.add(id(optimizer))
        steps.stepped(optimizer)
    except Exception as error:
        failed("a hook of a GradScaler", error)


def _look_at_gradients(parameters):
    """Records what the norm is taken of, which nobody sees behind it. Gives what to pass on: a generator is used up."""
    if not isinstance(parameters, (Tensor, list, tuple)):
        parameters = list(parameters) or parameters  # what this raises is the program's
    try:
        given = (parameters,) if isinstance(parameters, Tensor) else parameters
        state.record_gradients_of(p for p in given if isinstance(p, Tensor))
    except Exception as error:
        failed("clip_grad_norm_", error)
    return parameters


def _clipping(original):
    @functools.wraps(original)
    def clip_grad_norm_(*args, **kwargs):
        if Step.is_open and native.wanted() and not torch.compiler.is_compiling():
            if args:
                args = (_look_at_gradients(args[0]), *args[1:])
            elif "parameters" in kwargs:
                kwargs["parameters"] = _look_at_gradients(kwargs["parameters"])
        norm = original(*args, **kwargs)
        try:
            if Step.is_open and isinstance(norm, Tensor) and not torch.compiler.is_compiling():
                put(state.frame(OPTIMIZER), SCALAR, "grad_norm", norm)
        except Exception as error:
            failed("clip_grad_norm_", error)
        return norm

    return clip_grad_norm_


def install():
    scaler = getattr(torch.amp, "GradScaler", None)
    if scaler is not None:
        scaler.step = _scaler_step(scaler.step)
    clip = _clipping(torch.nn.utils.clip_grad_norm_)
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip
