"""Train a small GPT on Python's standard library, under ckptd. The lines that ckptd asks for are marked `# ckptd`.

The same script runs on CPUs (gloo) and on GPUs (NCCL), on any number of workers that divides the global batch.
"""

import argparse
import contextlib
import math
import os

import data
import model as gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ckptd_shim import GlobalSampler, TrainerShim  # ckptd

SEED = 1234
GLOBAL_BATCH = 24
WARMUP_STEPS = 20


def main() -> None:
    options = read_options()
    device, ddp_devices = start_process_group()
    training, validation = data.load(gpt.CONTEXT)

    torch.manual_seed(SEED)  # the same weights everywhere
    model = DistributedDataParallel(gpt.Gpt().to(device), device_ids=ddp_devices)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=options.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, options.steps))
    torch.manual_seed(SEED + 1 + dist.get_rank())  # other dropout on each rank

    sampler = GlobalSampler(len(training), global_batch=GLOBAL_BATCH, seed=SEED)  # ckptd
    loader = DataLoader(training, batch_sampler=sampler, pin_memory=device.type == "cuda")
    shim = TrainerShim(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader, seed=SEED)  # ckptd
    shim.resume()  # ckptd

    if shim.global_step == 0:
        evaluate(model, validation, shim, device)
    while shim.global_step < options.steps and not shim.stopping:  # ckptd
        for batch in loader:
            loss = train_step(model, optimizer, scheduler, batch, shim)
            stop = shim.step(loss=loss)  # ckptd
            if shim.global_step % options.eval_every == 0 or shim.global_step == options.steps:
                evaluate(model, validation, shim, device)
            if stop or shim.global_step == options.steps:  # ckptd
                break
    shim.close()  # ckptd
    dist.destroy_process_group()


def train_step(model, optimizer, scheduler, batch, shim) -> torch.Tensor:
    """One optimizer step over this rank's share of the global batch; returns the share's mean loss, detached."""
    device = next(model.parameters()).device
    inputs, targets = (each.to(device, non_blocking=True) for each in batch)
    pieces = shim.accumulation_steps  # ckptd
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
        # Gradients travel between ranks once a step, with the last piece.
        with model.no_sync() if i < pieces - 1 else contextlib.nullcontext():
            # Pieces are of one size: the mean of their means is the mean over the share, and DDP takes it over ranks.
            loss = loss_of(model, x, y) / pieces
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def loss_of(model, x, y) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.is_cuda):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model, validation, shim, device, windows: int = 96) -> None:
    """Print the mean loss over the first validation windows, each rank taking its part of them."""
    with shim.phase("eval"):  # ckptd: no step meanwhile, and no hang
        mine = Subset(validation, range(dist.get_rank(), min(windows, len(validation)), dist.get_world_size()))
        sums = torch.zeros(2, device=device)
        model.eval()
        for x, y in DataLoader(mine, batch_size=24):
            # Not through DDP: ranks need not have the same number of batches here.
            sums += torch.stack((loss_of(model.module, x.to(device), y.to(device)) * len(x), sums.new_tensor(len(x))))
        model.train()
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"step {shim.global_step}: validation loss {sums[0] / sums[1]:.4f}", flush=True)


def weight_decay_groups(model) -> list[dict]:
    """Matrices decay; biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warmup_then_cosine(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def start_process_group() -> tuple[torch.device, list[int] | None]:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu"), None
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    dist.init_process_group("nccl")
    return torch.device("cuda", index), [index]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=80)
    return parser.parse_args()


if __name__ == "__main__":
    main()
