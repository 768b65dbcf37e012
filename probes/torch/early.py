"""What deterministic mode does before the first line of the program: generators are seeded where they come to be, and a
library whose functions have a default that does not repeat is changed as it is imported.

It is run while the interpreter itself still starts. CPython serves the call that brings us here as soon as it can,
which is in the middle of its own `import site`: of the standard library nothing is sure to be whole by then (of 3.12
it is `_collections_abc` that is half there). So this file imports nothing but what has no Python code, and asks of any
module that is there already whether its import has ended."""
import sys

from . import _native as native
from . import imports

knobs = frozenset(filter(None, native.KNOBS.split(",")))
applied = []      # knobs that are set in this process
started = False   # start() has done what it is to do
_said = set()


def has(name):
    return name in knobs


def limit(what):
    if native.RECORDS and what not in _said:
        _said.add(what)
        native.limit(what, "")


def guarded(name, function, *args):
    try:
        function(*args)
        applied.append(name)
    except Exception as error:
        limit("deterministic mode: the knob %s could not be set: %s: %s" % (name, type(error).__name__, error))


# ---- Seeds

def seed(kind):
    """Another one in each rank, as without us; the same in each run."""
    import zlib

    current = getattr(sys.modules.get("multiprocessing.process"), "current_process", None)
    name = current().name if current is not None else "MainProcess"
    return zlib.crc32(("%s of rank %d, %s" % (kind, native.RANK, name)).encode())


_python_state = None


def _seed_python(module):
    global _python_state
    module.seed(seed("random"))
    _python_state = module.getstate()


def seed_python_again():
    """Of a spawned process the name was not known yet. What the program has done since is left."""
    random = sys.modules.get("random")
    if random is not None and _python_state is not None and random.getstate() == _python_state:
        _seed_python(random)


def _seed_numpy(module):
    module.seed(seed("numpy"))


def _ask_flash_attn(module):
    from . import attention

    attention.ask_flash_attn(module)


def _when_imported(name, knob, function):
    imports.after(name, lambda module: guarded(knob, function, module))


def _has_begun():
    """A line of the program is being run: it was faster than we are."""
    main, frame = vars(sys.modules.get("__main__", native)), sys._getframe(1)
    while frame is not None and frame.f_globals is not main:
        frame = frame.f_back
    return frame is not None


def start():
    """The interpreter is up, and no line of the program has run, as a rule."""
    global started
    if "torch" in sys.modules:
        return limit("deterministic mode: the bridge came after the import of torch; generators were not seeded")
    if has("flash-attention"):
        for name in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
            _when_imported(name, "flash-attention", _ask_flash_attn)
    if has("seeds"):
        known = [sys.modules[name] for name in ("random", "numpy.random") if name in sys.modules]
        if _has_begun() and any(map(imports.is_whole, known)):  # it may have seeded them itself
            return limit("deterministic mode: the program had begun when the bridge came; generators were not seeded")
        _when_imported("random", "seeds", _seed_python)
        _when_imported("numpy.random", "seeds", _seed_numpy)
    started = True
