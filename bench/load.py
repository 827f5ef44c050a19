"""How long does a resume take to read a checkpoint, against a plain read of the same bytes and against `dcp.load`?

    python bench/load.py [--gib 1] [--repeat 7] [--directory /dev/shm]

Saves a model of float32 parameters through the shim, then times, turn about: a plain read of all its files into one
buffer that is kept (what the bytes cost), `torch.distributed.checkpoint.load` into the same model (no digest, no
comparison, nothing but the tensors), and the shim's load, which first compares the script with the saved one and puts
the random numbers back. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckptd_shim import TrainerShim, loading
from ckptd_shim.digest import committed_paths
from ckptd_shim.ranks import Ranks

warnings.filterwarnings("ignore")


def plain_read(path, buffer):
    begun = time.perf_counter()
    for name in sorted(os.listdir(path)):
        with open(os.path.join(path, name), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def dcp_load(path, model):
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    begun = time.perf_counter()
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return time.perf_counter() - begun


def shim_load(path, shim):
    begun = time.perf_counter()
    loading.load(path, state=shim._state, ranks=Ranks(None), seed=0)
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--directory", default="/dev/shm")
    options = parser.parse_args()
    width = 2048
    layers = max(1, round(options.gib * 2**30 / (4 * width * width)))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    times = {"read_s": [], "dcp_s": [], "shim_s": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        shim = TrainerShim(model=model, directory=directory)
        shim.resume()
        shim.step()
        shim.close()
        (path,) = committed_paths(directory)
        # As large as the largest file: a read into warm memory is the least that any load costs.
        buffer = bytearray(max(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)))
        before = [parameter.detach().clone() for parameter in list(model.parameters())[:1]]
        for round_ in range(options.repeat + 1):
            found = {
                "read_s": plain_read(path, buffer),
                "dcp_s": dcp_load(path, model),
                "shim_s": shim_load(path, shim),
            }
            if round_:  # the first warms caches up
                for name, seconds in found.items():
                    times[name].append(seconds)
        assert torch.equal(before[0], next(model.parameters()))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{options.gib} GiB of float32 on {options.directory}, medians of {options.repeat}:")
    for name, label in (("read_s", "plain read, warm buffer"), ("dcp_s", "dcp.load"), ("shim_s", "load by the shim")):
        print(f"  {label:26} {medians[name]:8.4f} s   ({min(times[name]):.4f} to {max(times[name]):.4f})")
    ratio, against_dcp = medians["shim_s"] / medians["read_s"], medians["shim_s"] / medians["dcp_s"]
    print(f"  {'shim over plain read':26} {ratio:8.3f}")
    print(f"  {'shim over dcp.load':26} {against_dcp:8.3f}")
    print(json.dumps({"gib": options.gib, "ratio": ratio, "ratio_dcp": against_dcp, **medians}))


if __name__ == "__main__":
    main()
