"""Rank RANK of two: all-reduces by torch, in CUDA graphs and beside their replays, each against the sum in rank order.

The communicator's kernels follow each other whatever stream or graph they come from: two graphs are replayed on streams
of their own, with calls between them. Prints "right", or what differs; run under the probe by collective_cases.py.
"""

import os
import sys

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
store = dist.FileStore(os.environ["NCCL_PROGRAM_MEETING"] + ".store", 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)

SIZES = (1_000, 300_001, 3_000_000)  # both protocols, and one that does not lie well
inputs = [torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + i)).bfloat16().cuda()
          for i, size in enumerate(SIZES)]
sums = []
for tensor in inputs:
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    sums.append(parts[0] + parts[1])


def reduce(outputs):
    for tensor, output in zip(inputs, outputs):
        output.copy_(tensor)
        dist.all_reduce(output)


def make_graph():
    outputs = [torch.zeros_like(tensor) for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce(outputs)
    return graph, outputs


eager = [torch.zeros_like(tensor) for tensor in inputs]
reduce(eager)  # the communicator is made before a capture
torch.cuda.synchronize()
graphs = [make_graph() for _ in range(2)]
streams = [torch.cuda.Stream() for _ in graphs]
for stream in streams:
    stream.wait_stream(torch.cuda.current_stream())
for _ in range(20):
    for stream, (graph, outputs) in zip(streams, graphs):
        with torch.cuda.stream(stream):
            graph.replay()
        reduce(eager)
torch.cuda.synchronize()
wrong = [name for name, outputs in (("eager", eager), ("graph 1", graphs[0][1]), ("graph 2", graphs[1][1]))
         for found, sum in zip(outputs, sums) if not torch.equal(found.view(torch.int16), sum.view(torch.int16))]
print(f"rank {rank}: {', '.join(wrong) + ' WRONG' if wrong else 'right'}", flush=True)
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
