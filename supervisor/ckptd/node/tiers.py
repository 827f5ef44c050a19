"""Committed checkpoints on this node's tiers: which there are, each with what its marker says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.core import events
from ckptd.core.keeping import name_of
from ckptd.tiers import Damaged, NoSuchFile, Pace, Store, StoreError, is_url, open_store, read_marker
from ckptd_shim import contract
from ckptd_shim.digest import crc32c_bytes


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of job.yaml as a node uses it."""

    name: str
    directory: str
    """`<tier path>/<run name>`, or `<tier url>/<run name>`."""
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_every_seconds: float | None = None
    every: int = 1
    """Every how many-th commit of the fastest tier is copied here; of no meaning for the fastest itself."""
    shared: bool = True
    """All nodes see the same files there. False: the directory is this node's own, and holds a part of each commit."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tier:
        """As the daemon sends it."""
        return cls(**data)

    @property
    def remote(self) -> bool:
        """On an object store: a checkpoint has to be fetched before it is resumed from."""
        return is_url(self.directory)

    def store(self) -> Store:
        """This run's part of the tier."""
        return open_store(self.directory)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A directory that looks like a checkpoint. `marker` None: not committed, or its marker cannot be read."""

    path: str
    tier: str
    step: int
    attempt: int
    created: float
    marker: contract.Marker | None
    marker_crc32c: str = ""
    problem: str = ""

    @property
    def sequence(self) -> int:
        return self.marker.sequence if self.marker is not None else 0

    @property
    def name(self) -> str:
        """Under which it lies on every tier."""
        return name_of(self.path)


def marker_key(tier: str, path: str) -> str:
    """What the digest of a checkpoint's marker is known by."""
    return f"{tier}/{name_of(path)}"


def known_markers(history: Iterable[events.Event]) -> dict[str, str]:
    """CRC-32C of the markers of a run's commits and their copies, by `marker_key`, as the ledger has them."""
    return {
        marker_key(event.tier, event.path): event.marker_crc32c
        for event in history
        if isinstance(event, events.SaveCommitted | events.CheckpointCopied)
    }


def scan(
    tier: Tier, known: Mapping[str, str] | None = None, *, store: Store | None = None, pace: Pace | None = None
) -> list[Found]:
    """Every checkpoint directory of a tier, committed or not.

    `known`: CRC-32C of markers by `marker_key`, as the ledger has them from the commits. The marker vouches for every
    other file; only the ledger vouches for the marker.

    Raises:
        StoreError: the tier cannot be read at all.
    """
    store = store or tier.store()
    pace = pace or Pace()
    found = []
    for name in store.names():
        pace.beat()
        step, attempt = contract.parse_checkpoint_dirname(name) or (0, 0)
        path = store.path(name)
        marker, digest, problem, created = None, "", "", 0.0
        try:
            created = store.created(name)
            marker, data = read_marker(store, name, (known or {}).get(marker_key(tier.name, path)))
            digest, created = crc32c_bytes(data), marker.created
        except NoSuchFile:
            pass  # not committed
        except Damaged as error:
            problem = str(error)
        except StoreError as error:
            if tier.remote:
                raise  # it does not answer; that says nothing about the checkpoint
            problem = str(error)
        found.append(
            Found(path=path, tier=tier.name, step=step, attempt=attempt, created=created, marker=marker,
                  marker_crc32c=digest, problem=problem)
        )  # fmt: skip
    return found


def clear_graves(tier: Tier) -> None:
    """Finish deletions that were cut short."""
    tier.store().clear()
