"""Megatron's distributed checkpoints: DIR/iter_0000100 and, when it is whole, DIR/latest_checkpointed_iteration.txt."""

import pathlib
import random

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

TRACKER = "latest_checkpointed_iteration.txt"


def folder_of(directory, iteration):
    return pathlib.Path(directory) / f"iter_{iteration:07d}"


def generators():
    """Each rank's own: tensor-parallel ranks draw other numbers, data-parallel ones too where dropout is not shared."""
    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    places = [(parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
              (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
              (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())]
    return ShardedObject("rng_state", state, tuple(size for _, size in places), tuple(place for place, _ in places))


def restore_generators(state):
    random.setstate(state["random"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def metadata(args):
    sharding = "fully_reshardable" if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"
    return {"distrib_optim_sharding_type": sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
            "distrib_optim_fully_reshardable_mem_efficient": False}


def state_of(args, model, optimizer, scheduler, reader, iteration, loading=False):
    words = metadata(args)
    weights = model.sharded_state_dict(metadata=words)
    return {
        "iteration": iteration,
        "consumed_train_samples": reader.consumed,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=words),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": generators(),
    }


def save(args, model, optimizer, scheduler, reader, iteration):
    folder = folder_of(args.save, iteration)
    if args.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = state_of(args, model, optimizer, scheduler, reader, iteration)
    dist_checkpointing.save(state, str(folder), content_metadata=metadata(args))
    torch.distributed.barrier()
    if args.rank == 0:
        (pathlib.Path(args.save) / TRACKER).write_text(str(iteration))
    torch.distributed.barrier()


def load(args, model, optimizer, scheduler, reader, fault):
    """The number of iterations that were made; 0 where --load holds no checkpoint, as in a first start."""
    iteration = args.ckpt_step
    if iteration is None:
        tracker = pathlib.Path(args.load) / TRACKER
        if not tracker.exists():
            return 0
        iteration = int(tracker.read_text())
    make_states(optimizer)
    state = state_of(args, model, optimizer, scheduler, reader, iteration, loading=True)
    state = dist_checkpointing.load(state, str(folder_of(args.load, iteration)))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    restore_counts(optimizer)
    scheduler.load_state_dict(state["opt_param_scheduler"])
    if fault.kind != "lost-position":
        reader.consumed = state["consumed_train_samples"]
    if fault.kind != "lost-rng":
        restore_generators(state["rng_state"])
    if fault.kind == "lost-momentum":
        lose_momentum(optimizer)
    return state["iteration"]


def parts_of(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])


def make_states(optimizer):
    """The distributed optimizer around torch's Adam (without Transformer Engine and apex) loads only into states that there
    are. Megatron's own way to make them is a step on gradients of zero, which the checkpoint then overwrites."""
    for part in parts_of(optimizer):
        if hasattr(part, "_init_optimizer_states_with_dummy_values") and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


def restore_counts(optimizer):
    """With torch's Adam, what Megatron Core 0.19 loads leaves one tensor as the count of steps of all parameters, to which
    each of them would add, and the distributed optimizer's holds the count of make_states. The groups have the right one."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            states = [part.optimizer.state[parameter] for parameter in group["params"]]
            if any(torch.is_tensor(state.get("step")) for state in states):
                count = group.pop("step", None)
                for state in states:
                    state["step"] = torch.tensor(float(state["step"] if count is None else count))


def lose_momentum(optimizer):
    for part in parts_of(optimizer):
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
