"""The command line, in the words of Megatron's own training script where it has one, and what --deterministic-mode asks."""

import argparse
import os
import pathlib

TEXT = pathlib.Path(__file__).resolve().parents[1] / "minigpt" / "text.txt"

# What --deterministic-mode wants of the environment: the value that is set where there is none, and those that are accepted.
WANTED = {
    "NCCL_ALGO": ("Ring", {"Ring", "CollnetDirect", "CollnetChain", "^NVLS"}),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", {"0"}),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", {":4096:8", ":16:8"}),
}


def add_sizes(parser):
    group = parser.add_argument_group("model and batch")
    group.add_argument("--num-layers", type=int, default=4)
    group.add_argument("--hidden-size", type=int, default=256)
    group.add_argument("--num-attention-heads", type=int, default=8)
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--micro-batch-size", type=int, default=4)
    group.add_argument("--global-batch-size", type=int, default=16)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--position-embedding-type", choices=("learned_absolute", "rope"), default="learned_absolute")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--recompute", action="store_true", help="compute each layer's activations again in the backward pass")


def add_parallel(parser):
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tp", "--tensor-model-parallel-size", dest="tp", type=int, default=1)
    group.add_argument("--pp", "--pipeline-model-parallel-size", dest="pp", type=int, default=1)
    group.add_argument("--dp", type=int, help="checked only: what the ranks are left for")
    group.add_argument("--sequence-parallel", action="store_true", help="norms and dropout cut along the sequence, over --tp")
    group.add_argument("--distributed-optimizer", "--use-distributed-optimizer", dest="distributed_optimizer",
                       action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--overlap-param-gather", action="store_true", help="wants --distributed-optimizer")


def add_training(parser):
    group = parser.add_argument_group("training")
    group.add_argument("--train-iters", type=int, default=20)
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=1e-4)
    group.add_argument("--lr-warmup-iters", type=int, default=4)
    group.add_argument("--lr-decay-iters", type=int, default=1000, help="not bound to --train-iters: a prefix is the same")
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp8", choices=("hybrid", "e4m3"), help="wants --transformer-impl transformer_engine")
    group.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--data-path", default=str(TEXT), help="a file that is learnt byte by byte")
    group.add_argument("--deterministic-mode", action="store_true")
    group.add_argument("--use-gpu-initialization", action="store_true",
                       help="draw weights on the GPU: others for each --tp; without it they are drawn whole, then cut")


def add_checkpoints(parser):
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR")
    group.add_argument("--save-interval", type=int, metavar="N")
    group.add_argument("--load", metavar="DIR")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="of --load; else what its tracker file names")
    group.add_argument("--dist-ckpt-optim-fully-reshardable", action="store_true",
                       help="the distributed optimizer's state by parameter: loads with another --tp and --pp")
    group.add_argument("--fault", metavar="KIND@NAME=VALUE,...", help="see faults.py")


def parse(words=None):
    parser = argparse.ArgumentParser(description="Trains a small GPT on bytes with Megatron Core.")
    for add in (add_sizes, add_parallel, add_training, add_checkpoints):
        add(parser)
    args = parser.parse_args(words)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.rank = int(os.environ.get("RANK", "0"))
    data_parallel, rest = divmod(args.world_size, args.tp * args.pp)
    if rest or data_parallel == 0:
        parser.error(f"{args.world_size} ranks are no multiple of --tp {args.tp} times --pp {args.pp}")
    if args.dp is not None and args.dp != data_parallel:
        parser.error(f"{args.world_size} ranks make --dp {data_parallel}, not {args.dp}")
    args.dp = data_parallel
    args.microbatches, rest = divmod(args.global_batch_size, args.micro_batch_size * args.dp)
    if rest or args.microbatches == 0:
        parser.error(f"--global-batch-size is no multiple of --micro-batch-size times {args.dp} data-parallel ranks")
    if args.num_layers % args.pp:
        parser.error("--num-layers is no multiple of --pp")
    if args.overlap_param_gather and not (args.distributed_optimizer and args.overlap_grad_reduce):
        parser.error("--overlap-param-gather wants --distributed-optimizer and --overlap-grad-reduce")
    if args.fp8 and args.transformer_impl != "transformer_engine":
        parser.error("--fp8 wants --transformer-impl transformer_engine")
    if args.save_interval and not args.save:
        parser.error("--save-interval wants --save")
    if args.sequence_parallel and args.tp == 1:
        args.sequence_parallel = False
    if args.deterministic_mode:
        be_deterministic(parser)
    return args


def be_deterministic(parser):
    """Before CUDA and NCCL read their environment."""
    for name, (value, accepted) in WANTED.items():
        if os.environ.setdefault(name, value) not in accepted:
            parser.error(f"--deterministic-mode: {name}={os.environ[name]}, wanted is one of {', '.join(sorted(accepted))}")
    import torch

    torch.use_deterministic_algorithms(True)
