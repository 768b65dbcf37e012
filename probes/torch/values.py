"""Single values that are no module's: of an optimizer's groups and its state."""
import sys
import types

import torch
from torch import Tensor

from . import _native as native
from . import names
from .names import OPTIMIZER_STATE, join, put


def record_value(where, role, name, value):
    if isinstance(value, Tensor):
        put(where, role, name, value)
    elif isinstance(value, (int, float)):
        if isinstance(value, int) and abs(value) > 2**53:  # as a float it would be its neighbours too
            native.state(where, role, name, str(int(value)).encode())
        else:
            native.scalar(where, role, name, float(value))
    elif isinstance(value, (tuple, list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            record_value(where, role, join(name, key), item)
    elif value is not None:
        _record_other(where, role, name, value)


def _record_other(where, role, name, value):
    """What is neither a tensor nor a number: by the text or the bytes that it stands for."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, (str, complex, torch.dtype, torch.device)):
        native.state(where, role, name, str(value).encode(errors="surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        native.state(where, role, name, value)
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        native.state(where, role, name, repr((value.shape, value.dtype.str)).encode() + value.tobytes())
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        pass
    elif role == OPTIMIZER_STATE:
        names.unread(value, role)
    else:
        names.limit_once("values of this type in an optimizer's groups are not looked into", type(value).__name__)
