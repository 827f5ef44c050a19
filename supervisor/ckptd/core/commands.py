"""What can be done about a run: the commands that `decisions` gives and the daemon carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptd.core import events


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Append this event, then decide again."""

    event: events.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask a node a question; the answer is an event."""

    node: str
    what: Literal["health", "inventory", "holdings", "sharing"]
    avoid: tuple[str, ...] = ()
    """Checkpoints to pass over while there is another one."""
    suspects: tuple[tuple[int, int | None], ...] = ()
    """Commit sequences, first and last (None: all above), that are not to be resumed from at all."""
    settle: bool = False
    """Do without tiers that cannot be read, where another one has something to go on from."""
    nodes: tuple[str, ...] = ()
    """Who is asked `sharing` at the same time."""
    tiers: tuple[str, ...] = ()
    """And of which tiers."""
    floor: int = 0
    """Commit sequence of what can be resumed from anyway: nothing older is of interest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Tell a node to start its workers of the attempt."""

    node: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Have a node bring the files to itself that its workers of the attempt resume from, where it lacks some."""

    node: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStore:
    """Have the first node of an attempt open the store that the workers of all nodes meet at."""

    node: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Tell a node to leave nothing of the attempt alive, and to say so.

    `grace`: SIGTERM first. `stacks`: have every rank dump its Python stacks before anything else.
    """

    node: str
    attempt: int
    grace: bool
    stacks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Steer:
    """Have the control file of the attempt say this."""

    attempt: int
    save_request: int
    stop_after_save: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearse:
    """Have the newest checkpoint of a tier restored for trial, beside the run. None: the slowest tier."""

    tier: str | None


Command = Record | Ask | Gather | OpenStore | Launch | Stop | Steer | Rehearse
