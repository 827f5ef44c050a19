"""What does `shim.step` cost a training loop when nothing is saved?

    python bench/step_cost.py [--ranks 2] [--steps 200000]

Runs a loop that does nothing but step, under a launch document as ckptd writes it, so that the heartbeat page is
written; and the same loop without the shim. Prints microseconds a step, agreements included, and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from ckptd_shim import TrainerShim
from ckptd_shim.contract import ENV_LAUNCH, LaunchContext


def rank_main(rank, options, scratch):
    torch.set_num_threads(1)
    if options.ranks > 1:
        store = dist.FileStore(os.path.join(scratch, "store"), options.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    os.environ[ENV_LAUNCH] = os.path.join(scratch, "launch.json")
    model = nn.Linear(4, 4)
    shim = TrainerShim(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    shim.resume()
    loss = torch.tensor(1.0)
    for _ in range(1000):
        shim.step(loss=loss)
    each = []
    begun = time.perf_counter()
    for _ in range(options.steps):
        before = time.perf_counter_ns()
        shim.step(loss=loss)
        each.append(time.perf_counter_ns() - before)
    with_shim = time.perf_counter() - begun
    begun = time.perf_counter()
    sink = []
    for _ in range(options.steps):
        before = time.perf_counter_ns()
        sink.append(time.perf_counter_ns() - before)
    without = time.perf_counter() - begun
    if rank == 0:
        each.sort()
        result = {
            "ranks": options.ranks,
            "steps": options.steps,
            "mean_us": (with_shim - without) / options.steps * 1e6,
            "median_us": statistics.median(each) / 1e3,
            "p999_us": each[int(len(each) * 0.999)] / 1e3,
            "longest_us": each[-1] / 1e3,
        }
        print(f"shim.step on {options.ranks} rank(s): mean {result['mean_us']:.2f} us (agreements included), "
              f"median {result['median_us']:.2f} us, 99.9 % {result['p999_us']:.2f} us")  # fmt: skip
        print(json.dumps(result))
    if options.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.mkdir(os.path.join(scratch, "saves"))
        LaunchContext(
            run_id="bench", run_name="bench", attempt=1, attempt_dir=scratch, tier="disk", resume=None,
            control_path=os.path.join(scratch, "control.json"), save_dir=os.path.join(scratch, "saves"),
            world_at_start=None, global_batch=64, micro_batch=None, interval_s=None, interval_steps=None, commit_sequence=0,
        ).write(os.path.join(scratch, "launch.json"))  # fmt: skip
        torch.multiprocessing.spawn(rank_main, args=(options, scratch), nprocs=options.ranks)


if __name__ == "__main__":
    main()
