"""What do a save, a restart and a step of this run cost?

Medians over the newest observations: they follow a change within a few, and an outlier does not move them. The first
save of an attempt finds cold buffers and counts only until there is another.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptd.core import events as ev

WINDOW = 16
"""Observations of a kind that are remembered."""
RESTART_PARTS = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """State of the fold. Seconds. Bounded, never changed in place."""

    stalls: tuple[float, ...] = ()
    """Of the newest saves but for the first of each attempt."""
    cold_stalls: tuple[float, ...] = ()
    uploads: tuple[float, ...] = ()
    cold_uploads: tuple[float, ...] = ()
    stall_count: int = 0
    slowdowns: tuple[float, ...] = ()
    """Training that an upload cost, by the steps beside it; signed, since it is measured against noise."""
    slowdown_total_s: float = 0.0
    """Their sum; it is in no phase of the account, whose steps just took longer."""
    last_save: tuple[int | None, int] | None = None
    restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Newest R of each kind, unplanned: `process/warm`, `node/cold`, ..."""
    restart_counts: Mapping[str, int] = field(default_factory=dict)
    restart_parts: tuple[tuple[float, ...], ...] = ()
    """Of the newest restarts, in the order of `RESTART_PARTS`."""
    steps: tuple[float, ...] = ()
    steps_stale: bool = False
    """The world size changed since `steps` were timed: they serve until the first new one."""

    @property
    def stall_s(self) -> float | None:
        """C: what training pays for a save, the slowdown of its steps during the upload included; None: no save yet."""
        stall = _median(self.stalls or self.cold_stalls)
        return None if stall is None else stall + max(0.0, _median(self.slowdowns) or 0.0)

    @property
    def upload_s(self) -> float | None:
        """U: from the start of a save to its commit."""
        return _median(self.uploads or self.cold_uploads)

    @property
    def step_s(self) -> float | None:
        return _median(self.steps)

    @property
    def restart_s(self) -> float | None:
        """R of an average failure: each kind's median, weighted by how often the kind came."""
        if not self.restarts:
            return None
        counts = self.restart_counts
        spent = math.fsum(counts[kind] * (_median(seen) or 0.0) for kind, seen in self.restarts.items())
        return min(spent / sum(counts.values()), sys.float_info.max)

    def restart_by_kind(self) -> dict[str, tuple[float, int]]:
        """Median R and number of restarts of each kind: `<severity>/<warm or cold>`."""
        return {kind: (_median(seen) or 0.0, self.restart_counts[kind]) for kind, seen in self.restarts.items()}

    def restart_by_phase(self) -> dict[str, float]:
        """Where the time of the newest restarts went: mean of each of `RESTART_PARTS`; empty: none was seen."""
        columns = zip(*self.restart_parts, strict=True)
        return {name: statistics.fmean(column) for name, column in zip(RESTART_PARTS, columns, strict=False)}


def saved(costs: Costs, event: ev.SaveCommitted) -> Costs:
    """Count a save once, though each tier that it reaches commits it again."""
    save = (event.attempt, event.step)
    if costs.last_save == save:
        return costs
    cold = costs.last_save is None or costs.last_save[0] != event.attempt
    if cold:
        costs = replace(
            costs,
            cold_stalls=_seen(costs.cold_stalls, event.stall_s),
            cold_uploads=_seen(costs.cold_uploads, event.upload_s),
        )
    if event.slowdown_s and abs(event.slowdown_s) < 1e300:  # 0: not known
        costs = replace(
            costs,
            slowdowns=_seen(costs.slowdowns, event.slowdown_s, least=-math.inf),
            slowdown_total_s=max(-1e300, min(costs.slowdown_total_s + event.slowdown_s, 1e300)),
        )
    return replace(
        costs,
        stalls=costs.stalls if cold else _seen(costs.stalls, event.stall_s),
        uploads=costs.uploads if cold else _seen(costs.uploads, event.upload_s),
        stall_count=costs.stall_count + 1,
        last_save=save,
    )


def timed(costs: Costs, event: ev.Progress) -> Costs:
    """Note the step time that a sign of life tells, if it does."""
    kept = () if costs.steps_stale else costs.steps
    seen = _seen(kept, event.step_s, least=1e-9)
    return costs if seen is kept else replace(costs, steps=seen, steps_stale=False)


def restarted(costs: Costs, event: ev.Restarted) -> Costs:
    """Note an unplanned restart under its kind."""
    kind = f"{event.severity}/{'warm' if event.warm else 'cold'}"
    before = costs.restarts.get(kind, ())
    seen = _seen(before, event.total_s)
    if seen is before:
        return costs
    parts = tuple(getattr(event, name) for name in RESTART_PARTS)
    known = all(math.isfinite(part) and part >= 0 for part in parts)
    return replace(
        costs,
        restarts={**costs.restarts, kind: seen},
        restart_counts={**costs.restart_counts, kind: costs.restart_counts.get(kind, 0) + 1},
        restart_parts=(*costs.restart_parts[1 - WINDOW :], parts) if known else costs.restart_parts,
    )


def _seen(values: tuple[float, ...], value: float | None, *, least: float = 0.0) -> tuple[float, ...]:
    if value is None or not math.isfinite(value) or value < least:
        return values
    return (*values[1 - WINDOW :], value)


def _median(values: tuple[float, ...]) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else ordered[half - 1] / 2 + ordered[half] / 2
