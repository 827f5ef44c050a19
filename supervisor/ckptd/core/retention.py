"""Which checkpoints may be deleted?

Whatever the rules say, a tier keeps its newest verified commit, what is pinned, in use or protected, and what a living
attempt may still be writing. Names that could not be parsed never get here: unknown is not garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A checkpoint directory on a tier."""

    path: str
    tier: str = ""
    step: int = 0
    sequence: int = 0
    """Commit sequence, which alone says what is newer; of no meaning while not committed."""
    attempt: int = 0
    committed: bool = True
    verified: bool | None = None
    """Every digest matched; False: one did not; None: not checked."""
    created_t: float = 0.0
    """When it was made, seconds; one clock for all of a tier."""
    pinned: bool = False
    in_use: bool = False
    """It is being read, copied or written by the supervisor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a tier keeps beyond what is never deleted.

    Raises:
        ValueError: `keep_last` below 1, or a period that is not above zero.
    """

    keep_last: int = 1
    """So many of the newest commits. Pinned ones and ones known to be bad take no slot."""
    keep_every_steps: int | None = None
    """And the first commit at or after each multiple of so many steps."""
    keep_every_seconds: float | None = None
    """And the first commit of each period of so many seconds."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, is {self.keep_last}")
        for period in (self.keep_every_steps, self.keep_every_seconds):
            if period is not None and not period > 0:
                raise ValueError(f"keep_every must be above zero, is {period}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Doomed:
    """A directory that may be deleted."""

    path: str
    why: str


def plan(
    inventory: Sequence[Held], rules: Rules, *, protected: Collection[str] = (), live_attempt: int | None = None
) -> list[Doomed]:
    """What may be deleted, in the order to delete it: what was never committed, then commits from the oldest.

    Tiers in one inventory are planned each for itself. `protected`: paths to keep for reasons of the caller's, such as
    the checkpoint that a launch names. `live_attempt`: the attempt that may be writing; None: none lives.
    """
    doomed: list[Doomed] = []
    by_tier = sorted(inventory, key=lambda held: held.tier)
    for _, tier in groupby(by_tier, key=lambda held: held.tier):
        doomed += _plan_tier(list(tier), rules, frozenset(protected), live_attempt)
    return doomed


def _plan_tier(
    inventory: list[Held], rules: Rules, protected: frozenset[str], live_attempt: int | None
) -> list[Doomed]:
    def untouchable(held: Held) -> bool:
        return held.pinned or held.in_use or held.path in protected

    doomed = [
        Doomed(path=held.path, why=f"attempt {held.attempt} ended before it was committed")
        for held in sorted(inventory, key=lambda held: (held.attempt, held.step, held.path))
        # An attempt newer than the living one should not exist; if it does, it is not known to be dead.
        if not held.committed and not untouchable(held) and (live_attempt is None or held.attempt < live_attempt)
    ]
    commits = sorted(
        (held for held in inventory if held.committed), key=lambda held: (held.sequence, held.step, held.path)
    )
    if not commits:
        return doomed
    sound = [held for held in commits if held.verified is not False]
    kept = {_last_resort(commits).path}
    slots = [held for held in sound if not held.pinned][-rules.keep_last :]
    # A commit known to be bad fills no slot, but while it is among the newest a person may want to look at it.
    oldest_slot = slots[0].sequence if slots else commits[-1].sequence
    kept.update(held.path for held in commits if held.sequence >= oldest_slot)
    if rules.keep_every_steps is not None:
        period = rules.keep_every_steps
        kept.update(_firsts((held for held in sound if held.step >= period), lambda held: held.step // period))
    if rules.keep_every_seconds is not None:
        seconds = rules.keep_every_seconds
        kept.update(_firsts(sound, lambda held: int(held.created_t // seconds)))
    return doomed + [
        Doomed(path=held.path, why=f"commit {held.sequence} (step {held.step}) is older than what the rules keep")
        for held in commits
        if held.path not in kept and not untouchable(held)
    ]


def _last_resort(commits: list[Held]) -> Held:
    """The newest commit known to be good; else the newest that is not known to be bad; else the newest."""
    for wanted in (True, None, False):
        for held in reversed(commits):
            if held.verified is wanted:
                return held
    raise AssertionError("no commits")


def _firsts(commits: Iterable[Held], period: Callable[[Held], int]) -> set[str]:
    """Paths of the first commit in each period. Of one step saved twice, after a rollback, the newer."""
    first: dict[int, Held] = {}
    for held in sorted(commits, key=lambda held: (held.step, -held.sequence)):
        first.setdefault(period(held), held)
    return {held.path for held in first.values()}
