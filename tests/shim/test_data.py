"""Every loader with a position goes on where training was, and any other is refused before a step is trained."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from gloo_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from ckptd_shim import CheckpointMismatch, GlobalSampler, TrainerShim
from ckptd_shim.data import DataPosition
from ckptd_shim.errors import SetupError

stateful = pytest.importorskip("torchdata.stateful_dataloader")

BATCH = 4
SAMPLES = 20
PER_EPOCH = SAMPLES // BATCH


class Stream(IterableDataset):
    """An endless stream: sample n is n, and its workers share it out batch by batch."""

    def __init__(self):
        self.start = 0

    def set_position(self, samples):
        self.start = samples

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for batch in itertools.count(self.start // BATCH):
            if (batch - self.start // BATCH) % workers == worker:
                yield from range(batch * BATCH, (batch + 1) * BATCH)


def forking(workers):
    """In a process of `run_ranks` the default would be another forkserver, which takes seconds to import torch."""
    return {"multiprocessing_context": "fork"} if workers else {}


def stateful_loader(workers, *, sampler=None, persistent=False):
    return stateful.StatefulDataLoader(
        list(range(SAMPLES)), batch_size=BATCH, shuffle=sampler is None, sampler=sampler, num_workers=workers,
        persistent_workers=persistent, **forking(workers),
    )  # fmt: skip


def distributed_sampler():
    return stateful.sampler.StatefulDistributedSampler(list(range(SAMPLES)), num_replicas=1, rank=0, shuffle=True)


LOADERS = {
    "sampler": lambda workers: DataLoader(list(range(SAMPLES)), batch_sampler=GlobalSampler(SAMPLES, BATCH, 5), num_workers=workers, **forking(workers)),
    "stream": lambda workers: DataLoader(Stream(), batch_size=BATCH, num_workers=workers, **forking(workers)),
    "stateful": stateful_loader,
    "persistent": lambda workers: stateful_loader(workers, persistent=workers > 0),
    "distributed": lambda workers: stateful_loader(workers, sampler=distributed_sampler()),
}  # fmt: skip


def run(loader, directory, until):
    """Train on `loader`; (sample, random number) of each step, and the epoch after it."""
    model = nn.Linear(1, 1)
    torch.manual_seed(7)
    shim = TrainerShim(model=model, dataloader=loader, directory=directory, global_batch=BATCH, seed=1)
    shim.resume()
    seen = []
    while shim.global_step < until:
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(shim.epoch)
        for batch in loader:
            seen.append((batch.tolist(), torch.rand(()).item()))
            stop = shim.step()
            seen[-1] += (shim.epoch,)
            if stop or shim.global_step == until:
                break
    shim.close()
    return seen


def make(kind, workers):
    torch.manual_seed(0)  # a StatefulDataLoader draws the seed of its order when it is made
    return LOADERS[kind](workers)


def run_once(rank, world, kind, workers, directory, until):
    return run(make(kind, workers), directory, until)


def run_in_a_process(kind, workers, directory, until):
    """A loader that has workers gets a process of its own, as a resumed script does."""
    if not workers:
        return run(make(kind, workers), directory, until)
    found = run_ranks(1, __file__, "run_once", kind=kind, workers=workers, directory=directory, until=until)[0]
    return [tuple(each) for each in found]


@pytest.mark.parametrize(
    "kind, workers",
    [("sampler", 0), ("sampler", 2), ("stream", 0), ("stream", 2), ("stateful", 0), ("stateful", 2), ("persistent", 2),
     ("distributed", 0), ("distributed", 2)],
)  # fmt: skip
def test_interrupted_anywhere_it_gives_the_same_samples_and_random_numbers(tmp_path, kind, workers):
    total = 2 * PER_EPOCH + 2
    whole = run_in_a_process(kind, workers, None, total)
    if kind in ("stateful", "sampler", "distributed"):
        assert [epoch for *_, epoch in whole][PER_EPOCH - 1 : PER_EPOCH + 1] == (
            [0, 0] if kind == "stateful" else [1, 1]
        )
        assert sorted(x for batch, *_ in whole[:PER_EPOCH] for x in batch) == list(range(SAMPLES))
    # In the middle of an epoch, at its end, one after that, and at the end of training: each a resume of a resume.
    pieces = []
    for until in (3, PER_EPOCH, PER_EPOCH + 1, total, total):
        pieces += run_in_a_process(kind, workers, str(tmp_path), until)
    assert pieces == whole


def test_another_number_of_loader_workers_is_refused_with_the_reason(tmp_path):
    run(make("stateful", 0), tmp_path, 3)
    with pytest.raises(CheckpointMismatch, match="saved with num_workers=0, now 2"):
        run(make("stateful", 2), tmp_path, 6)


def test_another_number_of_ranks_is_refused_where_the_position_belongs_to_a_rank():
    position = DataPosition(make("stateful", 0))
    lines = position.differences("loader", position.capture(), saved_world=2, same_world=False)
    assert "belongs to one rank each of 2" in lines[0]
    assert not DataPosition(make("stream", 0)).differences("stream", None, saved_world=2, same_world=False)


def test_loaders_without_a_position_are_refused_at_once():
    data = TensorDataset(torch.arange(SAMPLES))
    with pytest.raises(SetupError, match="no position"):
        TrainerShim(model=nn.Linear(1, 1), dataloader=DataLoader(data, shuffle=True))
    with pytest.raises(SetupError, match="no position"):
        TrainerShim(model=nn.Linear(1, 1), dataloader=[1, 2, 3])
    with pytest.raises(SetupError, match="ahead of training"):
        DataPosition(DataLoader(data, sampler=distributed_sampler(), num_workers=2))
    loader = stateful.StatefulDataLoader(data, num_workers=2, in_order=False)
    with pytest.raises(SetupError, match="in_order"):
        DataPosition(loader)


def test_a_dataset_smaller_than_a_batch_is_a_clear_error():
    with pytest.raises(SetupError, match="the dataset has 3 samples, fewer than one global batch of 4"):
        GlobalSampler(3, BATCH, 0)


# --- hash seeds -------------------------------------------------------------------------------------------------------

HASHED = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
from ckptd_shim import GlobalSampler, TrainerShim
torch.manual_seed(0)
parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "bb", "ccc", "dddd")})
extra = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("x", "y")})
optimizer = torch.optim.Adam([{"params": list(part.parameters())} for part in parts.values()])
loader = DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), batch_sampler=GlobalSampler(40, 8, 5))
shim = TrainerShim(model=parts, optimizer=optimizer, dataloader=loader, extra={"ema": extra}, directory=sys.argv[1])
shim.resume()
until = int(sys.argv[2])
while shim.global_step < until:
    for x in loader:
        for part in parts.values():
            x = torch.dropout(part(x), 0.1, True)
        loss = x.pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(shim.global_step + 1, loss.item().hex())
        if shim.step() or shim.global_step == until:
            break
shim.close()
"""


def test_another_hash_seed_changes_nothing(tmp_path):
    def train(directory, until, hash_seed):
        done = subprocess.run(
            [sys.executable, "-c", HASHED, str(directory), str(until)], capture_output=True, text=True, timeout=100,
            check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        return done.stdout

    whole = train(tmp_path / "whole", 8, "1")
    assert whole.count("\n") == 8
    assert train(tmp_path / "parts", 3, "2") + train(tmp_path / "parts", 8, "3") == whole
