"""The job of the system tests: tiny, fast, with dropout and shuffling on, and with faults to order."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptd_shim import GlobalSampler, TrainerShim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.02, help="seconds a step takes besides computing")
parser.add_argument("--width", type=int, default=32, help="of the hidden layer: size of the checkpoint")
parser.add_argument("--losses", default="")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--orders", help="directory in which a file rank<k> holds the fault that rank k is to have now")
parser.add_argument("--stuck", default="", help="file that no read returns from")
parser.add_argument("--pin", type=int, default=0, help="step at which the script pins what is saved of it, or after")
parser.add_argument("--linger", action="store_true", help="rank 1 does not end after the end")
parser.add_argument("--fault", action="append", default=[], help="KIND:STEP[:RANK[:ATTEMPT]], at the end of that step")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
attempt = int(os.environ.get("CKPTD_ATTEMPT", "1"))

torch.manual_seed(1)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, args.width), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(args.width, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step / 50))
data = torch.randn(256, 8, generator=torch.Generator().manual_seed(2))
dataset = TensorDataset(data, data.sum(dim=1, keepdim=True))
loader = DataLoader(dataset, batch_sampler=GlobalSampler(len(dataset), global_batch=12, seed=3))
torch.manual_seed(1000 + rank)  # each rank drops out other units
shim = TrainerShim(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader, seed=4)
shim.resume()
began = shim.global_step


def ordered() -> list[str]:
    """The fault that somebody outside ordered for this rank, once."""
    path = f"{args.orders}/rank{rank}"
    try:
        with open(path, encoding="ascii") as file:
            kind = file.read()
        os.unlink(path)
    except OSError:
        return []
    return [kind] if kind else []


def faults(step: int) -> None:
    for kind in ordered() if args.orders else []:
        commit_fault(kind, step)
    for fault in args.fault:
        kind, at, *rest = fault.split(":")
        if kind == "device" and os.environ.get("CKPTD_DEVICE") == at and step == began + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "poison" and began == int(at) and step == began + 3:
            raise RuntimeError("poisoned")
        if kind in ("device", "poison"):
            continue
        where = int(rest[0]) if rest else 0
        when = int(rest[1]) if len(rest) > 1 else attempt
        if step != int(at) or rank != where or attempt != when:
            continue
        commit_fault(kind, step)


def commit_fault(kind: str, step: int) -> None:
    if kind == "raise":
        raise RuntimeError(f"planted at step {step}")
    if kind == "nan":
        with torch.no_grad():
            next(iter(model.parameters()))[0, 0] = torch.nan
    if kind == "exit0":
        os._exit(0)
    if kind == "exit3":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hang":
        time.sleep(1e6)
    if kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "fifo":
        path = Path(f"{args.losses}.fifo")
        os.mkfifo(path)
        path.read_bytes()  # nobody writes
    if kind == "mismatch":
        dist.broadcast(torch.zeros(1), src=1)
    if kind == "stuck":
        Path(args.stuck).read_bytes()
    if kind == "stuckthread":
        # A thread that cannot be killed, in a process whose main thread can.
        threading.Thread(target=Path(args.stuck).read_bytes, daemon=True).start()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "daemon":
        # A process of its own session, without a parent and without any mark of ours, that holds a port.
        subprocess.run(
            ["setsid", "--fork", sys.executable, "-c", "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(1e6)"],
            env={"PATH": os.environ["PATH"]}, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "chatter":
        for _ in range(2048):
            for stream in (1, 2):
                os.write(stream, b"x" * 65536)
    if kind == "bus":
        os.kill(os.getpid(), signal.SIGBUS)


if shim.global_step == 0:
    faults(0)
while shim.global_step < args.steps and not shim.stopping:
    for inputs, targets in loader:
        k = shim.accumulation_steps
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(k), targets.chunk(k), strict=True):
            loss = nn.functional.mse_loss(model(x), y) / k
            loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if args.pause:
            time.sleep(args.pause)
        if args.losses and rank == 0:
            with open(args.losses, "a", encoding="ascii") as file:
                file.write(f"{shim.global_step + 1} {total.item().hex()}\n")
        faults(shim.global_step + 1)
        if args.pin and shim.global_step == args.pin:
            shim.pin("by the script")
        if shim.step(loss=total) or shim.global_step == args.steps:
            break
shim.close()
if args.linger and rank == 1:
    threading.Thread(target=time.sleep, args=(1e6,)).start()
dist.destroy_process_group()
