"""Save and load a TrainState directly, without a TrainerShim around it."""

import hashlib
import os

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim import loading
from ckptd_shim.checkpoint import Saver, Target
from ckptd_shim.pulse import ReportWriter
from ckptd_shim.ranks import Ranks
from ckptd_shim.state import Position


def make_saver(directory, ranks=None, report=None, attempt=1, sequence=0, run_id="run"):
    target = Target(save_dir=str(directory), run_id=run_id, attempt=attempt, tier="disk")
    return Saver(target=target, ranks=ranks or Ranks(None), sequence=sequence, report=ReportWriter(report))


def position(step, samples=None, seed=0):
    return Position(step=step, samples=step * 8 if samples is None else samples, epoch=0, seed=seed, global_batch=8)


def begin_save(saver, state, step, ranks=None):
    at = position(step)
    world_size = (ranks or Ranks(None)).size
    return saver.save(lambda: state.capture(at, world_size=world_size, incomparable=None), position=at, loss=0.5)


def save(directory, state, step=3, ranks=None):
    """Save once and return the path of the commit."""
    saver = make_saver(directory, ranks)
    try:
        begin_save(saver, state, step, ranks)
        saver.wait()
        assert saver.outcome.committed, saver.outcome
        return saver.outcome.path
    finally:
        saver.close()


def load(path, state, ranks=None, seed=0, **more):
    return loading.load(os.fspath(path), state=state, ranks=ranks or Ranks(None), seed=seed, **more)


def digest(*objects):
    """A digest of every bit of modules, optimizers and trees of tensors."""
    sha = hashlib.sha256()

    def visit(value):
        if isinstance(value, torch.nn.Module):
            visit(dict(value.state_dict()))
        elif isinstance(value, torch.optim.Optimizer):
            visit(value.state_dict())
        elif isinstance(value, torch.Tensor):
            tensor = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
            sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            sha.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
        elif isinstance(value, dict):
            for key, item in sorted(value.items(), key=lambda each: repr(each[0])):
                sha.update(repr(key).encode())
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        else:
            sha.update(repr(value).encode())

    for each in objects:
        visit(each)
    return sha.hexdigest()
