"""PyTorch's mode of deterministic algorithms, read and set without a word to the program."""
import torch


def mode():
    """(enabled, warns only)."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_mode(enabled, warn_only):
    # Not use_deterministic_algorithms(): it imports Inductor, which most programs never do.
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def set_fill(fills):
    if hasattr(torch._C, "_set_deterministic_fill_uninitialized_memory"):
        torch._C._set_deterministic_fill_uninitialized_memory(fills)
