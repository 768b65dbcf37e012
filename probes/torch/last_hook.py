"""A pre-hook of ours behind a module's own ones, right before its forward().

Global pre-hooks, as ours are, run before the module's own. What these bring in (parameters that are gathered late) is there only
behind them, and what forward() writes itself is not to be taken for what it was handed: so the parameters are read in between.
A hook of our own in the module's table would be seen by the program, be saved with the module and have to be scripted. So the table
is one that shows ours to nobody but the code that calls a module's hooks. It is put in place when the first hook is registered, while
the table is empty: handles of hooks know theirs. Copies of a module have such a table again, what is pickled is a plain one."""
import copy
import functools
import sys
from collections import OrderedDict

import torch
from torch.nn.modules import module as torch_module

from .names import failed

is_compiling = torch.compiler.is_compiling
_KEY = "forkpoint"  # handles are numbers
_calls = {}         # code -> it calls the hooks of modules
_before_forward = []


def _calls_hooks(frame):
    code = frame.f_code
    known = _calls.get(code)
    if known is None:
        known = frame.f_globals is torch_module.__dict__ and "forward_call" in code.co_names + code.co_varnames + \
            code.co_freevars + code.co_cellvars
        _calls[code] = known
    return known


class Table(OrderedDict):
    def items(self):
        items = OrderedDict.items(self)
        if is_compiling() or not _before_forward or not _calls_hooks(sys._getframe(1)):
            return items
        return (*items, (_KEY, _before_forward[0]))

    def __reduce_ex__(self, protocol):
        return OrderedDict, (), None, None, iter(OrderedDict.items(self))

    def __deepcopy__(self, memo):
        made = memo[id(self)] = Table()
        for key, hook in OrderedDict.items(self):
            made[copy.deepcopy(key, memo)] = copy.deepcopy(hook, memo)
        return made


def _registering(original):
    @functools.wraps(original)
    def register_forward_pre_hook(self, *args, **kwargs):
        try:
            if not is_compiling():
                table = self.__dict__.get("_forward_pre_hooks")
                if type(table) is OrderedDict and not table:
                    self.__dict__["_forward_pre_hooks"] = Table()
        except Exception as error:
            failed("the registering of a hook", error)
        return original(self, *args, **kwargs)

    return register_forward_pre_hook


def install(before_forward):
    """before_forward(module, args) is called for modules with pre-hooks of their own. Its result is that of a pre-hook."""
    _before_forward.append(before_forward)
    torch.nn.Module.register_forward_pre_hook = _registering(torch.nn.Module.register_forward_pre_hook)


def uninstall():
    _before_forward.clear()
