"""Jobs of several ranks on the host (gloo). All numbers are small integers or halves, so sums are exact in any order.

gloo_job.py KIND [--fault WHAT] [--steps N] ...: see the functions below. A fault strikes in step 1 on rank 1.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--fault", default="")
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()
STRUCK = 1


def struck(step, what):
    return options.fault == what and step == STRUCK and rank == 1


def model(width=8):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape).float())
    return layers


class ScaleNorm(nn.Module):
    """Without the division of a norm: exact."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


def batch(step, own=True):
    """own: other rows on each rank."""
    generator = torch.Generator().manual_seed(1 + step + (100 * rank if own else 0))
    return torch.randint(-2, 3, (4, 8), generator=generator).float()


def finish(step, loss, parameters):
    total = sum(p.detach().double().sum().item() for p in parameters)
    os.write(1, f"step {step} rank {rank} loss {loss.item():.17g} sum {total:.17g}\n".encode())  # whole, whoever else writes


def train_ddp(hook=None, layers=None, **how):
    """DistributedDataParallel. Faults: gradient (before the reduction), reduced (after it)."""
    wrapped = nn.parallel.DistributedDataParallel(model() if layers is None else layers, bucket_cap_mb=0.001, **how)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    now = [0]

    def alter(grad):
        return grad + 2.0 if struck(now[0], "gradient") else grad

    wrapped.module[2].weight.register_hook(alter)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in range(options.steps):
        now[0] = step
        loss = wrapped(batch(step)).sum()
        optimizer.zero_grad()
        loss.backward()
        if struck(step, "reduced"):
            wrapped.module[2].weight.grad[0, 0] += 2.0
        optimizer.step()
        finish(step, loss, wrapped.parameters())


def ddp():
    train_ddp()


def ddp_views():
    """Gradients that lie in the reducer's own buffers, and change there after the reduction."""
    train_ddp(gradient_as_bucket_view=True)


class Idle(nn.Linear):
    """Used by rank 0 in odd steps only, and by rank 1 never."""
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + super().forward(x) if rank == 0 and self.calls % 2 == 0 else x


def ddp_unused():
    """The reducer also reduces a map of the parameters that were used, by itself, and waits for it in C++ alone."""
    layers = model()
    layers.append(Idle(8, 8))
    with torch.no_grad():
        layers[3].weight.fill_(0.5)
        layers[3].bias.fill_(1)
    train_ddp(layers=layers, find_unused_parameters=True)


def ddp_unused_late():
    dist.Work.is_completed = lambda self: False
    ddp_unused()


def ddp_hook():
    """A communication hook that divides, starts an all-reduce and gives its future."""

    def hook(state, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

    train_ddp(hook)


def ddp_hook_divides_after():
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda future: future.value()[0].div_(dist.get_world_size()))

    train_ddp(hook)


def ddp_late():
    """Each Work says for ever that it has not ended: gloo fulfils the future first, and may be that late."""
    dist.Work.is_completed = lambda self: False
    train_ddp()


def ddp_hook_late():
    dist.Work.is_completed = lambda self: False
    ddp_hook()


def future_by_hand():
    """Somebody who is no reducer takes a future during the backward pass, and waits behind it."""
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    futures = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: futures.append(dist.all_reduce(p.grad, async_op=True).get_future()))
    for step in range(options.steps):
        loss = layers(batch(step)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.futures.wait_all(futures)
        futures.clear()
        optimizer.step()
        finish(step, loss, layers.parameters())


def by_hand():
    """Every collective that gloo has, called by hand. Faults: altered (the result of an all_reduce), sent (what rank 1 sends
    on)."""
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    pair = dist.new_group([0, 1], group_desc="pair")
    for step in range(options.steps):
        loss = layers(batch(step)).sum()
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in layers.parameters()]
        work = dist.all_reduce(grads[0], async_op=True)
        if struck(step, "altered"):  # before anybody who waits is told that it has ended
            work.get_future().then(lambda future: grads[0].view(-1)[:1].add_(2.0))
        work.wait()
        started = dist.all_reduce(grads[1], op=dist.ReduceOp.MAX, group=pair, async_op=True)
        started.wait()
        exchange(grads[2], pair, step)
        dist.broadcast(grads[3], src=1)
        optimizer.step()
        finish(step, loss, layers.parameters())


def exchange(grad, pair, step):
    parts = list(grad.flatten().chunk(world))
    gathered = [torch.empty_like(parts[0]) for _ in range(world)]
    dist.all_gather(gathered, parts[rank])
    whole = torch.empty(parts[0].numel() * world)
    dist.all_gather_into_tensor(whole, parts[0].clone())
    shard = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(shard, whole)
    swapped = torch.empty_like(whole)
    dist.all_to_all_single(swapped, whole)
    dist.reduce(shard, dst=0)
    dist.gather(shard, gathered if rank == 0 else None, dst=0)
    dist.scatter(shard, gathered if rank == 0 else None, src=0)
    dist.barrier()
    received = torch.zeros_like(shard)
    handed = shard + 2.0 if struck(step, "sent") else shard
    other = (rank + 1) % world
    calls = [dist.P2POp(dist.isend, handed, other), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    if rank == 0:
        dist.recv(received)
    elif rank == 1:
        dist.send(shard, 0)
    from torch.distributed import _functional_collectives as functional

    summed = functional.all_reduce(received, "sum", dist.group.WORLD)
    with torch.no_grad():
        grad.flatten()[: summed.numel()].copy_(summed * 0.5)


def fsdp2():
    """fully_shard; each rank has the same rows, so the mean of gradients is exact in a world of any size."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    layers = model(width=6)  # 12 x 6 and 6: cut unevenly by 4
    fully_shard(layers[0], mesh=mesh)
    fully_shard(layers[2], mesh=mesh)
    fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.5)
    for step in range(options.steps):
        loss = layers(batch(step, own=False)[:, :6].contiguous()).sum()
        optimizer.zero_grad()
        loss.backward()
        if struck(step, "gradient"):
            with torch.no_grad():
                layers[2].weight.grad._local_tensor[0, 0] += 2.0
        optimizer.step()
        finish(step, loss, [p._local_tensor for p in layers.parameters()])


def fsdp1(**how):
    """FullyShardedDataParallel, the older one: flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), **how)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.5)
    for step in range(options.steps):
        loss = layers(batch(step)).sum()
        optimizer.zero_grad()
        loss.backward()
        if struck(step, "gradient"):
            next(p.grad for p in layers.parameters() if p.grad is not None and p.numel())[0] += 2.0
        optimizer.step()
        finish(step, loss, layers.parameters())


def fsdp1_original():
    fsdp1(use_orig_params=True)


def tensor_parallel():
    """Two linear layers cut by columns and by rows, with a norm that is on every rank. In a world of one: plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = model()
    layers.insert(0, ScaleNorm(8))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        parallelize_module(layers, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.5)
    for step in range(options.steps):
        loss = layers(batch(step, own=False)).sum()
        optimizer.zero_grad()
        loss.backward()
        if struck(step, "norm"):
            layers[0].weight.grad[0] += 2.0
        optimizer.step()
        finish(step, loss, [layers[0].weight])


def killed():
    """Rank 1 is killed before it enters the all-reduce in which rank 0 waits."""
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    for step in range(options.steps):
        loss = layers(batch(step)).sum()
        optimizer.zero_grad()
        loss.backward()
        if step == STRUCK and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in layers.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        finish(step, loss, layers.parameters())


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=world)
globals()[options.kind]()
dist.destroy_process_group()
