"""Where does the data stand, and how is a loader put there again?

Four kinds of loader have a position. A sampler or a stream with `set_position(samples)` is put where the counters say:
that is exact on any number of ranks, however far a loader has prefetched. A sampler or a loader with a state of its own
(torchdata's StatefulDataLoader) keeps one for each rank, so it is exact on the same number of ranks and of loader
workers. Anything else has no position, and is refused: it would begin its epoch again without a word.
"""

from __future__ import annotations

from typing import Any

import torch

from ckptd_shim.errors import SetupError
from ckptd_shim.randomness import derive_seed

_ORDER = ("dataset_size", "global_batch", "seed", "shuffle", "drop_last")
"""What the order of a GlobalSampler depends on, beside the position."""
_KINDS = {
    None: "no loader",
    "position": "a sampler with set_position",
    "stream": "a stream with set_position",
    "sampler": "the sampler's own state",
    "loader": "the loader's own state",
}
_FINISHED = "_iterator_finished"
"""Key of a StatefulDataLoader's state: its next iterator begins a new epoch at once."""


class DataPosition:
    """The training loader, or None.

    Raises:
        SetupError: a loader without a position, or with one that cannot be trusted.
    """

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader
        self.sampler: Any = _sampler_of(dataloader)
        self.stream: Any = _stream_of(dataloader) if self.sampler is None else None
        self.kind = self._kind()
        self._generator = torch.Generator()

    def _kind(self) -> str | None:
        if self.dataloader is None:
            return None
        if hasattr(self.sampler, "set_position"):
            return "position"
        if self.stream is not None:
            return "stream"
        if is_stateful(self.dataloader):
            self._check_order()
            return "loader"
        if self.sampler is not None:
            if getattr(self.dataloader, "num_workers", 0):
                raise SetupError(
                    f"dataloader has {self.dataloader.num_workers} workers, which take indices from "
                    f"{type(self.sampler).__name__} ahead of training, so its state is not where training is: use "
                    "GlobalSampler, a StatefulDataLoader, or num_workers=0"
                )
            return "sampler"
        raise SetupError(
            f"dataloader ({type(self.dataloader).__name__}) has no position, so a resumed run would begin its epoch "
            "again: give it batch_sampler=GlobalSampler(...), give its dataset set_position(samples), use torchdata's "
            "StatefulDataLoader, or keep the data's position in extra="
        )

    def _check_order(self) -> None:
        if getattr(self.dataloader, "num_workers", 0) and not getattr(self.dataloader, "in_order", True):
            raise SetupError("dataloader has in_order=False: which batches came first is not known after a resume")

    @property
    def can_skip(self) -> bool:
        """Whether the data can be put anywhere, not only where it was."""
        return self.kind in ("position", "stream")

    @property
    def accumulation_steps(self) -> int | None:
        """As the sampler shares the batch out; None: it does not say."""
        return getattr(self.sampler, "accumulation_steps", None)

    @property
    def global_batch(self) -> int | None:
        """The sampler's; None: it does not say."""
        return getattr(self.sampler, "global_batch", None)

    def epoch(self, samples: int) -> int:
        """The epoch that training is in after `samples` global samples; at the end of one it is the next."""
        if self.kind == "loader":
            sampler = _epoch_holder(self.dataloader)
            return 0 if sampler is None else int(sampler.epoch) + int(_at_end(self.dataloader))
        source = self.sampler if self.kind == "position" else self.stream
        epoch_of = getattr(source, "epoch_of", None)
        return 0 if epoch_of is None else int(epoch_of(samples))

    def capture(self) -> Any:
        """What this rank needs in order to go on from here; plain values."""
        if self.kind == "position":
            return {name: getattr(self.sampler, name, None) for name in _ORDER}
        if self.kind == "sampler":
            return self.sampler.state_dict()
        if self.kind == "loader":
            state = dict(self.dataloader.state_dict())
            if _FINISHED in state and _at_end(self.dataloader):
                # Taken after the last batch, it would be an epoch with nothing left in it.
                state[_FINISHED] = True
            holder = _epoch_holder(self.dataloader)
            return {
                "workers": getattr(self.dataloader, "num_workers", 0),
                "epoch": None if holder is None else int(holder.epoch),
                "state": state,
            }
        return None

    def differences(self, kind: str | None, saved: Any, *, saved_world: int, same_world: bool) -> list[str]:
        """Why a position of `kind`, which `capture` gave as `saved`, does not fit; one line for each reason."""
        if kind != self.kind:
            return [f"dataloader: saved with {_KINDS.get(kind, kind)}, now {_KINDS[self.kind]}"]
        if kind == "position":
            now = self.capture()
            return [
                f"sampler: saved with {key}={then!r}, now {now.get(key)!r}"
                for key, then in saved.items()
                if then != now.get(key)
            ]
        if kind in ("sampler", "loader") and not same_world:
            line = (
                f"dataloader: {_KINDS[kind]} belongs to one rank each of {saved_world}, and the number of ranks has "
                "changed: use GlobalSampler, or resume on as many ranks as before"
            )
            return [line]
        if kind == "loader" and saved["workers"] != self.dataloader.num_workers:
            line = (
                f"dataloader: saved with num_workers={saved['workers']}, now {self.dataloader.num_workers}, and its "
                "state is split over the workers: give it as many as before"
            )
            return [line]
        return []

    def restore(self, saved: Any, samples: int) -> None:
        """Go on after `samples` global samples, or from what this rank's `capture` gave."""
        if self.kind == "position":
            # The sampler has run ahead of training by what the loader had prefetched; the counters have not.
            self.sampler.set_position(samples)
        elif self.kind == "stream":
            self.stream.set_position(samples)
        elif self.kind == "sampler":
            self.sampler.load_state_dict(saved)
        elif self.kind == "loader":
            holder = _epoch_holder(self.dataloader)
            if saved["epoch"] is not None and holder is not None:
                holder.set_epoch(saved["epoch"])
            self.dataloader.load_state_dict(saved["state"])
            # Makes the iterator now: it draws a random number, and the generators are put back after this.
            self.dataloader.state_dict()
            if saved["state"].get(_FINISHED) and getattr(holder, "next_yielded", None) is not None:
                # Meant for the epoch that is over, it would skip all of the next.
                holder.next_yielded = None

    def seed(self, seed: int, step: int, rank: int) -> None:
        """Give a DataLoader that is put in place by the counters its own generator.

        Each new iterator of a DataLoader draws a number, from torch's global generator unless it has its own. A resumed
        run makes one iterator more than an uninterrupted one, so that one draw would shift every later random number.
        """
        loader = self.dataloader
        if not isinstance(loader, torch.utils.data.DataLoader) or self.kind not in ("position", "stream"):
            return
        if loader.generator is None:
            loader.generator = self._generator
        if loader.generator is self._generator:
            self._generator.manual_seed(derive_seed("loader", seed, step, rank))


def is_stateful(value: Any) -> bool:
    """Whether `value` has state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _sampler_of(dataloader: Any) -> Any:
    """The sampler that holds the position; one inside of a loader with a state of its own is that loader's business."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(dataloader, name, None)
        if hasattr(sampler, "set_position") or (is_stateful(sampler) and not is_stateful(dataloader)):
            return sampler
    return None


def _stream_of(dataloader: Any) -> Any:
    for source in (dataloader, getattr(dataloader, "dataset", None)):
        if hasattr(source, "set_position"):
            return source
    return None


def _epoch_holder(dataloader: Any) -> Any:
    """A DistributedSampler inside of the loader: the epoch is part of its order and of no state_dict."""
    batches = getattr(dataloader, "batch_sampler", None)
    for sampler in (getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def _at_end(dataloader: Any) -> bool:
    """Whether every batch of the epoch has been handed out."""
    iterator = getattr(dataloader, "_iterator", None)
    if iterator is None:
        return False
    if getattr(iterator, "_finished", False):
        return True
    try:
        return bool(iterator._num_yielded >= len(dataloader))
    except (TypeError, AttributeError):  # a stream without a length
        return False
