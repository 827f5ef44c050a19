"""Which files does this node lack of the checkpoint that its workers are to resume from, and which other node gives them?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ckptd.core.holdings import from_ranges
from ckptd.node.inuse import InUse
from ckptd.node.peers import Peer
from ckptd.node.shelf import Commit, Shelf, commit_of, needed_by
from ckptd.node.tiers import Tier
from ckptd.tiers import Pace, StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Another node, as the daemon knows it."""

    node: str
    host: str
    port: int
    held: frozenset[int] = frozenset()
    """Places of the files that it has of the commit in question."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """As the daemon sends it."""
        return cls(
            node=str(data["node"]), host=str(data["host"]), port=int(data["port"]),
            held=frozenset(from_ranges(data.get("held", ()))),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be here."""

    tier: Tier
    name: str
    marker_crc32c: str
    ranks: Sequence[int]
    """That will run here."""
    world_size: int
    everything: bool
    """All files of tensors, whatever the ranks are thought to need."""
    sources: Sequence[Source]
    """Other nodes that have some of it, the first to be asked first."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What it took."""

    fetched: int
    bytes: int
    seconds: float


Dial = Callable[[Source], Peer]
"""Connects to another node's agent. Raises StoreError."""


def gather(wanted: Wanted, *, shelf: Shelf, dial: Dial, in_use: InUse, pace: Pace) -> Gathered:
    """Have every file here that the node's ranks need, verified. What is here already is read, unless it was before.

    Raises:
        StoreError: says which file nobody gives.
    """
    begun = time.monotonic()
    store = wanted.tier.store()
    with in_use.hold(store.path(wanted.name)):
        commit = _commit(wanted, dial)
        marker = commit.marker
        needed = needed_by(marker, wanted.ranks, wanted.world_size, everything=wanted.everything)
        try:
            having, bad = shelf.held(store, wanted.name, marker, pace, only=needed)
        except FileNotFoundError:
            having, bad = set(), []
        for problem in bad:
            log.warning("%s; it is fetched from another node", problem)
        lacking = needed - having
        problems: list[str] = []
        moved = 0
        for source in wanted.sources:
            theirs = lacking & source.held
            if not theirs:
                continue
            try:
                with dial(source) as peer:
                    # One file after the other: what came from a node that then fails need not come again.
                    for place in sorted(theirs):
                        moved += shelf.fetch(commit, [place], peer, pace=pace)
                        lacking.discard(place)
            except StoreError as error:
                problems.append(str(error))
            if not lacking:
                break
        if lacking:
            names = ", ".join(marker.files[place].name for place in sorted(lacking)[:3])
            why = "; ".join(problems) or "no living node has it"
            raise StoreError(f"{wanted.name} cannot be resumed from here, {names} is missing: {why}")
        shelf.mark(commit)
    total = len(needed - having)
    return Gathered(fetched=total, bytes=moved, seconds=time.monotonic() - begun)


def _commit(wanted: Wanted, dial: Dial) -> Commit:
    problems: list[str] = []
    try:
        return commit_of(wanted.tier, wanted.name, wanted.marker_crc32c)
    except StoreError as error:
        problems.append(str(error))
    for source in wanted.sources:
        try:
            with dial(source) as peer:
                return commit_of(wanted.tier, wanted.name, wanted.marker_crc32c, peer)
        except StoreError as error:
            problems.append(str(error))
    raise StoreError(f"{wanted.name}: its marker is nowhere: {'; '.join(problems)}")
