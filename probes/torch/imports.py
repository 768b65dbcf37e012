"""What is to be done right after the import of a module, before whoever imports it sees it. Imports nothing but what
has no Python code, as early.py says."""
import sys

_after = {}      # name of a module -> functions of the module
_begun = set()   # of those: whose import had begun when we came
_busy = set()    # that are being looked for, with the other finders


def is_whole(module):
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _now(name, module):
    for function in _after.pop(name, ()):
        function(module)


def finish():
    """Imports that had begun when we came and have ended since."""
    for name in list(_begun):
        module = sys.modules.get(name)
        if module is None or is_whole(module):
            _begun.discard(name)
            if module is not None:  # else it has failed, and may be tried again
                _now(name, module)


class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if _begun:
            finish()
        if name not in _after or name in _busy or name in _begun:
            return None
        _busy.add(name)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None) if finder is not cls else None
                spec = find(name, path, target) if find is not None else None
                if spec is not None:
                    return cls._with_hook(name, spec)
            return None
        finally:
            _busy.discard(name)

    @staticmethod
    def _with_hook(name, spec):
        if spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        original = spec.loader.exec_module

        def exec_module(module):
            del spec.loader.exec_module  # the loader is as it was for whoever looks at it later
            original(module)
            _now(name, module)

        try:
            spec.loader.exec_module = exec_module
        except AttributeError:  # a built-in one, that takes no attributes
            pass
        return spec


def find(name, path, target):
    """For a finder that has called after() while it was asked for that module."""
    return _Finder.find_spec(name, path, target)


def after(name, function):
    """function(module), which does not raise: now, if that module is there and whole, else when it is."""
    module = sys.modules.get(name)
    if module is not None and is_whole(module):
        return function(module)
    _after.setdefault(name, []).append(function)
    if module is not None:
        _begun.add(name)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
