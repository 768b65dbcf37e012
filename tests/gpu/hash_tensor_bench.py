#!/usr/bin/env python3
"""The device digest against torch.hash_tensor (an XOR of the elements, without statistics), at the same sizes.

Usage: hash_tensor_bench.py BUILD     Skipped (status 77) without torch.hash_tensor or a device.
"""
import re
import statistics
import subprocess
import sys

SIZES = {"256MiB": 1 << 28, "4GiB": 1 << 32}


def digest_rates(build):
    """GB/s of the digest by figure, from device_digest_bench."""
    rates = {}
    for size in SIZES:
        output = subprocess.run([f"{build}/bench/device_digest_bench", "_" + size], capture_output=True, text=True,
                                check=True).stdout
        for name, rate in re.findall(r"^rate digest_gpu_(\w+): digest (\d+) GB/s", output, re.M):
            rates[name] = float(rate)
    return rates


def hash_tensor_rate(torch, dtype, size_bytes):
    tensor = torch.randn(size_bytes // dtype.itemsize, device="cuda", dtype=dtype)
    times = []
    for sample in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            torch.hash_tensor(tensor)
        end.record()
        end.synchronize()
        if sample >= 2:
            times.append(begin.elapsed_time(end) / 10)
    return size_bytes / statistics.median(times) / 1e6


def main():
    try:
        import torch
    except ImportError:
        print("skipped: no torch here")
        return 77
    if not torch.cuda.is_available() or not hasattr(torch, "hash_tensor"):
        print("skipped: needs a CUDA device and torch.hash_tensor")
        return 77
    rates = digest_rates(sys.argv[1])
    for name, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items():
        for size, size_bytes in SIZES.items():
            other = hash_tensor_rate(torch, dtype, size_bytes)
            ours = rates[f"{name}_{size}"]
            print(f"rate {name} {size}: digest {ours:.0f} GB/s, torch.hash_tensor {other:.0f} GB/s")
            ratio = ours / other
            print(f"bench digest_over_hash_tensor_{name}_{size} {ratio:.3f} 1.00 {'ok' if ratio > 1 else 'miss'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
