"""What does the sampler cost a step at ten million samples, and what does it keep in memory?

    python bench/sampler.py [--samples 10000000] [--batch 1024] [--starts 200]

Times the first step after a jump to a random place of a random epoch (what a resume pays), an ordinary step, and, to
compare with, `torch.randperm` of the whole set. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time

import torch

from ckptd_shim import GlobalSampler


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--starts", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampler = GlobalSampler(options.samples, options.batch, 1, rank=0, world_size=1)
    draw = random.Random(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    starts, steps = [], []
    for _ in range(options.starts):
        position = draw.randrange(100 * sampler.steps_per_epoch) * options.batch
        begun = time.perf_counter()
        sampler.set_position(position)
        iterator = iter(sampler)
        next(iterator)
        starts.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        next(iterator, None)
        steps.append(time.perf_counter() - begun)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    begun = time.perf_counter()
    order = torch.randperm(options.samples)
    randperm = time.perf_counter() - begun
    start, step = statistics.median(starts), statistics.median(steps)
    print(f"{options.samples} samples, {options.batch} indices a step, one thread, medians of {options.starts}:")
    print(
        f"  {'first step from anywhere':26} {start * 1e3:8.3f} ms  ({min(starts) * 1e3:.3f} to {max(starts) * 1e3:.3f})"
    )
    print(f"  {'each further step':26} {step * 1e3:8.3f} ms  ({min(steps) * 1e3:.3f} to {max(steps) * 1e3:.3f})")
    print(f"  {'memory that it took':26} {grown / 2**20:8.3f} MiB")
    print(f"  {'torch.randperm, once':26} {randperm * 1e3:8.3f} ms, {order.nbytes / 2**20:.1f} MiB")
    print(json.dumps({
        "samples": options.samples, "batch": options.batch, "start_s": start, "step_s": step, "memory_bytes": grown,
        "randperm_s": randperm, "randperm_bytes": order.nbytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
