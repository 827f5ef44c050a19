"""The job of the proofs: dropout, shuffling, loader workers and a loss scale that matters, and it can be made to forget."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptd_shim import GlobalSampler, TrainerShim

parser = argparse.ArgumentParser()
parser.add_argument("--forget", default="", help="scheduler, scaler, sampler or seed")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--losses", help="the harness gives it to every job; the trace says more")
parser.add_argument("--samples", type=int, default=60)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--sum", action="store_true", help="forget that a loss is a mean over the workers' samples")
parser.add_argument("--precise", action="store_true", help="no half precision")
parser.add_argument("--dropout", type=float, default=0.2)
args = parser.parse_args()

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(time.time_ns() % 2**32 if args.forget == "seed" else 1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(16, 1)))
# Not Adam: it would not feel a gradient of the wrong size.
optimizer = torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
# Gradients of half precision overflow at this scale: the first steps are skipped until it is low enough.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
data = torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(2))
dataset = TensorDataset(data, data.sum(dim=1, keepdim=True))
sampler = GlobalSampler(len(dataset), global_batch=12, seed=3)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=args.workers)
shim = TrainerShim(
    model=model,
    optimizer=optimizer,
    scheduler=None if args.forget == "scheduler" else scheduler,
    scaler=None if args.forget == "scaler" else scaler,
    dataloader=None if args.forget == "sampler" else loader,
    seed=4,
)
shim.resume()
while shim.global_step < args.steps and not shim.stopping:
    for inputs, targets in loader:
        k = sampler.accumulation_steps
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(k), targets.chunk(k), strict=True):
            with torch.autocast("cpu", dtype=torch.float16, enabled=not args.precise):
                predicted = model(x)
            loss = nn.functional.mse_loss(predicted.float(), y) / k
            scaler.scale(loss * dist.get_world_size() if args.sum else loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if shim.step(loss=total / dist.get_world_size()) or shim.global_step == args.steps:
            break
shim.close()
dist.destroy_process_group()
