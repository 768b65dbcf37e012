"""What is installed when: at once where torch is imported, else right after its import."""
import sys

from . import _native as native


def start():
    """Called once, on the main thread, as soon as the interpreter is up."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        sys.meta_path.insert(0, _Finder)
    else:
        _install(True)


_installed = None  # True: the hooks are in; False: they could not be


def wake():
    """`forkpoint attach` asks for steps. Called on the main thread, between any two lines of the program."""
    if _installed is None:
        start()
    elif _installed:
        from . import steps

        steps.count_anew()
    if _installed is not None:
        native.awake(_installed)


class _Finder:
    """Waits for the import of torch; goes when it has ended."""

    busy = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch" or cls.busy:
            if not cls.busy and cls._is_there():  # it was being imported when we came
                cls._leave()
                _install(True)
                from . import imports

                return imports.find(name, path, target)  # the list of finders was being walked: a new one is not asked
            return None
        cls.busy = True
        try:
            return cls._with_hook(_find(name))
        finally:
            cls.busy = False

    @staticmethod
    def _is_there():
        torch = sys.modules.get("torch")
        return torch is not None and not getattr(torch.__spec__, "_initializing", True)

    @classmethod
    def _with_hook(cls, spec):
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def exec_module(module):
            del spec.loader.exec_module  # the loader is as it was for whoever looks at it later
            original(module)
            cls._leave()
            _install(False)

        spec.loader.exec_module = exec_module
        return spec

    @classmethod
    def _leave(cls):
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)


def _find(name):
    for finder in sys.meta_path:
        if finder is not _Finder:
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None


def _install(late):
    global _installed
    try:
        _installed = False
        if native.KNOBS:
            from . import deterministic

            deterministic.install(late)
        _installed = native.RECORDS and _install_hooks(late) is not False
        if native.SLEEPS:
            native.awake(_installed)
    except Exception as error:
        native.say("the torch bridge could not be installed: %s: %s" % (type(error).__name__, error))
        native.limit("the torch bridge could not be installed", "%s: %s" % (type(error).__name__, error))


def _install_hooks(late):
    import os

    import torch

    if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 4):
        native.limit("torch older than 2.4: its layers are not seen", torch.__version__)
        return False
    from . import graphs, layers, made, names, scaling, state, steps

    optimizers = []
    if late:
        optimizers = _take_stock(torch, names)
        made.fresh.clear()  # in which order they came is not known, so there is no name for them that two runs share
        names.limit_once("modules that were made before the recording began, as long as nobody calls them")
        state.late()
    ours = layers.install()
    steps.on_optimizer.append(layers.forget_open_calls)
    steps.install(optimizers)
    scaling.install()
    graphs.install()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _leave_child(layers, steps, ours))
    if native.source("parallel") is not None:
        from . import parallel

        parallel.install()
    if native.KNOBS:
        from . import deterministic

        deterministic.watch()
    if native.OPS:
        from . import ops

        ops.install()
    return True


def _leave_child(layers, steps, ours):
    """A forked process (a worker of a data loader) records nothing."""
    if native.active():
        return
    steps.listening = False
    layers.uninstall(ours)


def _take_stock(torch, names):
    """Modules know their parts and not their parents, and optimizers are in no list: looked up once, if we are late."""
    import gc

    optimizers = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.optim.Optimizer):
            optimizers.append(thing)
        elif issubclass(kind, torch.nn.Module):
            for name, child in thing.__dict__.get("_modules", {}).items():
                names.registered(thing, name, child)
    return optimizers
