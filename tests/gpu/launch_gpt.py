#!/usr/bin/env python3
"""The program that the overhead benches time: a GPT in bf16, 8 layers and 4,096 tokens a step unless told otherwise. Knows
nothing of forkpoint.

Usage: launch_gpt.py eager|graph BLOCKS [--width N] [--layers N] [--batch N]
       launch_gpt.py each STEPS [--empty-hooks]     The device is waited for behind each step. --empty-hooks: in each second one.
       launch_gpt.py debug_mode|md5_hooks|msprobe|growth STEPS     The last line of its output is JSON.
"""

import argparse
import gc
import hashlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch" / "programs"))
from model import GPT, mlp, token_batches  # noqa: E402

BLOCK = 10  # steps between two waits for the device
VOCABULARY, LENGTH = 8192, 512


def nothing(*_):
    return None


def install_empty_hooks(parameters):
    """Hooks that do nothing, in the places that torch has for looking at a training: what these cost comes before
    anything that a tool can do in them. Gives the handles that remove them."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    def after(_, args, output):
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(nothing)  # grad_output
            output.grad_fn.register_hook(nothing)     # grad_input

    return [module.register_module_forward_pre_hook(nothing), module.register_module_forward_hook(after),
            optimizer.register_optimizer_step_pre_hook(nothing), optimizer.register_optimizer_step_post_hook(nothing),
            *(parameter.register_post_accumulate_grad_hook(nothing) for parameter in parameters)]


class Training:
    def __init__(self, capturable=False):
        torch.manual_seed(0)
        size = {"width": options.width, "heads": options.width // 64, "layers": options.layers}
        self.model = GPT(VOCABULARY, LENGTH, **size).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, capturable=capturable)
        self.tokens, self.targets = (part.cuda() for part in next(token_batches(VOCABULARY, options.batch, LENGTH)))
        self.loss = None

    def step(self):
        self.loss = self.model(self.tokens, self.targets)
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()


def marked(step):
    torch.cuda.nvtx.range_push("step")
    step()
    torch.cuda.nvtx.range_pop()


def milliseconds(step, blocks):
    """Of a step, block by block; the device is waited for before and after each."""
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BLOCK):
            marked(step)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin) / BLOCK)
    return times


def host_milliseconds(step, count=10):
    """Until the host has asked for a step whose predecessor is done: the device does not hold it up."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        marked(step)
        times.append(1000 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def time_steps(step, blocks):
    milliseconds(step, 1)  # warm-up
    return {"block_ms": milliseconds(step, blocks), "host_ms": host_milliseconds(step)}


def run_eager(blocks):
    training = Training()
    return time_steps(training.step, blocks) | {"loss": training.loss.item()}


def run_each(steps):
    """Milliseconds of every step, from an idle device to an idle device."""
    training, times = Training(), []
    for step in range(steps):
        hooks = install_empty_hooks(training.model.parameters()) if options.empty_hooks and step % 2 else []
        torch.cuda.synchronize()
        begin = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
        for hook in hooks:
            hook.remove()
    return {"step_ms": times, "loss": training.loss.item()}


def captured(step, optimizer):
    """A graph of one step, after the warm-up on a stream of its own that captures ask for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def run_graph(blocks):
    training = Training(capturable=True)
    graph = captured(training.step, training.optimizer)
    return time_steps(graph.replay, blocks) | {"loss": training.loss.item()}


def run_debug_mode(steps):
    training = Training()
    plain = time_steps(training.step, 2)["block_ms"]
    try:
        from torch.utils._debug_mode import DebugMode

        hashes = DebugMode.log_tensor_hashes
    except (ImportError, AttributeError) as missing:
        return {"missing": str(missing)}
    times = []
    for _ in range(steps):
        with DebugMode() as mode, hashes(hash_fn="hash_tensor"):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            training.step()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin))
            operators = len(mode.operators)
    return {"plain_ms": statistics.median(plain), "debug_ms": statistics.median(times), "operators": operators}


def each_tensor(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from each_tensor(part)


def md5_of(tensor):
    return hashlib.md5(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def run_md5_hooks(steps):
    """What people write by hand: the MD5 of each module's output and of its gradient, on the host."""
    training = Training()
    plain = time_steps(training.step, 2)["block_ms"]
    digests = []
    for module in training.model.modules():
        module.register_forward_hook(lambda _, args, output: digests.extend(map(md5_of, each_tensor((args, output)))))
        module.register_full_backward_hook(
            lambda _, inputs, outputs: digests.extend(md5_of(t) for t in each_tensor((inputs, outputs)))
        )
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        training.step()
        digests.extend(map(md5_of, training.model.parameters()))
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return {"plain_ms": statistics.median(plain), "debug_ms": statistics.median(times), "operators": len(digests) // steps}


def run_msprobe(steps):
    """msprobe (PyPI: mindstudio-probe): modules forward and backward (L0), and its "md5", a CRC-32 on the host."""
    try:
        from msprobe.pytorch import PrecisionDebugger
    except ImportError as missing:
        return {"missing": str(missing)}
    training = Training()
    plain = time_steps(training.step, 2)["block_ms"]
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        statistics_of = {"scope": [], "list": [], "tensor_list": [], "data_mode": ["all"], "summary_mode": "md5"}
        wanted = {"task": "statistics", "level": "L0", "dump_path": f"{folder}/dump", "rank": [], "step": []}
        config.write_text(json.dumps(wanted | {"async_dump": False, "extra_info": True, "statistics": statistics_of}))
        debugger = PrecisionDebugger(config_path=str(config))
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            debugger.start(training.model)
            training.step()
            debugger.stop()
            debugger.step()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin))
        dumps = list(pathlib.Path(folder).glob("dump/step1/*/dump.json"))
        hashes = dumps[0].read_text().count('"md5"') if dumps else 0
    return {"plain_ms": statistics.median(plain), "debug_ms": statistics.median(times), "operators": hashes}


def memory_in_use():
    """Bytes of this process on the host, and of the whole device: nobody else may use it meanwhile."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(1)  # threads that write behind have caught up
    with open("/proc/self/statm") as statm:
        host = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info()
    return {"host": host, "device": total - free}


def run_growth(steps):
    torch.manual_seed(0)
    eager, replayed = mlp().cuda(), mlp().cuda()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True) for model in (eager, replayed)]
    inputs = torch.randn(256, 256, device="cuda")

    def train(which):
        model, optimizer = (eager, replayed)[which], optimizers[which]
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    graph = captured(lambda: train(1), optimizers[1])
    early = None
    for step in range(steps):
        marked(lambda: (train(0).item(), graph.replay()))
        if step + 1 == steps // 10:
            early = memory_in_use()
    return {"early": early, "late": memory_in_use(), "steps": steps - steps // 10}


MODES = {"eager": run_eager, "each": run_each, "graph": run_graph, "debug_mode": run_debug_mode, "md5_hooks": run_md5_hooks,
         "msprobe": run_msprobe, "growth": run_growth}
parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=MODES)
parser.add_argument("count", type=int)
for name, number in (("--width", 1024), ("--layers", 8), ("--batch", 8)):
    parser.add_argument(name, type=int, default=number)
parser.add_argument("--empty-hooks", action="store_true")
options = parser.parse_args()
print(json.dumps(MODES[options.mode](options.count)))
