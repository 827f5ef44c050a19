"""Which checkpoints have been restored for trial, when is the next one due, and is what came of it good enough?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptd.core import events
from ckptd.core.commands import Command, Rehearse
from ckptd.core.state import RunState, Status

SIGMAS = 8.0
COARSE = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Drills:
    """The drills of a run so far."""

    last: Mapping[str, events.Drilled] = field(default_factory=dict)
    """By tier."""
    last_good: Mapping[str, events.Drilled] = field(default_factory=dict)
    newest: events.Drilled | None = None
    since: float | None = None
    """When drills were first due from: the first commit, on the run's clock."""


def apply(drills: Drills, event: events.Event) -> Drills:
    """The drills after `event`."""
    if isinstance(event, events.SaveCommitted) and drills.since is None:
        return dataclasses.replace(drills, since=event.t)
    if not isinstance(event, events.Drilled):
        return drills
    good = {**drills.last_good, event.tier: event} if event.ok else drills.last_good
    return dataclasses.replace(drills, last={**drills.last, event.tier: event}, last_good=good, newest=event)


def decide(drills: Drills, state: RunState, t: float) -> list[Command]:
    """A drill, when one is due: `drill.every` after the last, or after the first commit."""
    every = state.policy.drill_every_s
    if every is None or state.status is not Status.TRAINING or drills.since is None:
        return []
    last = drills.since if drills.newest is None else drills.newest.t
    return [Rehearse(tier=state.policy.drill_tier)] if t - last >= every else []


def judge(
    *, loss: float | None, expected: float | None, compared: str, tolerance: float, deviation: float | None = None
) -> str:
    """What is wrong with a restored state, "": nothing.

    A validation loss may be worse by `tolerance`, a share of it. A training loss is another batch's than the one that it
    is held against, which says something only beside how much such losses differ: by `SIGMAS` of their standard
    deviations, or, where that is not known, by `COARSE` times itself.

    Args:
        loss: of the restored state; None: it was not finite, or no number was given.
        expected: what it was when it was saved; None: nobody knows, and any finite loss will do. Better is never wrong.
        compared: `validation` or `training`.
        tolerance: as `drill.tolerance`.
        deviation: of training losses, robustly.
    """
    if loss is None or not math.isfinite(loss):
        return "the restored state has no finite loss"
    if expected is None:
        return ""
    size = max(abs(expected), 1e-12)
    allowed = tolerance * size
    if compared == "training":
        allowed = max(allowed, COARSE * size if deviation is None else SIGMAS * deviation)
    if loss - expected <= allowed:
        return ""
    return f"the restored state's loss is {loss:.6g}, {expected:.6g} was saved with it ({compared}), and {allowed:.3g} more is allowed"
