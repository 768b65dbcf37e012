"""What goes, and what the end of the program leaves: of models that were there in the last step."""
import atexit
import sys

import torch

from . import _native as native
from . import names, rest, steps
from .names import failed
from .steps import Step


def _may_record_gone(serial):
    """Between two steps, or behind the last one, something goes that was there in the last step."""
    between = not Step.is_open or Step.is_over
    return steps.listening and between and 0 < serial == Step.serial and native.active() and native.wanted()


def _gone(tree):
    """See names.on_gone."""
    if _may_record_gone(tree.serial):
        rest.record_gone(tree)
    elif tree.resting is not None:
        _kept_gone(tree.resting)


def _kept_gone(resting):
    if _may_record_gone(resting.serial):
        rest.record_kept_gone(resting)


def _free_workspaces():
    """What cuBLAS computes with holds whatever its kernels, or the memory's users before it, left there, and says nothing
    about the run. Freed before the end of the recording, it is no buffer of which nobody knows whether it is read later."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    raised = getattr(sys, "last_type", None) is not None  # then CUDA may be in no state to free anything
    if clear is not None and not steps.captures and not raised and torch.cuda.is_initialized():
        torch.cuda.current_stream().query()  # raises where CUDA has failed
        clear()


def at_exit():
    try:
        names.on_gone = rest.on_kept_gone = None
        if not steps.listening or not native.active():
            return
        if Step.running:
            steps.end_raised()
        if Step.is_open and (Step.is_over or Step.others):
            steps.end()
        final = steps.opened and native.begin_final()
        try:
            if final:
                rest.record_final(Step.serial)
            if steps.opened and names.lean:
                _free_workspaces()
        finally:
            if final:
                native.end_step()
    except Exception as error:
        failed("the end of the program", error)


def install():
    names.on_gone, rest.on_kept_gone = _gone, _kept_gone
    atexit.register(at_exit)
