"""Operations of torch that repeat bit by bit, in place of those that add in whatever order threads come.

kernels.install(torch, native) puts them under the autograd layer, at the dispatch key of CUDA. Autograd, autocast, torch.func
and CUDA graphs see the same operations as before; results have the dtype, shape, strides and aliasing that torch's own have.
What an operation of ours does not take (an integer dtype, a sparse layout, arguments that are wrong) goes to torch's kernel,
which is kept. None of them waits for the device, but for bincount, as torch's own does.

What keeps torch's own kernel, of which some say so by a warning: index_reduce with amin and amax, scatter of one value with a
reduction, the backward pass of segment_reduce, grid_sample with bicubic interpolation, histc over the range of its values,
operations on sparse, quantized, integer and complex tensors, and kernels that torch.compile generates: those call the
operations here where Inductor falls back to them, as it does for index_put and scatter where deterministic algorithms are on."""
import functools

import torch

TABLE = {}      # name of an operation with its overload -> our function, called with torch's and its arguments
DIRECT = {}     # name of an operation -> our function of its arguments for usual ones, or None where it does not take them
ORIGINALS = {}  # (name, dispatch key) -> torch's own kernel
_libraries = []  # what is installed lasts as long as these
_scatter_native = None
_left = set()     # operations that were left to torch's kernel once


def override(*names):
    """A function of (original, arguments as in the schema) that takes the place of these operations."""
    def put(function):
        for name in names:
            TABLE[name] = function
        return function

    return put


def direct(name):
    """A function of an operation's arguments that is asked before that of override()."""
    def put(function):
        DIRECT[name] = function
        return function

    return put


def original(name, device_type):
    """Torch's own kernel of an operation, for tensors of this device."""
    key = device_type.upper()
    kernel = ORIGINALS.get((name, key)) or torch.library.get_kernel("aten::" + name, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def scatter_native():
    """The probe's kernels; None: there are none, and torch's are put together instead."""
    return _scatter_native


def give_up_native(why):
    global _scatter_native
    native, _scatter_native = _scatter_native, None
    if native is not None:
        native.say("the deterministic kernels of forkpoint are not used: %s; torch's own take their place" % why)
        native.limit("deterministic kernels could not be launched: torch's own, slower ones took their place", why)


def _excluded():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return keys.add(torch._C.DispatchKey.AutocastCPU)


class _Torchs:
    """Torch's own kernel of one call, which remembers that an error is torch's."""

    __slots__ = ("kernel", "keys", "failed")

    def __init__(self, kernel, keys):
        self.kernel, self.keys, self.failed = kernel, keys, False

    def __call__(self, *arguments, **named):
        self.failed = True
        result = self.kernel.call_boxed(self.keys, *arguments, **named)
        self.failed = False
        return result


class Torn(RuntimeError):
    """A CUDA error between two kernels of one operation: what it writes is lost, and torch's kernel cannot be tried."""


def _placed(name, function, kernel, excluded):
    below_autograd = torch._C._AutoDispatchBelowAutograd
    without_autocast = torch._C._ExcludeDispatchKeyGuard
    without_modes = torch._C.DisableTorchFunction
    usual = DIRECT.get(name)

    def call(keys, *arguments, **named):
        if usual is not None:
            result = _try_usual(usual, without_modes, arguments, named)
            if result is not None:
                return result
        torchs = _Torchs(kernel, keys)
        try:
            # What we are made of is no business of the program's modes, and must not be cast.
            with below_autograd(), without_autocast(excluded), without_modes():
                return function(torchs, *arguments, **named)
        except Torn:
            raise
        except Exception as error:  # nothing is written before all is there: torch's takes over, for want of memory say
            if torchs.failed:
                raise
            _left_to_torch(name, error)
        return kernel.call_boxed(keys, *arguments, **named)

    return call


def _try_usual(usual, without_modes, arguments, named):
    try:
        with without_modes():  # allocates, and calls no other operation that could be recorded or cast
            return usual(*arguments, **named)
    except Torn:
        raise
    except Exception:  # nothing is written yet
        return None


def _left_to_torch(name, error):
    if name not in _left:
        _left.add(name)
        if _scatter_native is not None:
            words = "%s: %s: %s" % (name, type(error).__name__, str(error).partition("\n")[0][:120])
            _scatter_native.limit("a deterministic kernel failed, and torch's own was used", words)


def put_in_place(names, key):
    """Registers those of our operations at a dispatch key; names of those that this torch does not have."""
    import warnings

    library = torch.library.Library("aten", "IMPL")
    missing = []
    excluded = _excluded()
    with warnings.catch_warnings():  # torch says that a kernel is overridden
        warnings.simplefilter("ignore")
        for name in names:
            try:
                kernel = torch.library.get_kernel("aten::" + name, key)
                ORIGINALS[name, key] = kernel
                library.impl(name, _placed(name, TABLE[name], kernel, excluded), key, with_keyset=True, allow_override=True)
            except (RuntimeError, AttributeError):
                missing.append(name)
    _libraries.append(library)
    return missing


def install(torch, native):
    """Called once the import of torch is done; a second call does nothing."""
    global _scatter_native
    if _libraries or not torch.version.cuda:  # without CUDA nothing of what we replace can be reached
        return
    if not hasattr(torch.library, "get_kernel"):
        native.limit("deterministic kernels need torch 2.9 or newer: torch's own are used", torch.__version__)
        return
    # They fill TABLE and DIRECT.
    from . import kernel_attention, kernel_ctc, kernel_direct, kernel_grid, kernel_resize, kernel_sums  # noqa: F401

    names = list(TABLE)
    if "flash-attention" not in getattr(native, "KNOBS", "").split(","):
        names = [name for name in names if name not in kernel_attention.NAMES]  # what they cost is that knob's price
    if hasattr(native, "scatter"):
        _scatter_native = native
    missing = put_in_place(names, "CUDA")
    for name in missing:
        native.limit("an operation has no deterministic kernel of ours in this torch", name)
    native.fact("deterministic kernels", "%d operations of torch" % (len(names) - len(missing)))
    torch.cuda._lazy_call(_load)


def _load():
    # When torch has set CUDA up: a first call could come while a graph is captured. 201: no context is current yet.
    if _scatter_native is not None:
        error = _scatter_native.load_scatter()
        if error not in (0, 201):
            give_up_native("CUDA error %d at loading" % error)
