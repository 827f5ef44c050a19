"""Which checkpoints may be deleted, and why does each of the others stay?

Whatever the rules say, a tier keeps its newest verified commit, what is pinned, in use or protected, and what a living
attempt may still be writing. Names that could not be parsed, and commits of other runs, never get here: unknown is not
garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    suspect: bool = False
    """The run went back from it: it is not resumed from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a tier keeps beyond what is never deleted.

    Raises:
        ValueError: `keep_last` below 1, or a period that is not above zero.
    """

    keep_last: int = 1
    """So many of the newest commits. Pinned ones, suspects, and ones known to be bad take no slot."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What becomes of a directory. One that stays may have several reasons to; the strongest is given."""

    path: str
    doomed: bool
    why: str


def plan(
    inventory: Sequence[Held], rules: Rules, *, protected: Collection[str] = (), live_attempt: int | None = None
) -> list[Doomed]:
    """What may be deleted, in the order to delete it: what was never committed, then commits from the oldest.

    Takes what `judge` takes.
    """
    fates = judge(inventory, rules, protected=protected, live_attempt=live_attempt)
    return [Doomed(path=fate.path, why=fate.why) for fate in fates if fate.doomed]


def judge(
    inventory: Sequence[Held], rules: Rules, *, protected: Collection[str] = (), live_attempt: int | None = None
) -> list[Fate]:
    """The fate of every directory: what was never committed first, then commits from the oldest.

    Tiers in one inventory are planned each for itself. `protected`: paths to keep for reasons of the caller's, such as
    the checkpoint that a launch names; a mapping says the reason. `live_attempt`: the attempt that may be writing;
    None: none lives.
    """
    reasons = protected if isinstance(protected, Mapping) else dict.fromkeys(protected, "protected")
    fates: list[Fate] = []
    by_tier = sorted(inventory, key=lambda held: held.tier)
    for _, tier in groupby(by_tier, key=lambda held: held.tier):
        fates += _judge_tier(list(tier), rules, reasons, live_attempt)
    return fates


def _judge_tier(
    inventory: list[Held], rules: Rules, protected: Mapping[str, str], live_attempt: int | None
) -> list[Fate]:
    def untouchable(held: Held) -> str | None:
        if held.pinned:
            return "pinned"
        return "in use" if held.in_use else protected.get(held.path)

    def fate(held: Held, stays: str | None, why: str) -> Fate:
        return Fate(path=held.path, doomed=stays is None, why=why if stays is None else stays)

    def writing(held: Held) -> str | None:
        # An attempt newer than the living one should not exist; if it does, it is not known to be dead.
        if live_attempt is None or held.attempt < live_attempt:
            return None
        return f"attempt {held.attempt} may be writing it"

    partial = sorted((h for h in inventory if not h.committed), key=lambda held: (held.attempt, held.step, held.path))
    fates = [
        fate(held, untouchable(held) or writing(held), f"attempt {held.attempt} ended before it was committed")
        for held in partial
    ]
    commits = sorted(
        (held for held in inventory if held.committed), key=lambda held: (held.sequence, held.step, held.path)
    )
    if not commits:
        return fates
    kept = _kept(commits, rules)
    return fates + [
        fate(
            held,
            untouchable(held) or kept.get(held.path),
            f"commit {held.sequence} (step {held.step}) is older than what the rules keep"
            + (", and the run went back from it" if held.suspect else ""),
        )
        for held in commits
    ]


def _kept(commits: list[Held], rules: Rules) -> dict[str, str]:
    """Why each commit that the rules keep, or that is the last resort, stays; `commits` from the oldest."""
    sound = [held for held in commits if held.verified is not False and not held.suspect]
    slots = [held for held in sound if not held.pinned][-rules.keep_last :]
    # One that fills no slot, being bad or suspect: while it is among the newest a person may want to look at it.
    oldest_slot = slots[0].sequence if slots else commits[-1].sequence
    recent = "not to be resumed from, kept while it is among the newest"
    kept = {held.path: recent for held in commits if held.sequence >= oldest_slot}
    if rules.keep_every_seconds is not None:
        seconds = rules.keep_every_seconds
        why = f"keep_every {seconds:g} s: the first of its period"
        kept.update(dict.fromkeys(_firsts(sound, lambda held: int(held.created_t // seconds)), why))
    if rules.keep_every_steps is not None:
        period = rules.keep_every_steps
        firsts = _firsts((held for held in sound if held.step >= period), lambda held: held.step // period)
        kept.update(dict.fromkeys(firsts, f"keep_every {{steps: {period}}}: the first of its period"))
    kept.update({held.path: f"one of the newest {rules.keep_last} (keep_last)" for held in slots})
    resort = _last_resort(commits)
    kept[resort.path] = "the newest that is verified" if resort.verified else "the newest"
    return kept


def _last_resort(commits: list[Held]) -> Held:
    """The newest commit known to be good; else the newest that is not known to be bad; else the newest.

    Suspects come after all that are not known to be bad.
    """
    for suspect, verified in ((False, True), (False, None), (True, True), (True, None)):
        for held in reversed(commits):
            if held.suspect is suspect and held.verified is verified:
                return held
    return commits[-1]


def _firsts(commits: Iterable[Held], period: Callable[[Held], int]) -> set[str]:
    """Paths of the first commit in each period. Of one step saved twice, after a rollback, the newer."""
    first: dict[int, Held] = {}
    for held in sorted(commits, key=lambda held: (held.step, -held.sequence)):
        first.setdefault(period(held), held)
    return {held.path for held in first.values()}
