"""What does a save cost training, and how soon is it committed? Against a plain copy, dcp.async_save, dcp.save, torch.save.

    python bench/save.py                                # 1 GiB of float32, 16 tensors, 1 rank
    python bench/save.py --tensors 2000 --ranks 2       # ranks over gloo, sharded by fully_shard

A model of `--tensors` parameters and SGD's step on them is the state; a step is matrix products that keep every core busy
(`--threads` of them on each rank), then one pass of the optimizer. Every way to save takes turns with the others, and
with as many steps without a save, so that the machine's moods are shared. The whole price is the wall-clock of `--steps`
steps with a save after the first of them, less that of the same steps without. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ckptd_shim import TrainerShim

WAYS = ("none", "ckptd", "ckptd, no overlap", "async_save", "dcp.save", "torch.save")


class Work:
    """A model of so many tensors, and a step that keeps the cores busy without looking at most of it."""

    def __init__(self, options):
        width = max(1, int(options.gib * 2**30 / 4 / options.tensors))
        self.model = nn.Module()
        self.model.parts = nn.ParameterList(
            [nn.Parameter(torch.rand(options.ranks * 4, width // 4 // options.ranks)) for _ in range(options.tensors)]
        )
        if options.ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (options.ranks,)))
        self.local = [p.to_local().detach() if hasattr(p, "to_local") else p.detach() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(list(self.model.parameters())[:1], lr=1e-3)
        self.a = torch.rand(options.size, options.size)
        self.products = options.products

    def step(self):
        """Forward and backward are the products; the optimizer changes the first parameter."""
        x = self.a
        for _ in range(self.products):
            x = (x @ self.a).mul_(1e-3)
        self.optimizer.step()


def slowest(seconds, ranks):
    if ranks == 1:
        return seconds
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def resident():
    """Memory of this process that no file backs, bytes: what lies in tmpfs is the checkpoint."""
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("RssAnon:")) * 1024


class Peak:
    """The most memory between two moments, looked at every few milliseconds."""

    def __enter__(self):
        self.start = self.most = resident()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.stop.wait(0.01):
            self.most = max(self.most, resident())

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.most = max(self.most, resident())

    @property
    def extra(self):
        return self.most - self.start


def rank_main(rank, options, scratch, directory):
    torch.set_num_threads(options.threads)
    if options.ranks > 1:
        store = dist.FileStore(os.path.join(scratch, "store"), options.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    work = Work(options)
    result = {way: {"call": [], "wall": [], "commit": [], "during": [], "extra": [], "cpu": []} for way in options.ways}
    result |= {"copy": [], "copy_cpu": [], "staged": sum(t.nbytes for t in work.local)}
    shims = {}
    group = dist.new_group(backend="gloo") if options.ranks > 1 else None
    for way in ("ckptd", "ckptd, no overlap"):
        if way in options.ways:
            shims[way] = TrainerShim(
                model=work.model, optimizer=work.optimizer, overlap=way == "ckptd",
                directory=os.path.join(directory, way.replace(", ", "-")), interval={"steps": 10**9},
            )  # fmt: skip
            shims[way].resume()
            work.step()
            shims[way].step()  # allocates the buffers
            shims[way]._saver.wait()
    targets = [torch.empty_like(t).zero_() for t in work.local] if not options.no_copy else []
    for number in range(options.repeat + 1):
        if targets:
            if group is not None:
                dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            for target, source in zip(targets, work.local, strict=True):
                target.copy_(source)
            result["copy"].append(slowest(time.perf_counter() - begun, options.ranks))
            result["copy_cpu"].append(slowest(time.process_time() - cpu, options.ranks))
        for way in options.ways:
            place = os.path.join(directory, f"{way.split('.')[0]}-{number}".replace(", ", "-"))
            one = measure(way, work, shims.get(way), place, options, group=group, rank=rank)
            for name, value in one.items():
                result[way][name].append(value)
            if options.ranks > 1:
                dist.barrier()
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                for shim in shims.values():
                    shutil.rmtree(shim._directory, ignore_errors=True)
    if rank == 0:
        with open(os.path.join(scratch, "result"), "w") as file:
            json.dump(result, file)
    if options.ranks > 1:
        dist.barrier()
    os._exit(0)


def measure(way, work, shim, place, options, *, group, rank):
    """One series of steps, with a save after the first."""
    if group is not None:
        dist.barrier()
    committed = None
    done = threading.Event()
    steps = []
    cpu = time.process_time()
    with Peak() as peak:
        begun = time.perf_counter()
        work.step()
        before = time.perf_counter()
        finish = lambda: None  # noqa: E731
        if shim is not None:
            shim.global_step += 1
            shim._save(shim.global_step)
            saver = shim._saver
            finish = saver.wait
            idle = saver._idle
        elif way == "async_save":
            future = dcp.async_save(
                {"model": work.model.state_dict()}, checkpoint_id=place, process_group=group, no_dist=group is None
            )
            finish = future.result
        elif way == "dcp.save":
            dcp.save(
                {"model": work.model.state_dict()}, checkpoint_id=place, process_group=group, no_dist=group is None
            )
        elif way == "torch.save":
            os.makedirs(place, exist_ok=True)
            torch.save({str(i): t for i, t in enumerate(work.local)}, os.path.join(place, str(rank)))
        call = time.perf_counter() - before
        waited = 0.0

        def watch():
            nonlocal committed
            (idle.wait if shim is not None else finish)()
            committed = time.perf_counter()
            done.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(options.steps - 1):
            began, stood = time.perf_counter(), 0.0
            work.step()
            if shim is not None:
                stood, shim._waited_s = shim._waited_s, 0.0
                waited += stood
            if not done.is_set():
                steps.append(time.perf_counter() - began - stood)
        wall = time.perf_counter() - begun
        finish()
        watcher.join()
    if shim is not None:
        assert saver.outcome.committed, saver.outcome
    ranks = options.ranks
    return {
        "call": slowest(call + waited, ranks),
        "wall": slowest(wall, ranks),
        "commit": slowest(committed - before, ranks),
        "during": slowest(statistics.fmean(steps) if steps else 0.0, ranks),
        "extra": slowest(float(peak.extra), ranks),
        "cpu": slowest(time.process_time() - cpu, ranks),
    }


def spread(values, unit=1.0):
    return f"{statistics.median(values) / unit:8.3f} ({min(values) / unit:.3f} to {max(values) / unit:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of parameters, over all ranks")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="of each rank's steps (default: all cores)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--products", type=int, default=12, help="matrix products in a step")
    parser.add_argument("--size", type=int, default=768, help="of the matrices")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-copy", action="store_true", help="measure no plain copy, whose buffers take memory")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--directory", default="/dev/shm")
    options = parser.parse_args()
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=options.directory) as directory:
        torch.multiprocessing.spawn(rank_main, args=(options, scratch, directory), nprocs=options.ranks)
        with open(os.path.join(scratch, "result")) as file:
            result = json.load(file)
    report(options, result)


def report(options, result):
    # The first round warms caches up.
    copy = statistics.median(result["copy"][1:]) if result["copy"] else float("nan")
    base = result["none"]["wall"][1:]
    alone = statistics.median(base) / options.steps
    print(
        f"{options.gib} GiB of float32 in {options.tensors} tensors, {options.ranks} rank(s) of {options.threads} thread(s), "
        f"medians of {options.repeat} (smallest to largest)"
    )
    print(f"  plain copy into warm buffers {spread(result['copy'][1:])} s" if result["copy"] else "")
    if result["copy"]:
        print(f"  its processor time           {spread(result['copy_cpu'][1:])} s")
    print(f"  a step without a save        {alone:8.3f} s")
    rows = {}
    for way in options.ways:
        if way == "none":
            continue
        one = {name: values[1:] for name, values in result[way].items()}
        prices = [wall - usual for wall, usual in zip(one["wall"], base, strict=True)]
        during = [each / alone for each in one["during"] if each]
        row = {
            "call_s": statistics.median(one["call"]),
            "price_s": statistics.median(prices),
            "commit_s": statistics.median(one["commit"]),
            "step_ratio": statistics.median(during) if during else None,
            "extra_copies": statistics.median(one["extra"]) / result["staged"],
            "call_copies": statistics.median(one["call"]) / copy,
            "cpu_s": statistics.median(one["cpu"]) - statistics.median(result["none"]["cpu"][1:]),
            "price_copies": statistics.median(prices) / copy,
        }
        rows[way] = row
        print(f"{way}:")
        print(f"  training waits     {spread(one['call'])} s, {row['call_copies']:.2f} copies")
        print(f"  whole price        {spread(prices)} s, {row['price_copies']:.2f} copies")
        print(f"  save to commit     {spread(one['commit'])} s")
        if during:
            print(f"  steps meanwhile    {spread(during)} of a step without")
        print(f"  processor time     {row['cpu_s']:8.3f} s more than the same steps without")
        print(f"  extra memory       {row['extra_copies']:.2f} copies")
    print(
        json.dumps(
            {"gib": options.gib, "tensors": options.tensors, "ranks": options.ranks, "copy_s": copy, "ways": rows}
        )
    )


if __name__ == "__main__":
    main()
