"""The deterministic kernels of the torch bridge on a GPU: right, equal bit by bit while the GPU is busy with other work, without
a warning, in CUDA graphs and compiled functions; and how fast.

Usage: torch_kernels.py BUILD [--bench-only | --no-bench] [--kinds uniform,zipf,one] [--json FILE]
Prints `pass|FAIL|skip NAME: ...` for each case, a line `bench torch_kernels ...` for each measurement, a list of operations that
still warn, and `N passed, N failed, N skipped`. Exit status 0, 1, or 77 where there is no GPU or no torch."""
import json
import os
import pathlib
import sys
import tempfile
import warnings

from torch_kernels_bench import bench, destinations, make_switchable

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "torch"))
COUNTS = {"pass": 0, "FAIL": 0, "skip": 0}


def say(verdict, name, words):
    COUNTS[verdict] += 1
    print(f"{verdict} {name}: {words}", flush=True)


def come_back_with_the_probe(build):
    library = pathlib.Path(build) / "libforkpoint.so"
    if not library.exists():
        print(f"skipped: {library} is not built")
        sys.exit(77)
    folder = tempfile.mkdtemp(prefix="forkpoint-kernels-")
    environment = dict(os.environ, LD_PRELOAD=str(library.resolve()), FORKPOINT_RUN=str(pathlib.Path(folder) / "run"),
                       FORKPOINT_LEVEL="step", FORKPOINT_KERNELS_TEST="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    environment.pop("FORKPOINT_DETERMINISTIC", None)  # the kernels are installed below, after torch's own were asked
    os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], environment)


# ---- Cases of tests/torch/kernel_cases.py

def tensors_of(result):
    import torch

    return [t.detach() for t in ([result] if isinstance(result, torch.Tensor) else result)]


class Stderr:
    """What is written there meanwhile: torch warns there when an operation was not called through Python."""

    def __enter__(self):
        sys.stderr.flush()
        self.file, self.kept = tempfile.TemporaryFile("w+", errors="replace"), os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *_):
        sys.stderr.flush()
        os.dup2(self.kept, 2)
        os.close(self.kept)
        self.file.seek(0)
        self.lines = self.file.read().splitlines()
        self.file.close()


def run(function, dtype):
    """(tensors or None where this dtype is not implemented, messages of warnings)"""
    stderr = Stderr()
    with stderr, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = tensors_of(function(dtype))
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for" not in str(error):
                raise
            result = None
    lines = [line.partition("Warning: ")[2] or line for line in stderr.lines]
    return result, [line for line in [str(w.message) for w in caught] + lines if "deterministic" in line]


class Busy:
    """Other streams at work, so that blocks are placed otherwise and finish in another order."""

    def __init__(self, torch):
        self.torch, self.streams = torch, [torch.cuda.Stream() for _ in range(3)]
        self.matrices = [torch.randn(1536, 1536, device="cuda") for _ in self.streams]

    def start(self, rounds):
        for stream, matrix in zip(self.streams, self.matrices):
            with self.torch.cuda.stream(stream):
                for _ in range(rounds):
                    self.torch.mm(matrix, matrix)


def same(one, other):
    """Bit by bit."""
    import torch

    def bits(tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in zip(one, other))


def off(ours, right, dtype):
    """Words where a result is not what double precision on the CPU gives; None: it is."""
    import torch

    epsilon = torch.finfo(dtype).eps
    allowed = {torch.float32: 60, torch.float64: 100}.get(dtype, 3) * epsilon
    for own, exact in zip(ours, right):
        own = own.cpu()
        if not own.dtype.is_floating_point:
            if not torch.equal(own, exact):
                return "integers differ"
            continue
        if not torch.equal(own.isnan(), exact.isnan()):
            return "other values are not a number"
        scale = float(exact.nan_to_num().abs().max()) + 1 if exact.numel() else 1
        error = float((own.double() - exact.double()).nan_to_num().abs().max()) / scale if exact.numel() else 0
        if error > allowed:
            return f"off by {error:.3g} of the largest value, {allowed:.3g} is allowed"
    return None


def check_cases(torch, kernels, install):
    import kernel_cases
    import kernel_window_cases  # noqa: F401

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of values for one place the last stays, where one thread writes them
    exact = [tensors_of(function(torch.float64)) for _, _, function in kernel_cases.CASES]
    torch.set_num_threads(threads)
    kernel_cases.DEVICE[0] = "cuda"
    torch.set_default_device("cuda")
    torchs = [[run(function, dtype) for dtype in dtypes] for _, _, function in kernel_cases.CASES]
    torch.set_default_device("cpu")
    install()
    torch.set_default_device("cuda")
    busy, warned = Busy(torch), {}
    for (operation, name, function), right, before in zip(kernel_cases.CASES, exact, torchs):
        troubles = []
        for dtype, (theirs, their_warnings) in zip(dtypes, before):
            if not theirs:
                continue
            trouble = check_case(torch, function, dtype, right, theirs, busy)
            for message in trouble[1]:
                warned.setdefault(message.split(". ")[0], set()).add(name)
            if trouble[0] and not (operation is None and not trouble[0].startswith("two runs")):
                troubles.append(f"{dtype}: {trouble[0]}")
            if operation is not None and trouble[1]:
                troubles.append(f"{dtype}: warns: {trouble[1][0][:120]}")
        say("FAIL" if troubles else "pass", name.replace(" ", "_").replace(":", ""),
            "; ".join(troubles) or "as in double, three times equal, no warning")
    torch.set_default_device("cpu")
    kernel_cases.DEVICE[0] = "cpu"
    if kernels._left:
        say("FAIL", "left_to_torch", "our own code failed in " + ", ".join(sorted(kernels._left)))
    if kernels.scatter_native() is None:
        say("FAIL", "native_kernels", "they were given up")
    else:
        say("pass", "native_kernels", "launched by the probe")
    print("operations that still warn:", "none" if not warned else "")
    for message, names in sorted(warned.items()):
        print("   ", message, "in", ", ".join(sorted(names)))


def check_case(torch, function, dtype, right, theirs, busy):
    ours, messages = run(function, dtype)
    if ours is None:
        return "torch's own kernel takes this dtype, ours does not", messages
    for own, other in zip(ours, theirs):
        if own.dtype != other.dtype or own.shape != other.shape or own.stride() != other.stride():
            lies, wanted = (f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in (own, other))
            return f"{lies}, torch's own: {wanted}", messages
    for rounds in (4, 20):
        busy.start(rounds)
        again, more = run(function, dtype)
        messages += more
        if not same(ours, again):
            return "two runs differ", messages
    torch.cuda.synchronize()
    return off(ours, right, dtype), messages


# ---- Larger sums

def check_large(torch, kernels):
    busy = Busy(torch)
    for kind in ("uniform", "zipf", "one"):
        for count, columns, rows, dtype in ((300000, 256, 5000, torch.float32), (200000, 100, 5000, torch.bfloat16),
                                            (100000, 7, 900, torch.float16), (1000000, 1, 5000, torch.float32),
                                            (70000, 33, 90, torch.float64)):
            index = destinations(torch, kind, count, rows)
            src = torch.randn(count, columns, device="cuda", dtype=torch.float32).to(dtype)
            # The sum of magnitudes bounds the rounding of any order.
            right, bound = torch.zeros(2, rows, columns, device="cuda", dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kernels.original("_index_put_impl_", "cuda")(right, [index], src.double(), True)
                kernels.original("_index_put_impl_", "cuda")(bound, [index], src.double().abs(), True)
            results = []
            for rounds in (0, 5, 30):
                busy.start(rounds)
                results.append(torch.zeros(rows, columns, device="cuda", dtype=dtype).index_add_(0, index, src))
            torch.cuda.synchronize()
            epsilon = torch.finfo(dtype).eps
            unit = 2.0**-52 if dtype == torch.float64 else 2.0**-24
            error = (results[0].double() - right).abs() - (epsilon * right.abs() + 500 * unit * bound)
            equal = all(same(results[:1], [other]) for other in results[1:])
            words = (f"{count} x {columns} {str(dtype)[6:]}, {'equal' if equal else 'NOT equal'} three times, largest excess "
                     f"{float(error.max()):.2g}")
            say("pass" if equal and float(error.max()) <= 1e-30 else "FAIL", f"large_{kind}_{columns}", words)


def check_every_way(torch):
    """Bit by bit the same, whichever way an index comes: the order of additions depends on places and destinations alone."""
    at, src = torch.randint(300, (20000,), device="cuda"), torch.randn(20000, 24, device="cuda")
    rows = torch.zeros(300, 24, device="cuda").index_add_(0, at, src)
    spread = at.unsqueeze(1).expand(-1, 24)
    ways = {"index_add of 32 bits": torch.zeros(300, 24, device="cuda").index_add_(0, at.int(), src),
            "scatter_add of a spread index": torch.zeros(300, 24, device="cuda").scatter_add_(0, spread, src),
            "scatter_add of a full index": torch.zeros(300, 24, device="cuda").scatter_add_(0, spread.contiguous(), src),
            "scatter_add into more columns": torch.zeros(300, 25, device="cuda").scatter_add_(0, spread, src)[:, :24],
            "scatter_add of every second": torch.zeros(300, 24, device="cuda").scatter_add_(
                0, torch.stack([spread, spread], 1).view(-1, 24)[::2], src),
            "index_put": torch.zeros(300, 24, device="cuda").index_put_((at - 300,), src, accumulate=True),
            "index_add along columns": torch.zeros(24, 300, device="cuda").index_add_(1, at, src.t()).t(),
            "embedding": torch.ops.aten.embedding_dense_backward(src, at, 300, -1, False)}
    wrong = [name for name, way in ways.items() if not torch.equal(rows, way)]
    words = "differ: " + ", ".join(wrong) if wrong else f"{len(ways)} ways, the same bits"
    say("FAIL" if wrong else "pass", "every_way", words)
    padded = torch.ops.aten.embedding_dense_backward(src, at, 300, 7, False)
    good = not padded[7].any() and torch.equal(padded[8:], rows[8:]) and torch.equal(padded[:7], rows[:7])
    say("pass" if good else "FAIL", "padding", "a row without a gradient, the others as before")


def check_out_of_range():
    """An error of the device, as torch's own kernels report it: in programs of their own, as the context is lost."""
    import subprocess

    program = ("import torch; out, src = torch.zeros(5, 8, device='cuda'), torch.ones(3, 8, device='cuda');"
               "at = torch.tensor([1, %s, 2], device='cuda'); %s; torch.cuda.synchronize(); print('no error')")
    calls = {"index_add_": "out.index_add_(0, at, src)", "index_put_": "out.index_put_((at,), src, accumulate=True)"}
    for name, call in calls.items():
        environment = dict(os.environ, FORKPOINT_DETERMINISTIC="torch-kernels", FORKPOINT_RUN=tempfile.mkdtemp() + "/run")
        done = subprocess.run([sys.executable, "-c", program % (5 if name != "index_put_" else -6, call)],
                              capture_output=True, text=True, env=environment)
        good = done.returncode != 0 and "device-side assert" in done.stderr
        good = good and "index out of range" in done.stdout + done.stderr
        say("pass" if good else "FAIL", "out_of_range_" + name, (done.stderr.strip().splitlines() or ["no error"])[-1][:100])


def check_shift(torch):
    """A destination's sum does not depend on what else is added."""
    src = torch.randn(70000, 96, device="cuda")
    alone = torch.zeros(50, 96, device="cuda").index_add_(0, torch.full((70000,), 7, device="cuda"), src)
    others = torch.cat([torch.randint(0, 7, (333,), device="cuda"), torch.full((70000,), 7, device="cuda"),
                        torch.randint(8, 50, (4001,), device="cuda")])
    more = torch.cat([torch.randn(333, 96, device="cuda"), src, torch.randn(4001, 96, device="cuda")])
    together = torch.zeros(50, 96, device="cuda").index_add_(0, others, more)
    say("pass" if torch.equal(alone[7], together[7]) else "FAIL", "independent_of_others", "with and without other rows")


# ---- Graphs, compiled functions, attention

def check_medians(torch):
    """Torch does not say which of equal values' indices comes: here always that which a stable sort puts into the middle."""
    busy, good = Busy(torch), True
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        self = torch.randint(4, (5000, 31), device="cuda").to(dtype)
        for rounds in (0, 5, 30):
            busy.start(rounds)
            found, places = self.median(1)
            good = good and torch.equal(self.gather(1, places.unsqueeze(1)).squeeze(1), found)
            good = good and torch.equal(places, self.cpu().sort(dim=1, stable=True).indices[:, 15].cuda())
    say("pass" if good else "FAIL", "medians_of_equal_values", "the index that a stable sort puts into the middle")


def check_graph(torch):
    index, src = torch.randint(40, (3000,), device="cuda"), torch.randn(3000, 64, device="cuda")
    weight = torch.randn(40, 64, device="cuda", requires_grad=True)

    def work(out):
        out.zero_().index_add_(0, index, src)
        loss = (torch.nn.functional.embedding(index, weight) * src).sum()
        return out, torch.autograd.grad(loss, weight)[0]

    eager = [t.clone() for t in work(torch.zeros(40, 64, device="cuda"))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(torch.zeros(40, 64, device="cuda"))
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(40, 64, device="cuda")
    with torch.cuda.graph(graph):
        captured = work(out)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    say("pass" if all(torch.equal(a, b) for a, b in zip(eager, captured)) else "FAIL", "cuda_graph", "replayed as eager")


def check_compiled(torch):
    try:
        import triton  # noqa: F401
    except ImportError:
        return say("skip", "compiled", "triton is not installed")
    index, src = torch.randint(40, (30000,), device="cuda"), torch.randn(30000, 64, device="cuda")
    weight = torch.randn(40, 64, device="cuda", requires_grad=True)

    def forward(index, src):
        return torch.zeros(40, 64, device="cuda").index_add(0, index, src) * 2

    def backward(index, src):
        return (torch.nn.functional.embedding(index, weight) * src).sum()

    eager = forward(index, src), torch.autograd.grad(backward(index, src), weight)[0]
    forward, backward = torch.compile(forward), torch.compile(backward)
    for _ in range(2):
        compiled = forward(index, src), torch.autograd.grad(backward(index, src), weight)[0]
        if not all(torch.equal(a, b) for a, b in zip(eager, compiled)):
            return say("FAIL", "compiled", "not as eager")
    say("pass", "compiled", "index_add and the gradient of an embedding, as eager")


def check_attention(torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend, dtype in ((SDPBackend.FLASH_ATTENTION, torch.bfloat16), (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
                           (SDPBackend.CUDNN_ATTENTION, torch.bfloat16)):
        q, k, v = (torch.randn(2, 8, 1500, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        results, messages = [], []
        try:
            for _ in range(4):
                with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
                    warnings.simplefilter("always")
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    results.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
                messages += [str(w.message) for w in caught if "deterministic" in str(w.message)]
        except RuntimeError as error:
            say("skip", f"attention_{backend.name}", str(error).splitlines()[0][:100])
            continue
        equal = all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
        words = f"{'equal' if equal else 'NOT equal'} four times{', warns: ' + messages[0][:90] if messages else ''}"
        say("pass" if equal and not messages else "FAIL", f"attention_{backend.name}", words)
    state = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    say("pass" if state == (True, True) else "FAIL", "attention_switch", f"deterministic algorithms, warn_only: {state}")


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    if "FORKPOINT_KERNELS_TEST" not in os.environ:
        come_back_with_the_probe(arguments[0])
    try:
        import torch
    except ImportError:
        print("skipped: this python has no torch")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        sys.exit(77)
    from _forkpoint_bridge import _native, kernels

    class Native:  # as if the knobs were set
        KNOBS = "torch-kernels,flash-attention"

        def __getattr__(self, name):
            return getattr(_native, name)

    make_switchable(kernels)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = []
    if "--bench-only" in arguments:
        kernels.install(torch, Native())
    else:
        check_cases(torch, kernels, lambda: kernels.install(torch, Native()))
        for check in (lambda: check_large(torch, kernels), lambda: check_shift(torch), lambda: check_medians(torch),
                      lambda: check_every_way(torch), check_out_of_range, lambda: check_graph(torch),
                      lambda: check_compiled(torch), lambda: check_attention(torch)):
            try:
                check()
            except Exception as error:  # the others are still worth running
                say("FAIL", "a_check", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    if "--no-bench" not in arguments:
        kinds = arguments[arguments.index("--kinds") + 1] if "--kinds" in arguments else "uniform,zipf,one"
        found = bench(torch, say, kinds.split(","))
    if "--json" in arguments:
        pathlib.Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(found, indent=1))
    print(f"{COUNTS['pass']} passed, {COUNTS['FAIL']} failed, {COUNTS['skip']} skipped")
    sys.exit(1 if COUNTS["FAIL"] else 0)


if __name__ == "__main__":
    main()
