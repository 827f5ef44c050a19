"""What is held for a run's commits, and what against them? Pins, and the branches that the run went back from.

A commit is known by the name of its directory, `step_000001234.a0003`, which is the same on every tier.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import events

Range = tuple[int, int | None]
"""Commit sequences from the first to the last; None: to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A commit that stays until somebody unpins it."""

    step: int
    path: str
    label: str = ""
    source: str = ""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """Built by the functions below alone."""

    pins: Mapping[str, Pin] = field(default_factory=dict)
    """By name of the directory, in the order in which they were pinned."""
    left: tuple[tuple[int, int], ...] = ()
    """Commit sequences, first and last, of branches that the run went back from."""
    leaving: int | None = None
    """The run has gone back to this commit sequence and launched nothing since: whatever is above it is suspect."""

    def suspect(self, sequence: int) -> bool:
        """Whether a commit lies on a branch that the run went back from."""
        return is_suspect(self.suspects(), sequence)

    def suspects(self) -> tuple[Range, ...]:
        """The suspect sequences, first and last of each branch."""
        return self.left if self.leaving is None else (*self.left, (self.leaving + 1, None))


def is_suspect(ranges: Iterable[Sequence[int | None]], sequence: int) -> bool:
    """`Keeping.suspect` by what `Keeping.suspects` gave, which may have travelled as JSON."""
    return any((first or 0) <= sequence and (last is None or sequence <= last) for first, last in ranges)


def name_of(path: str) -> str:
    """What a checkpoint's path or URL is known by."""
    return posixpath.basename(path.rstrip("/"))


def pinned(keeping: Keeping, event: events.CheckpointPinned) -> Keeping:
    """After a pin, or the end of one."""
    pins: dict[str, Pin] = {name: pin for name, pin in keeping.pins.items() if name != name_of(event.path)}
    if event.pinned:
        pins[name_of(event.path)] = Pin(
            step=event.step, path=event.path, label=event.label, source=event.source, at=event.at
        )
    return dataclasses.replace(keeping, pins=pins)


def rolled_back(keeping: Keeping, event: events.RolledBack) -> Keeping:
    """The commits after the event's are suspect, those too that are still being written."""
    leaving = event.sequence if keeping.leaving is None else min(event.sequence, keeping.leaving)
    return dataclasses.replace(keeping, leaving=leaving)


def launched(keeping: Keeping, newest_sequence: int) -> Keeping:
    """An attempt begins, whose commits are numbered from above `newest_sequence`: no other one is written any more."""
    if keeping.leaving is None:
        return keeping
    left = keeping.left
    if newest_sequence > keeping.leaving:
        left = (*left, (keeping.leaving + 1, newest_sequence))
    return dataclasses.replace(keeping, left=left, leaving=None)


def pins_as_json(keeping: Keeping) -> list[dict[str, Any]]:
    """The pins for status and listings, oldest first."""
    return [{"name": name, **dataclasses.asdict(pin)} for name, pin in keeping.pins.items()]
