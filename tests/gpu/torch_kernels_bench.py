"""How fast the deterministic kernels of the torch bridge are: for tests/gpu/torch_kernels.py, which runs it."""
import statistics
import time
import warnings

# At 2^20 rows of 1,024 floats; and never slower than torch's own deterministic kernel, anywhere.
MOST_OF_ATOMIC = 1.3


def destinations(torch, kind, count, rows):
    generator = torch.Generator(device="cuda").manual_seed(3)
    if kind == "one":
        return torch.full((count,), rows // 2, device="cuda")
    if kind == "uniform":
        return torch.randint(rows, (count,), device="cuda", generator=generator)
    # Zipf's law with exponent 1.1: some destinations get a tenth of all each, most of them one or none.
    weights = torch.arange(1, rows + 1, device="cuda", dtype=torch.float64) ** -1.1
    cumulated = weights.cumsum(0)
    draws = torch.rand(count, device="cuda", dtype=torch.float64, generator=generator) * cumulated[-1]
    return torch.searchsorted(cumulated, draws).clamp(max=rows - 1)


def milliseconds(torch, function):
    """Of the GPU: it is kept busy until all is enqueued."""
    torch.cuda._sleep(2_000_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def medians(torch, arms, rounds):
    """Arms take turns, so that clocks and heat are the same for all. Each is run twice before."""
    times = {name: [] for name in arms}
    for turn in range(rounds + 2):
        for name, function in arms.items():
            took = milliseconds(torch, function)
            if turn >= 2:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def host_microseconds(torch, function):
    rounds = []
    for _ in range(5):  # the host does other things too
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        begin = time.perf_counter()
        for _ in range(20):
            function()
        rounds.append((time.perf_counter() - begin) / 20 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds)


TORCHS = [False]  # operations go to torch's kernels, those too that they call themselves


def make_switchable(kernels):
    """To be called before the installation."""
    from _forkpoint_bridge import kernel_attention, kernel_ctc, kernel_direct, kernel_grid  # noqa: F401
    from _forkpoint_bridge import kernel_resize, kernel_sums  # noqa: F401

    def switching(function):
        return lambda torchs, *a, **n: torchs(*a, **n) if TORCHS[0] else function(torchs, *a, **n)

    for name, function in kernels.TABLE.items():
        kernels.TABLE[name] = switching(function)
    for name, function in kernels.DIRECT.items():
        kernels.DIRECT[name] = lambda *a, function=function, **n: None if TORCHS[0] else function(*a, **n)


def with_mode(torch, deterministic, torchs, function):
    def call():
        TORCHS[0] = torchs
        torch._C._set_deterministic_algorithms(deterministic, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function()
        finally:
            TORCHS[0] = False
            torch._C._set_deterministic_algorithms(True, warn_only=True)

    return call


def arms_of(torch, operation, index, src, rows):
    columns = src.shape[1]
    out = torch.zeros(rows, columns, device="cuda", dtype=src.dtype)
    spread = index.unsqueeze(1).expand(-1, columns) if index.dim() == 1 else index
    call = {"index_add_": lambda: out.index_add_(0, index, src), "scatter_add_": lambda: out.scatter_add_(0, spread, src),
            "scatter_add_ of elements": lambda: out.scatter_add_(0, spread, src),
            "embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(src, index, rows, -1, False)}[operation]
    return {"ours": with_mode(torch, True, False, call), "atomic": with_mode(torch, False, True, call),
            "torch_deterministic": with_mode(torch, True, True, call)}


def bench_sort(torch, count, rows):
    """Of an index of rows: the sort before the sums, and torch's own."""
    from _forkpoint_bridge import kernel_scatter

    kept, kernel_scatter.MOST_OF_OUR_SORT = kernel_scatter.MOST_OF_OUR_SORT, kernel_scatter.MOST_KEYS
    index = destinations(torch, "uniform", count, rows)
    took = medians(torch, {"ours": lambda: kernel_scatter.by_destination(index, rows),
                           "torchs": lambda: torch.sort(index.to(torch.int32), stable=True)}, 15)
    kernel_scatter.MOST_OF_OUR_SORT = kept
    print(f"bench torch_kernels sort of {count} places by {rows} rows: {took['ours'] * 1e3:.0f} us, "
          f"torch's {took['torchs'] * 1e3:.0f} us", flush=True)


def bench_elements(torch, say):
    """Of an index that names a row for each element, nothing is to be seen from outside: all elements are sorted."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for count, columns, rows in ((100000, 128, 50000), (2000, 64, 500)):
            src = torch.randn(count, columns, device="cuda", dtype=dtype)
            index = torch.randint(rows, (count, columns), device="cuda")
            took = medians(torch, arms_of(torch, "scatter_add_ of elements", index, src, rows), 9)
            found.append(report("scatter_add_ of elements", "uniform", count, columns, rows, str(dtype)[6:], took,
                                src.element_size(), say))
    return found


def bench(torch, say, kinds):
    found = bench_elements(torch, say)
    for count, rows in ((4096, 1000), (100000, 50000), (1 << 20, 100000), (1 << 22, 1 << 20), (12800000, 6400000)):
        bench_sort(torch, count, rows)
    for count, columns, rows in ((1 << 20, 1024, 100000), (100000, 512, 50000)):
        for dtype in (torch.float32, torch.bfloat16):
            src = torch.randn(count, columns, device="cuda", dtype=dtype)
            for kind in kinds:
                index = destinations(torch, kind, count, rows)
                for operation in ("index_add_", "scatter_add_", "embedding_dense_backward"):
                    arms = arms_of(torch, operation, index, src, rows)
                    slow = "torch_deterministic" if milliseconds(torch, arms["torch_deterministic"]) > 400 else None
                    took = medians(torch, {n: f for n, f in arms.items() if n != slow}, 15)
                    if slow:  # torch's takes seconds where all goes to one row
                        took[slow] = min(milliseconds(torch, arms[slow]) for _ in range(2))
                    found.append(report(operation, kind, count, columns, rows, str(dtype)[6:], took, src.element_size(), say))
                    if kind == "uniform":
                        host = {n: host_microseconds(torch, arms[n]) for n in ("ours", "atomic")}
                        found[-1].update({f"{n}_host_us": round(value, 1) for n, value in host.items()})
                        print(f"bench torch_kernels enqueueing {operation} {count}x{columns}: ours {host['ours']:.0f} us of the "
                              f"host, torch's {host['atomic']:.0f} us", flush=True)
            del src
            torch.cuda.empty_cache()
    return found


def report(operation, kind, count, columns, rows, dtype, took, element_bytes, say):
    to_atomic, to_torch = took["ours"] / took["atomic"], took["ours"] / took["torch_deterministic"]
    row = {"operation": operation, "index": kind, "rows": count, "columns": columns, "destinations": rows, "dtype": dtype,
           **{f"{name}_ms": round(value, 4) for name, value in took.items()}, "to_atomic": round(to_atomic, 3),
           "to_torch_deterministic": round(to_torch, 3), "read_gb_s": round(count * columns * element_bytes / took["ours"] / 1e6)}
    print(f"bench torch_kernels {operation} {count}x{columns} to {rows} {kind} {dtype}: ours {took['ours']:.3f} ms "
          f"({row['read_gb_s']} GB/s of source), atomic {took['atomic']:.3f} ms, torch deterministic {took['torch_deterministic']:.3f} ms; "
          f"ratio to atomic {to_atomic:.2f}, to torch deterministic {to_torch:.2f}", flush=True)
    bound = count == 1 << 20 and dtype == "float32" and operation != "embedding_dense_backward"  # torch's own sorts there
    goal = to_torch <= 1.0 and (not bound or to_atomic <= MOST_OF_ATOMIC)
    say("pass" if goal else "FAIL", f"speed_{operation.replace(' ', '_')}_{count}x{columns}_{kind}_{dtype}",
        f"{to_atomic:.2f} of atomic, {to_torch:.2f} of torch deterministic")
    return row
