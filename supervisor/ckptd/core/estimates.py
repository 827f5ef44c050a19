"""What do the events so far say about M, C, U, R and the step time, and how sure is that?

The failure rate is per device-second: a Gamma prior from job.yaml, updated by failures and exposure, with a memory that
grows shorter while that predicts better (`regimes`). So an M that was learnt on one number of devices holds for any
other. What saves, restarts and steps cost is in `costs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptd.core import costs, regimes
from ckptd.core import events as ev
from ckptd.core.costs import Costs
from ckptd.core.gamma import gamma_quantile
from ckptd.core.policy import Policy
from ckptd.core.records import replace
from ckptd.core.regimes import Regimes

CREDIBLE = 0.90
"""Probability that the published interval of M holds M, given prior and model."""
MAX_MTBF_S = 1e12
"""Nothing is known to fail more rarely than this (some 30,000 years)."""
MERGE_S = 30.0
"""An interruption so soon after one that counted is the same event, and so is one before the first step after it: R, which
is the time from the first of them to the first step, has its price in already."""
SEVERITY_PRIOR: Mapping[str, float] = {"process": 0.75, "device": 0.10, "node": 0.10, "code": 0.05}
"""Failures of each severity among the first, before any was seen: about three quarters of the faults in the field are over
with a restart of the processes (DLRover). One failure's worth in all."""

_MOST_EXPOSURE = 1e280


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What happened that counts as a failure, and what it says about the rate."""

    regimes: Regimes = field(default_factory=lambda: regimes.begin(1.0, 50_000 * 3600.0))
    looked_at: float = 0.0
    """Exposure at the newest event that counted."""
    count: int = 0
    by_severity: Mapping[str, int] = field(default_factory=dict)
    """Of the failures that counted; an event is as severe as the first of its interruptions."""
    planned: int = 0
    merged: int = 0
    """Interruptions that belonged to an event that had counted already."""
    event_t: float = -math.inf
    """`t` of the newest event that counted."""
    stepped: bool | None = None
    """A step was done since; None: none ever was, as in a script without a shim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """State of the fold. Bounded, never changed in place."""

    failures: Failures = field(default_factory=Failures)
    costs: Costs = field(default_factory=Costs)
    exposure_device_s: float = 0.0
    """Device-seconds of attempts that are over."""
    up_since: float | None = None
    """`t` of the launch of the attempt that is up; None: none is."""
    t: float = 0.0
    """The newest `t` of an event that mattered here."""
    attempt: int | None = None
    world_size: int = 0
    nodes: frozenset[str] = frozenset()
    """Nodes on which the attempt still lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is believed now. Seconds; None: not observed yet."""

    mtbf_s: float
    """Of the whole job at `world_size`: the inverse of the posterior mean rate."""
    mtbf_low_s: float
    mtbf_high_s: float
    stall_s: float | None = None
    """C: what training pays for a save, the slowdown of its steps during the upload included."""
    restart_s: float | None = None
    """R of an average failure: each kind's median, weighted by how often the kind came."""
    upload_s: float | None = None
    step_s: float | None = None
    failures: int = 0
    """Failures that count: neither planned nor failures to launch, and one event once."""
    planned: int = 0
    exposure_device_s: float = 0.0
    stall_count: int = 0
    world_size: int = 1
    mtbf_long_run_s: float | None = None
    """What M would be if the rate had never changed."""
    memory: float = 1.0
    """Belief that it has not: the weight of the model that forgets nothing."""


def initial() -> Estimates:
    """The state before the first event."""
    return Estimates()


def apply(state: Estimates, event: ev.Event) -> Estimates:
    """The state after `event`."""
    match event:
        case ev.SaveCommitted():
            return replace(state, costs=costs.saved(state.costs, event))
        case ev.Progress():
            return replace(state, costs=costs.timed(state.costs, event))
        case ev.Restarted() if not event.planned:
            return replace(state, costs=costs.restarted(state.costs, event))
        case ev.FirstStep():
            return replace(state, failures=replace(state.failures, stepped=True))
        case ev.Interrupted():
            state = _at(state, event)
            return replace(state, failures=_interrupted(state, event))
        case ev.AttemptLaunched():
            return _launched(_at(state, event), event)
        case ev.AttemptEnded():
            return _ended(_at(state, event), event)
        case ev.RunEnded():
            return _down(_at(state, event))
        case ev.DaemonStarted():
            return replace(_at(state, event), failures=_begun(state.failures, event))
        case _:
            return state


def estimate(state: Estimates, *, t: float, world_size: int, bounds: bool = True) -> Estimate:
    """What is believed at `t` about a job on `world_size` devices. Every number is finite.

    `bounds` False leaves out the work for the credible interval, which no decision reads: low and high are the mean.
    """
    exposure, failures = _exposure(state, t), state.failures
    rate = regimes.rate(failures.regimes, exposure - failures.looked_at)
    devices = max(world_size, 1)
    mtbf_s = low = high = _mtbf(rate.mean * devices)
    if bounds:
        # The mixture's own quantiles need a search; the Gamma with its mean and variance is near enough for a bound.
        spread = rate.variance / rate.mean / rate.mean
        shape = max(1.0 / spread, regimes.LEAST_SHAPE) if spread > 0 else 1e5
        scale, tail = rate.mean / shape * devices, (1 - CREDIBLE) / 2
        low, high = (_mtbf(gamma_quantile(p, min(shape, 1e5)) * scale) for p in (1 - tail, tail))
    return Estimate(
        mtbf_s=mtbf_s,
        mtbf_low_s=low,
        mtbf_high_s=high,
        stall_s=state.costs.stall_s,
        restart_s=state.costs.restart_s,
        upload_s=state.costs.upload_s,
        step_s=state.costs.step_s,
        failures=failures.count,
        planned=failures.planned,
        exposure_device_s=exposure,
        stall_count=state.costs.stall_count,
        world_size=devices,
        mtbf_long_run_s=_mtbf(rate.long_run * devices),
        memory=rate.memory,
    )


def rates_by_severity(state: Estimates, *, t: float, world_size: int) -> dict[str, float]:
    """Failures per second of a job on `world_size` devices at `t`, by severity; they sum to 1/M.

    The present rate, divided in the proportion of the failures seen and `SEVERITY_PRIOR` (a Dirichlet posterior mean).
    """
    total = 1.0 / estimate(state, t=t, world_size=world_size, bounds=False).mtbf_s
    seen = state.failures.by_severity
    weights = {n: SEVERITY_PRIOR.get(n, 0.0) + seen.get(n, 0) for n in (*SEVERITY_PRIOR, *seen)}
    whole = math.fsum(weights.values())
    return {name: total * weight / whole for name, weight in weights.items()}


# --- the parts of the fold ----------------------------------------------------------------------------------------------


def _mtbf(rate: float) -> float:
    return min(1.0 / rate, MAX_MTBF_S) if rate > 1.0 / MAX_MTBF_S else MAX_MTBF_S


def _begun(failures: Failures, event: ev.DaemonStarted) -> Failures:
    """The prior of job.yaml counts until the first failure: what was learnt under one is not thrown away by another."""
    if failures.count:
        return failures
    policy = Policy.from_dict(event.policy)
    return replace(failures, regimes=regimes.begin(policy.prior_failures, policy.prior_device_seconds))


def _at(state: Estimates, event: ev.Event) -> Estimates:
    return replace(state, t=event.t) if event.t > state.t and math.isfinite(event.t) else state


def _exposure(state: Estimates, t: float) -> float:
    if state.up_since is None:
        return state.exposure_device_s
    until = max(t, state.t) if math.isfinite(t) else state.t
    spent = state.exposure_device_s + max(0.0, until - state.up_since) * max(state.world_size, 0)
    return min(spent, _MOST_EXPOSURE)  # a time that makes no sense must not make every estimate infinite


def _down(state: Estimates) -> Estimates:
    return replace(state, exposure_device_s=_exposure(state, state.t), up_since=None, nodes=frozenset())


def _launched(state: Estimates, event: ev.AttemptLaunched) -> Estimates:
    state, stale = _down(state), state.costs
    if event.world_size != state.world_size:
        stale = replace(stale, steps_stale=True)
    return replace(
        state,
        up_since=state.t,
        attempt=event.attempt,
        costs=stale,
        world_size=event.world_size,
        nodes=frozenset(event.placement),
    )


def _ended(state: Estimates, event: ev.AttemptEnded) -> Estimates:
    """The attempt is over when it is over on its last node."""
    if event.attempt not in (None, state.attempt):
        return state
    left = frozenset[str]() if event.node is None else state.nodes - {event.node}
    return replace(state, nodes=left) if left else _down(state)


def _interrupted(state: Estimates, event: ev.Interrupted) -> Failures:
    failures = state.failures
    if event.planned:
        return replace(failures, planned=failures.planned + 1)
    if event.severity == "launch":
        return failures
    when = event.t if math.isfinite(event.t) else state.t
    if failures.count and (failures.stepped is False or when - failures.event_t < MERGE_S):
        return replace(failures, merged=failures.merged + 1)
    exposure = _exposure(state, state.t)
    return replace(
        failures,
        regimes=regimes.failed(failures.regimes, exposure - failures.looked_at),
        looked_at=exposure,
        count=failures.count + 1,
        by_severity={**failures.by_severity, event.severity: failures.by_severity.get(event.severity, 0) + 1},
        event_t=when,
        stepped=None if failures.stepped is None else False,
    )
