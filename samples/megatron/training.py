"""Sets up model, optimizer and data, and trains; see train_gpt.py."""

import logging
import os
import random
from functools import partial

import arguments
import checkpoint
import numpy
import torch
import torch.nn.functional as functional
from data import Bytes, Reader
from faults import Fault
from layers import layers_of
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module


def initialize(args):
    local_rank = int(os.environ.get("LOCAL_RANK", args.rank))
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl", rank=args.rank, world_size=args.world_size)
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    # Stages draw other weights; data-parallel ranks the same.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def model_config(args):
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=4 * args.hidden_size,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        gated_linear_unit=args.swiglu,
        activation_func=functional.silu if args.swiglu else functional.gelu,
        add_bias_linear=not args.swiglu,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        sequence_parallel=args.sequence_parallel,
        use_cpu_initialization=not args.use_gpu_initialization,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        bf16=args.bf16,
        fp8=args.fp8,
        deterministic_mode=args.deterministic_mode,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
        deallocate_pipeline_outputs=args.pp > 1,
        cross_entropy_loss_fusion=False,
        masked_softmax_fusion=False,  # its kernels are apex's
        bias_dropout_fusion=False,  # compiled, these would be one module each without ops inside
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return config


def build_model(args, config):
    model = GPTModel(
        config,
        layers_of(args, config),
        vocab_size=Bytes.VOCABULARY,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    ).cuda()
    wrapped = Float16Module(config, model) if args.bf16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.distributed_optimizer,
        bucket_size=max(40_000, args.hidden_size**2) if args.overlap_grad_reduce else None,
    )
    ddp = DistributedDataParallel(config, ddp_config, wrapped)
    ddp.broadcast_params()
    return model, ddp


def build_optimizer(args, config, ddp):
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        [ddp],
    )
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr, lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.lr_decay_iters * args.global_batch_size, lr_decay_style="cosine", start_wd=args.weight_decay,
        end_wd=args.weight_decay, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = ddp.no_sync, ddp.start_grad_sync
    if args.overlap_param_gather:
        config.param_sync_func = ddp.start_param_sync
    return optimizer, scheduler


def mean_loss(losses):
    """What Megatron calls of the last stage's output: (what is differentiated, what is reported)."""
    loss = losses.float().mean()
    reported = loss.detach().clone()
    torch.distributed.all_reduce(reported, group=parallel_state.get_data_parallel_group())
    return loss, reported / parallel_state.get_data_parallel_world_size()


def forward_step(args, batches, model):
    tokens, labels = next(batches)
    positions = torch.arange(args.seq_length, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), mean_loss


def train_step(args, ddp, optimizer, scheduler, reader, fault, step):
    """(mean loss on the last stage, else None; norm of the gradients)."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    fault.before(step, optimizer)
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward_step, args),
        data_iterator=reader.microbatches(),
        model=[ddp],
        num_microbatches=args.microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    fault.before_optimizer(step)
    _, norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    reader.iteration_ended()
    return (sum(losses) / len(losses)).item() if losses else None, norm


def train(args, config):
    model, ddp = build_model(args, config)
    optimizer, scheduler = build_optimizer(args, config, ddp)
    reader = Reader(Bytes(args.data_path, args.seq_length, args.seed), args, parallel_state.get_data_parallel_rank())
    fault = Fault(args.fault, args.rank)
    fault.install(model)
    first = 0
    if args.load:
        first = checkpoint.load(args, model, optimizer, scheduler, reader, fault)
    reports = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
    for step in range(first, args.train_iters):
        loss, norm = train_step(args, ddp, optimizer, scheduler, reader, fault, step)
        if loss is not None and reports:
            print(f"step {step} loss {loss:.9g} grad_norm {norm:.9g}", flush=True)
        if args.save and args.save_interval and (step + 1) % args.save_interval == 0:
            checkpoint.save(args, model, optimizer, scheduler, reader, step + 1)


def main():
    logging.basicConfig(level=logging.WARNING)
    options = arguments.parse()
    initialize(options)
    train(options, model_config(options))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
