"""The bridge between PyTorch and the probe. The package's modules lie in libforkpoint.so and are run when first imported.

A Python that never imports torch runs this file only (and early.py, in deterministic mode): it is to stay small. It is
run as soon as the interpreter answers, which may be in the middle of its own first imports: it imports nothing that has
Python code."""
import sys
from _frozen_importlib import ModuleSpec


class _Sources:
    """Finds them; the last finder of all, so that no other import passes here."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package != __name__ or _native.source(module) is None:  # noqa: F821 (put here by the probe)
            return None
        return ModuleSpec(name, cls, origin=f"<forkpoint>/{module}.py")

    @staticmethod
    def create_module(spec):
        return None

    @classmethod
    def exec_module(cls, module):
        origin = module.__spec__.origin
        exec(compile(cls.get_source(module.__name__), origin, "exec", dont_inherit=True), module.__dict__)

    @staticmethod
    def get_source(name):  # tracebacks show lines
        return _native.source(name.rpartition(".")[2])  # noqa: F821


class _Trigger:
    """Starts the bridge when torch is asked for, and goes."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch" or cls not in sys.meta_path:
            return None
        sys.meta_path.remove(cls)
        _start()
        for finder in sys.meta_path:  # the search began without those that are there now
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def _start():
    try:
        if _native.SLEEPS:  # noqa: F821
            _native.torch_imported()  # noqa: F821 (`forkpoint attach` goes on with bootstrap.wake)
            return
        from . import bootstrap

        bootstrap.start()
    except Exception as error:  # the host's import goes on
        words = f"PyTorch is not recorded by layers, the bridge failed: {type(error).__name__}: {error}"
        _native.say(words)  # noqa: F821
        _native.gap(words)  # noqa: F821


def _start_deterministic():
    try:
        from . import early

        early.start()
    except Exception as error:
        _native.say(f"deterministic mode does not work in this process: {type(error).__name__}: {error}")  # noqa: F821


__spec__ = ModuleSpec(__name__, _Sources, is_package=True)
__loader__ = _Sources
sys.meta_path.append(_Sources)
if _native.KNOBS:  # noqa: F821
    _start_deterministic()
if "torch" in sys.modules:
    _start()
else:
    sys.meta_path.insert(0, _Trigger)
