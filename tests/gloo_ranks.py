"""Run a function of a test file in several real processes that share a gloo process group, and end them all."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch._dynamo"])


class RankFailed(AssertionError):
    """A rank raised: its traceback."""


def run_ranks(world, file, function, timeout_s=100.0, **arguments):
    """Call `function(rank, world, **arguments)` of `file` in `world` processes; what they return, in order.

    Arguments and results are JSON. A world of one has no process group unless `arguments["group"]` says so.
    """
    # The forkserver forks from a process that never ran torch: its children may use threads.
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        try:
            for rank in range(world):
                process = _context.Process(
                    target=_main, args=(rank, world, file, function, json.dumps(arguments), scratch), daemon=False
                )
                process.start()
                processes.append(process)
            deadline = time.monotonic() + timeout_s
            alive = {process.sentinel: process for process in processes}
            while alive:
                ended = wait(list(alive), max(deadline - time.monotonic(), 0))
                if not ended:
                    raise RankFailed(f"ranks {[processes.index(p) for p in alive.values()]} are still running")
                for sentinel in ended:
                    process = alive.pop(sentinel)
                    process.join()
                    if process.exitcode != 0:
                        raise RankFailed(_error_of(scratch, processes.index(process), process.exitcode))
            return [_result_of(scratch, rank) for rank in range(world)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()


def _main(rank, world, file, function, arguments, scratch):
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        values = json.loads(arguments)
        if values.pop("group", False) or world > 1:
            store = dist.FileStore(os.path.join(scratch, "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        spec = importlib.util.spec_from_file_location(os.path.basename(file).removesuffix(".py"), file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, function)(rank, world, **values)
        with open(os.path.join(scratch, f"result{rank}"), "w") as out:
            json.dump(result, out)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        with open(os.path.join(scratch, f"error{rank}"), "w") as out:
            out.write(traceback.format_exc())
        os._exit(1)


def _error_of(scratch, rank, exitcode):
    # The first rank to end is not always the one to blame: show what every rank left.
    texts = [f"rank {rank} ended with {exitcode}"]
    for name in sorted(os.listdir(scratch)):
        if name.startswith("error"):
            with open(os.path.join(scratch, name)) as file:
                texts.append(f"{name}:\n{file.read()}")
    return "\n".join(texts)


def _result_of(scratch, rank):
    with open(os.path.join(scratch, f"result{rank}")) as file:
        return json.load(file)
