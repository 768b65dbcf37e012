#!/usr/bin/env python3
"""A GPT trained with Megatron Core: tensor, sequence, pipeline and data parallel, distributed optimizer and checkpoints.

    torchrun --nproc-per-node 2 samples/megatron/train_gpt.py --tp 2 --sequence-parallel --bf16 --train-iters 20

README.md says more. Each iteration prints `step N loss X grad_norm Y` once, steps counted from 0.
"""

if __name__ == "__main__":  # a process that Megatron's checkpoints start imports this file, and needs nothing of it
    import training

    training.main()
