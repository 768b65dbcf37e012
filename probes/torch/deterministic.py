"""Deterministic mode inside of a Python process: the knobs of FORKPOINT_DETERMINISTIC that no variable sets (lib/knobs.h).

Everything is set before the first line of the program that could set it too, so the program has the last word, and what
it says is written into the run. Generators are seeded where they come to be: a program that seeds them later gets what
it gets without us. Runs without torch as well, and in processes of which nothing is recorded."""
import functools
import os
import re
import sys
import threading

from . import _native as native

_knobs = frozenset(filter(None, native.KNOBS.split(",")))
_torch = None
_applied = []    # knobs that are set here
_own = []        # what the program has set itself, in words
_told = False    # the header of the stream is written
_said = set()



def has(name):
    return name in _knobs


def _limit(what):
    if native.RECORDS and what not in _said:
        _said.add(what)
        native.limit(what, "")


def _guarded(name, function, *args):
    try:
        function(*args)
        _applied.append(name)
    except Exception as error:
        _limit("deterministic mode: the knob %s could not be set: %s: %s" % (name, type(error).__name__, error))


# ---- Seeds

def _seed(kind):
    """Another one in each rank, as without us; the same in each run."""
    import zlib

    process = sys.modules.get("multiprocessing.process")
    name = process.current_process().name if process else "MainProcess"
    return zlib.crc32(("%s of rank %d, %s" % (kind, native.RANK, name)).encode())


_python_state = None


def _seed_python(module):
    global _python_state
    module.seed(_seed("random"))
    _python_state = module.getstate()


def _seed_numpy(module):
    module.seed(_seed("numpy"))


def _seed_torch():
    random = sys.modules.get("random")
    # Of a spawned process the name was not known yet.
    if random is not None and _python_state is not None and random.getstate() == _python_state:
        _seed_python(random)
    _torch.manual_seed(_seed("torch"))


# ---- What is to be done right after an import

_after = {}


class _AfterImport:
    busy = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if cls.busy or name not in _after:
            return None
        cls.busy = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target) if finder is not cls else None
                if spec is not None:
                    return cls._with_hook(name, spec)
            return None
        finally:
            cls.busy = False

    @staticmethod
    def _with_hook(name, spec):
        if spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        original = spec.loader.exec_module

        def exec_module(module):
            del spec.loader.exec_module  # the loader is as it was for whoever looks at it later
            original(module)
            knob, function = _after.pop(name, (None, None))
            if knob is not None:
                _guarded(knob, function, module)

        try:
            spec.loader.exec_module = exec_module
        except AttributeError:  # a built-in one, that takes no attributes
            pass
        return spec


def _when_imported(name, knob, function):
    module = sys.modules.get(name)
    if module is None:
        _after[name] = knob, function
        if _AfterImport not in sys.meta_path:
            sys.meta_path.insert(0, _AfterImport)
    else:
        _guarded(knob, function, module)


def start():
    """The interpreter is up, and no line of the program has run."""
    if "torch" in sys.modules:
        return _limit("deterministic mode: the bridge came after the import of torch; generators were not seeded")
    if has("seeds"):
        _when_imported("random", "seeds", _seed_python)
        _when_imported("numpy.random", "seeds", _seed_numpy)
    if has("flash-attention"):
        for name in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
            _when_imported(name, "flash-attention", _ask_flash_attn)


# ---- PyTorch

def install(torch, late):
    """Right after torch's import. late: lines of the program may have run in between; what it set is left."""
    global _torch
    _torch = torch
    if has("seeds") and not late:
        _guarded("seeds", _seed_torch)
    if has("cudnn"):
        _guarded("cudnn", _set_cudnn)
    if has("torch-algorithms"):
        _guarded("torch-algorithms", _set_algorithms)
        if has("torch-fill"):
            _applied.append("torch-fill")
    if has("flash-attention"):
        _guarded("flash-attention", _watch_attention)
    if has("torch-kernels"):
        _guarded("torch-kernels", _install_kernels)


def _install_kernels():
    from . import kernels

    kernels.install(_torch, native)


def _set_cudnn():
    _torch.backends.cudnn.deterministic = True
    _torch.backends.cudnn.benchmark = False


_ours = False          # the mode of deterministic algorithms is the one that we have set
_program_fills = False  # it has said itself whether memory is filled


def _mode():
    return _torch.are_deterministic_algorithms_enabled(), _torch.is_deterministic_algorithms_warn_only_enabled()


def _set_mode(enabled, warn_only):
    # Not use_deterministic_algorithms(): it imports Inductor, which most programs never do.
    _torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_fill(fills):
    if hasattr(_torch._C, "_set_deterministic_fill_uninitialized_memory"):
        _torch._C._set_deterministic_fill_uninitialized_memory(fills)


def _set_algorithms():
    global _ours
    if _mode()[0]:
        return _program_says("deterministic algorithms were on before forkpoint came")
    _set_mode(True, True)
    _set_fill(has("torch-fill"))
    _ours = True
    _watch_calls()
    _listen()


def _watch_calls():
    """The program's own calls: afterwards the mode is what it says, with filling as if we had never been here."""
    for name in ("use_deterministic_algorithms", "set_deterministic_debug_mode"):
        setattr(_torch, name, _announced(getattr(_torch, name), name))
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
            _set_fill(True)  # as it is where nobody has said anything
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
        _limit("deterministic mode: set by the program itself: " + words)
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
                    _limit("not deterministic: " + (words % found.group(1) if "%s" in words else words))
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


# ---- Attention

def _ask_flash_attn(module):
    """flash_attn's functions take `deterministic`, which is False where the caller does not say."""
    import inspect

    for function in list(vars(module).values()):
        if not inspect.isfunction(function) or "deterministic" not in function.__code__.co_varnames:
            continue
        if function.__kwdefaults__ and function.__kwdefaults__.get("deterministic") is False:
            function.__kwdefaults__["deterministic"] = True
        defaults = list(function.__defaults__ or ())
        names = function.__code__.co_varnames[:function.__code__.co_argcount]
        for at, name in enumerate(names[len(names) - len(defaults):]):
            if name == "deterministic" and defaults[at] is False:
                defaults[at] = True
        function.__defaults__ = tuple(defaults) or None


_ATTENTION = ("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0",
              "ScaledDotProductCudnnAttentionBackward0")
_before_strict = None  # the mode that comes back when the op of attention is over
_strict_depth = 0      # ops of attention that are being enqueued
_strict_lock = threading.Lock()


def _watch_attention():
    """PyTorch's own attention is deterministic only where deterministic algorithms are on and do not merely warn. So they
    are, for as long as its forward and its backward take."""
    functional = _torch.nn.functional
    original = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def scaled_dot_product_attention(query, *args, **kwargs):
        if _torch.compiler.is_compiling() or not getattr(query, "is_cuda", False) or not _may_be_strict():
            return original(query, *args, **kwargs)
        if _strict_depth and _torch._C._current_graph_task_id() == -1:
            _forget_strict()
        strict = _begin_strict()
        try:
            out = original(query, *args, **kwargs)
        finally:
            if strict:
                _end_strict()
        node = _attention_node(getattr(out, "grad_fn", None))
        if node is not None and strict:
            node.register_prehook(_before_attention)
            node.register_hook(_after_attention)
        return out

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    if not has("torch-algorithms"):
        _set_fill(has("torch-fill"))


def _may_be_strict():
    """Else a matrix product would raise where the program did not ask for that."""
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8"):
        return True
    _limit("deterministic mode: attention of PyTorch is left as it is, since CUBLAS_WORKSPACE_CONFIG does not fit")
    return False


def _attention_node(node):
    for _ in range(4):  # padding and views lie behind it
        if node is None or node.name() in _ATTENTION:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _begin_strict():
    """Whether an _end_strict is due. The mode is the process's: backward passes of several devices may want it at once."""
    global _before_strict, _strict_depth
    with _strict_lock:
        if _strict_depth == 0:
            mode = _mode()
            if mode == (True, False):
                return False
            _before_strict = mode
            _set_mode(True, False)
        _strict_depth += 1
        return True


def _end_strict():
    global _strict_depth
    with _strict_lock:
        if _strict_depth > 0:
            _strict_depth -= 1
            if _strict_depth == 0:
                _set_mode(*_before_strict)


def _forget_strict():
    """No backward pass is running: one that raised has left the mode behind."""
    global _strict_depth
    with _strict_lock:
        if _strict_depth > 0:
            _strict_depth = 0
            _set_mode(*_before_strict)


def _before_attention(grads):
    _begin_strict()  # a hook that returns anything would be taken to replace the gradients


def _after_attention(grad_inputs, grad_outputs):
    _end_strict()


# ---- What the run says of it

def watch():
    """Once the bridge's own hooks are in."""
    from . import state, steps

    state.on_facts.append(tell)
    steps.on_step.append(_look)


def tell():
    """Before the first record: the header takes no facts after it."""
    global _told
    _told = True
    native.fact("deterministic.in_process", ",".join(dict.fromkeys(_applied)) or "none")
    if _own:
        native.fact("deterministic.set_by_program", "; ".join(_own))
    _look()
    for name, read in (("torch.matmul.allow_tf32", lambda: _torch.backends.cuda.matmul.allow_tf32),
                       ("torch.cudnn.allow_tf32", lambda: _torch.backends.cudnn.allow_tf32)):
        try:
            native.fact(name, str(read()))
        except Exception:  # the program has set it by another interface
            pass


def _look():
    """When a step begins: has the program changed what we have set?"""
    _forget_strict()
    cudnn = _torch.backends.cudnn
    if has("cudnn") and (not cudnn.deterministic or cudnn.benchmark):
        _limit("deterministic mode: set by the program itself: torch.backends.cudnn.deterministic = %s, benchmark = %s"
               % (cudnn.deterministic, cudnn.benchmark))
    if _ours:
        if _mode() != (True, True):
            _limit("deterministic mode: set by the program itself: deterministic algorithms %s, warn only %s" % _mode())
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
            _limit("not deterministic: Megatron's %s is %s: %s" % (name, getattr(args, name), advice))
