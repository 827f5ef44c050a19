"""The job that bench/restart.py kills: DDP over gloo, AdamW, one line a step; runs under ckptd and under torchrun."""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptd_shim import TrainerShim

parser = argparse.ArgumentParser()
parser.add_argument("--trace", required=True, help="file that takes `monotonic-seconds pid rank step` lines")
parser.add_argument("--directory", help="where the shim saves when ckptd is not there")
parser.add_argument("--megabytes", type=float, default=0.1, help="of parameters; the checkpoint has three times that")
parser.add_argument("--deaf", action="store_true", help="block SIGTERM, as a rank inside a collective does")
args = parser.parse_args()

if args.deaf:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
dist.init_process_group("gloo")
rank = dist.get_rank()
width = max(8, int((args.megabytes * 1e6 / 4) ** 0.5))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(width, width, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randn(4, width)
under_ckptd = "CKPTD_LAUNCH" in os.environ
standalone = {} if under_ckptd else {"directory": args.directory, "interval": {"steps": 20}}
shim = TrainerShim(model=model, optimizer=optimizer, seed=0, global_batch=8, **standalone)
shim.resume()
with open(args.trace, "a", buffering=1, encoding="ascii") as trace:
    while not shim.stopping:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        shim.step()
        trace.write(f"{time.monotonic():.4f} {os.getpid()} {rank} {shim.global_step}\n")
shim.close()
