"""Where torch must not find the dispatch mode of ops.py: in compiled functions and, in older versions, higher-order ops."""
import functools
import sys

from torch.utils._python_dispatch import TorchDispatchMode

from .names import limit_once


def is_compiled(module):
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


_watched = []


def watch_compiled(begins):
    """As soon as torch's compiler is there: guards would see the mode, and what it makes would be recorded as ops."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    if _watched or module is None or not hasattr(module, "_TorchDynamoContext"):
        return
    _watched.append(module)

    def get(self):
        hooks = self.__dict__.setdefault("enter_exit_hooks", [])
        if begins not in hooks:
            hooks.insert(0, begins)
        return hooks

    def put(self, hooks):
        self.__dict__["enter_exit_hooks"] = hooks

    module._TorchDynamoContext.enter_exit_hooks = property(get, put)


def watch_higher_order(off, on):
    """Before 2.6 a higher-order operator fails under a mode that it does not know: it runs without ours."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    from torch._ops import HigherOrderOperator

    original = HigherOrderOperator.__call__

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        removed = off()
        if removed:
            limit_once("ops inside of higher-order operators", str(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            if removed:
                on()

    HigherOrderOperator.__call__ = call
