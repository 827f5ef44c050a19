"""What is known of each tier: what it holds, what a copy to it takes, whether it fails, how often one goes there?"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core import promotion
from ckptd.core.policy import Policy
from ckptd.core.promotion import Promote

WINDOW = 16
"""Copies whose time is remembered."""
MIRRORS_UNDER_WAY = 4
"""Commits whose mirroring is followed; one that is overtaken is never finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierState:
    """One tier."""

    name: str
    told: Promote | None = None
    """`promote` of job.yaml."""
    newest_step: int | None = None
    newest_sequence: int = 0
    newest_at: float | None = None
    """Wall clock of its newest commit."""
    copies: int = 0
    """Checkpoints that were committed there, saves or copies."""
    copy_s: tuple[float, ...] = ()
    error: str = ""
    """Why the last save or copy failed; empty: it did not."""
    attempts: int = 0
    """How often in a row it failed."""
    every: int | None = None
    """n in commits of the fastest tier; None: not decided yet."""

    mirrored_step: int | None = None
    """The newest commit of which two nodes have every file, where each node has its own directory."""
    mirrored_sequence: int = 0
    mirrored_path: str = ""
    mirroring: tuple[tuple[int, frozenset[str]], ...] = ()
    """Commit sequences of which some nodes' parts have a second copy, and which nodes' these are."""

    @property
    def failing(self) -> bool:
        return bool(self.error)


TierBook = tuple[TierState, ...]
"""Fastest first."""


def apply(book: TierBook, event: ev.Event) -> TierBook:
    """The book after `event`."""
    match event:
        case ev.DaemonStarted():
            return _started(book, Policy.from_dict(event.policy))
        case ev.SaveCommitted():
            return _change(book, event.tier, lambda tier: _committed(tier, event))
        case ev.CheckpointCopied():
            return _change(
                book, event.tier,
                lambda tier: dataclasses.replace(
                    _committed(tier, event), copy_s=(*tier.copy_s[1 - WINDOW :], max(0.0, event.seconds))
                ),
            )  # fmt: skip
        case ev.CheckpointMirrored():
            return _change(book, event.tier, lambda tier: _mirrored(tier, event))
        case ev.SaveFailed():
            return _change(book, event.tier, lambda tier: _failed(tier, event.error, tier.attempts + 1))
        case ev.CopyFailed():
            return _change(book, event.tier, lambda tier: _failed(tier, event.error, event.attempts))
        case _:
            return book


def decided(book: TierBook, *, interval_s: float | None, rates: Mapping[str, float]) -> TierBook:
    """The book with n of each tier as it should be now; small changes are left."""
    found = promotion.every(
        [tier.told for tier in book],
        [statistics.median(tier.copy_s) if tier.copy_s else None for tier in book],
        interval_s=interval_s, rates=rates,
    )  # fmt: skip
    return tuple(
        dataclasses.replace(tier, every=n) if promotion.worth_moving(tier.every, n) else tier
        for tier, n in zip(book, found, strict=True)
    )


def newest_sequences(book: TierBook) -> dict[str, int]:
    """The highest commit sequence on each tier that has any."""
    return {tier.name: tier.newest_sequence for tier in book if tier.newest_sequence}


def _started(book: TierBook, policy: Policy) -> TierBook:
    """Tiers as job.yaml has them now: it may have been changed between two starts."""
    known = {tier.name: tier for tier in book}
    return tuple(
        dataclasses.replace(
            known.get(str(t["name"]), TierState(name=str(t["name"]))), told=t.get("promote"), every=None
        )
        for t in policy.tiers
    )


def _change(book: TierBook, name: str, how: Callable[[TierState], TierState]) -> TierBook:
    return tuple(how(tier) if tier.name == name else tier for tier in book)


def _committed(tier: TierState, event: ev.SaveCommitted | ev.CheckpointCopied) -> TierState:
    tier = dataclasses.replace(tier, copies=tier.copies + 1, error="", attempts=0)
    if event.sequence < tier.newest_sequence:
        return tier
    return dataclasses.replace(
        tier, newest_step=event.step, newest_sequence=event.sequence, newest_at=event.at or tier.newest_at
    )


def _failed(tier: TierState, error: str, attempts: int) -> TierState:
    return dataclasses.replace(tier, error=error or "unknown", attempts=attempts)


def _mirrored(tier: TierState, event: ev.CheckpointMirrored) -> TierState:
    under_way = dict(tier.mirroring)
    parts = under_way.get(event.sequence, frozenset()) | {event.source}
    tier = dataclasses.replace(tier, error="", attempts=0)
    if len(parts) < event.nodes:
        under_way[event.sequence] = parts
        newest = sorted(under_way.items())[-MIRRORS_UNDER_WAY:]
        return dataclasses.replace(tier, mirroring=tuple(newest))
    if event.sequence < tier.mirrored_sequence:
        return tier
    return dataclasses.replace(
        tier, mirrored_step=event.step, mirrored_sequence=event.sequence, mirrored_path=event.path,
        mirroring=tuple((sequence, of) for sequence, of in under_way.items() if sequence > event.sequence),
    )  # fmt: skip
