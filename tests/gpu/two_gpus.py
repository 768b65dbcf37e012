#!/usr/bin/env python3
"""Two GPUs: NCCL's collectives and devices that use each other's memory, in C++, and parallel training in PyTorch.

Usage: two_gpus.py BUILD, and the options of tests/torch/case_runner.py.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch"))
import case_runner  # noqa: E402
import nccl_cases  # noqa: E402
import parallel_cases  # noqa: E402
import peer_cases  # noqa: E402

case_runner.main([*nccl_cases.all_cases(), *peer_cases.all_cases(), *parallel_cases.all_cases()])
