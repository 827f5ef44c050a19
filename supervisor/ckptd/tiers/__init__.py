"""Where committed checkpoints live: one interface to directories and object stores, and copies from one to another."""

from __future__ import annotations

from ckptd.tiers.base import Damaged, NoSuchFile, Store, StoreError
from ckptd.tiers.copying import Copied, Occupied, copy_checkpoint, read_marker, verify
from ckptd.tiers.objects import ObjectStore
from ckptd.tiers.posix import PosixStore
from ckptd.tiers.watched import Abandoned, Crew, Pace, Stalled

__all__ = [
    "Abandoned",
    "Copied",
    "Crew",
    "Damaged",
    "NoSuchFile",
    "ObjectStore",
    "Occupied",
    "Pace",
    "PosixStore",
    "Stalled",
    "Store",
    "StoreError",
    "copy_checkpoint",
    "is_url",
    "open_store",
    "read_marker",
    "verify",
]


def is_url(location: str) -> bool:
    """Whether a tier's location is an object store's and not a directory."""
    return "://" in location


def open_store(location: str) -> Store:
    """The store at `location`, one run's part of a tier: an absolute path, or a URL. Nothing is asked of it yet."""
    return ObjectStore(location) if is_url(location) else PosixStore(location)
