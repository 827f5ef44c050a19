"""What did this run do, step by step, so exactly that two runs can be compared bit for bit?

Only for `ckptd prove`: rank 0 appends a line a step to a file, and all ranks digest the full state at some steps. A
digest is taken over full tensors under their canonical names, so it is the same however they are sharded. What is
written draws no random number and changes nothing.

Lines, each a JSON object: `begin` {step, world_size, roles}, `step` {step, samples, loss, lr, scale, rng} and `digest`
{step, weights, optimizer, unseen}. `loss` and `lr` are hexadecimal floats; None: the script does not say.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckptd_shim.extras import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd_shim.contract import Drill
    from ckptd_shim.state import TrainState


class Tracer:
    """Writes the trace of one attempt.

    Args:
        drill: what is asked for.
        state: what the script handed to the shim.
        rank: this rank; rank 0 writes.
        world_size: the number of ranks.
    """

    def __init__(self, drill: Drill, *, state: TrainState, rank: int, world_size: int) -> None:
        self.drill = drill
        self._state = state
        self._rank = rank
        self._world_size = world_size

    def begin(self, step: int) -> None:
        """Training begins after `step` steps. A collective."""
        state = self._state
        roles = {
            "model": len(state.models),
            "optimizer": len(state.optimizers),
            "scheduler": len(state.schedulers),
            "scaler": int(state.scaler is not None),
            "dataloader": int(state.data.dataloader is not None),
            "extra": len(state.extra),
        }
        self._write("begin", step=step, world_size=self._world_size, roles=roles)
        self.digest(step)

    def step(self, step: int, *, samples: int, loss: float | torch.Tensor | None) -> None:
        """One step is complete. A collective at the steps whose state is digested."""
        if self._rank == 0:
            scale = getattr(self._state.scaler, "get_scale", None)
            self._write(
                "step",
                step=step,
                samples=samples,
                loss=None if loss is None else float(loss).hex(),
                lr=[
                    [float(group["lr"]).hex() for group in each.optimizer.param_groups]
                    for each in self._state.optimizers
                ],
                scale=None if scale is None else float(scale()),
                rng=self._generators(),
            )
        if step in self.drill.digest_at:
            self.digest(step)

    def digest(self, step: int) -> None:
        """Write a digest of the full weights and of the full optimizer state. A collective."""
        tensors, _ = self._state.model_state()
        weights = digest_of(tensors.items())
        sha = hashlib.sha256()
        for each in self._state.optimizers:
            own, rest = each.capture()
            sha.update(digest_of(own.items()).encode())
            sha.update(json.dumps(rest["groups"], sort_keys=True, default=repr).encode())
        unseen = self.unseen() if self._rank == 0 else []
        self._write("digest", step=step, weights=weights, optimizer=sha.hexdigest()[:32], unseen=unseen)

    def kill(self, step: int) -> None:
        """End the last rank if that is asked for at this step. No save may be in flight."""
        if step == self.drill.kill_at_step and self._rank == self._world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def unseen(self) -> list[str]:
        """Classes of what this process trains with and did not hand to the shim: what a resume would forget."""
        state = self._state
        known = {id(each) for each in (*state.schedulers, state.scaler, *state.extra.values())}
        known |= {id(each.optimizer) for each in state.optimizers}
        for scheduler in state.schedulers:
            known |= {id(part) for part in _parts(scheduler)}
        kinds: tuple[tuple[type, str], ...] = (
            (torch.optim.lr_scheduler.LRScheduler, "scheduler"),
            (torch.amp.GradScaler, "scaler"),
            (torch.optim.Optimizer, "optimizer"),
        )
        if state.data.dataloader is None:
            kinds += ((DataLoader, "dataloader"),)
        found = set()
        for each in gc.get_objects():
            for cls, role in kinds:
                # The type, not isinstance: that would run the properties of strangers' objects.
                if issubclass(type(each), cls) and id(each) not in known:
                    found.add(f"{role}: {type(each).__name__}")
        return sorted(found)

    def _generators(self) -> dict[str, str]:
        states: dict[str, bytes] = {
            "python": repr(random.getstate()).encode(),
            "torch": bytes(bytes_of(torch.get_rng_state())),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            states["numpy"] = keys.tobytes() + repr((kind, rest)).encode()
        for device in self._state.devices:
            states[str(device)] = bytes(bytes_of(torch.cuda.get_rng_state(device)))
        return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}

    def _write(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            with open(self.drill.trace, "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")


def _parts(scheduler: Any) -> list[Any]:
    """The schedulers inside of a SequentialLR, a ChainedScheduler, or one's own kind of those."""
    found = []
    for value in vars(scheduler).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                found += [each, *_parts(each)]
    return found


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of full tensors, however they are sharded, 32 hex digits: a collective where any is a DTensor."""
    sha = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(tensors, key=lambda each: each[0]):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            flat = full.detach().cpu().contiguous().reshape(-1)
            sha.update(f"{name} {flat.dtype} {tuple(full.shape)}".encode())
            sha.update(bytes_of(flat))
    return sha.hexdigest()[:32]
