"""How long does a save stall training, against a plain copy of the same state into warm buffers?

    python bench/save_stall.py [--gib 1] [--ranks 1] [--repeat 7] [--directory /dev/shm]

Saves a model of float32 parameters through the shim, and between the saves copies the same tensors with `copy_` into
buffers that were touched before. Prints a table, then a JSON line of the medians. With --ranks 2 the model is sharded by
`fully_shard`, so that each rank stages half of it; the slowest rank counts.
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

from ckptd_shim import TrainerShim, contract


def rank_main(rank, options, scratch, directory):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    if options.ranks > 1:
        store = dist.FileStore(os.path.join(scratch, "store"), options.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    width = 2048
    layers = max(1, int(options.gib * 2**30 / (4 * width * width)))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if options.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (options.ranks,)))
    local = [p.to_local().detach() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    buffers = [torch.empty_like(p).zero_() for p in local]
    shim = TrainerShim(model=model, directory=directory, interval={"steps": 1_000_000})
    shim.resume()
    shim.step()  # allocates the shim's buffers
    saver = shim._saver
    saver.wait()
    copies, stalls, commits = [], [], []
    for _ in range(options.repeat + 1):
        barrier(options)
        begun = time.perf_counter()
        for source, target in zip(local, buffers, strict=True):
            target.copy_(source)
        copies.append(slowest(time.perf_counter() - begun, options))
        barrier(options)
        shim.global_step += 1
        begun = time.perf_counter()
        shim._save(shim.global_step)
        stalls.append(slowest(time.perf_counter() - begun, options))
        saver.wait()
        commits.append(slowest(time.perf_counter() - begun, options))
        assert saver.outcome.committed, saver.outcome
        if rank == 0:
            remove(saver.outcome.path)
    shim._begun_step = shim.global_step
    if rank == 0:
        # The first round warms caches up.
        write(
            scratch,
            {
                "copy_s": copies[1:],
                "stall_s": stalls[1:],
                "commit_s": commits[1:],
                "first_stall_s": stalls[0],
                "first_copy_s": copies[0],
            },
        )
    if options.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


def barrier(options):
    if options.ranks > 1:
        dist.barrier()


def slowest(seconds, options):
    if options.ranks == 1:
        return seconds
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def remove(path):
    for name in [contract.COMMITTED, *os.listdir(path)]:
        contract.unlink_quietly(os.path.join(path, name))
    os.rmdir(path)


def write(scratch, result):
    with open(os.path.join(scratch, "result"), "w") as file:
        json.dump(result, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--directory", default="/dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=options.directory) as directory:
        torch.multiprocessing.spawn(rank_main, args=(options, scratch, directory), nprocs=options.ranks)
        with open(os.path.join(scratch, "result")) as file:
            result = json.load(file)
    medians = {name: statistics.median(values) for name, values in result.items() if isinstance(values, list)}
    print(f"{options.gib} GiB of float32 on {options.ranks} rank(s), medians of {options.repeat}:")
    for name, label in (
        ("copy_s", "plain copy, warm buffers"),
        ("stall_s", "stall of a save"),
        ("commit_s", "save to commit"),
    ):
        print(f"  {label:26} {medians[name]:8.4f} s   ({min(result[name]):.4f} to {max(result[name]):.4f})")
    ratio = medians["stall_s"] / medians["copy_s"]
    print(f"  {'stall of the first save':26} {result['first_stall_s']:8.4f} s")
    print(f"  {'stall over copy':26} {ratio:8.3f}")
    print(
        json.dumps(
            {
                "gib": options.gib,
                "ranks": options.ranks,
                "ratio": ratio,
                "first_stall_s": result["first_stall_s"],
                **medians,
            }
        )
    )


if __name__ == "__main__":
    main()
