"""What do the events so far say about M, C, U, R and the step time, and how sure is that?

The failure rate is per device-second and has a Gamma prior from job.yaml; failures and exposure update it, so an M that
was learnt on one number of devices holds for any other. The rest are medians over the newest observations: they follow
a change within a few, and an outlier does not move them.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from dataclasses import dataclass, replace

from ckptd.core import events as ev
from ckptd.core.interval import MAX_MTBF_S
from ckptd.core.policy import Policy

WINDOW = 16
"""Observations of a kind that are remembered."""
CREDIBLE = 0.90
"""Probability that the published interval of M holds M, given prior and model."""

_LEAST_SHAPE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """State of the fold. Bounded, never changed in place."""

    prior_failures: float = 1.0
    prior_device_seconds: float = 50_000 * 3600.0
    failures: int = 0
    planned: int = 0
    exposure_device_s: float = 0.0
    """Device-seconds of attempts that are over."""
    up_since: float | None = None
    """`t` of the launch of the attempt that is up; None: none is."""
    t: float = 0.0
    attempt: int | None = None
    world_size: int = 0
    nodes: frozenset[str] = frozenset()
    """Nodes on which the attempt still lives."""
    stalls: tuple[float, ...] = ()
    stall_count: int = 0
    uploads: tuple[float, ...] = ()
    last_save: tuple[int | None, int] | None = None
    restarts: tuple[float, ...] = ()
    steps: tuple[float, ...] = ()
    steps_stale: bool = False
    """The world size changed since `steps` were timed: they serve until the first new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is believed now. Seconds; None: not observed yet."""

    mtbf_s: float
    """Of the whole job at `world_size`: the inverse of the posterior mean rate."""
    mtbf_low_s: float
    mtbf_high_s: float
    stall_s: float | None = None
    restart_s: float | None = None
    upload_s: float | None = None
    step_s: float | None = None
    failures: int = 0
    """Interruptions that count: neither planned nor failures to launch."""
    planned: int = 0
    exposure_device_s: float = 0.0
    stall_count: int = 0
    world_size: int = 1


def initial() -> Estimates:
    """The state before the first event."""
    return Estimates()


def apply(state: Estimates, event: ev.Event) -> Estimates:
    """The state after `event`."""
    if math.isfinite(event.t) and event.t > state.t:
        state = replace(state, t=event.t)
    match event:
        case ev.DaemonStarted():
            policy = Policy.from_dict(event.policy)
            return replace(
                state, prior_failures=policy.prior_failures, prior_device_seconds=policy.prior_device_seconds
            )
        case ev.AttemptLaunched():
            state = _down(state)
            return replace(
                state,
                up_since=state.t,
                attempt=event.attempt,
                steps_stale=state.steps_stale or event.world_size != state.world_size,
                world_size=event.world_size,
                nodes=frozenset(event.placement),
            )
        case ev.AttemptEnded():
            return _ended(state, event)
        case ev.RunEnded():
            return _down(state)
        case ev.Interrupted():
            if event.planned:
                return replace(state, planned=state.planned + 1)
            return state if event.severity == "launch" else replace(state, failures=state.failures + 1)
        case ev.Progress():
            kept = () if state.steps_stale else state.steps
            seen = _seen(kept, event.step_s, least=1e-9)
            return state if seen is kept else replace(state, steps=seen, steps_stale=False)
        case ev.SaveCommitted():
            return _saved(state, event)
        case ev.Restarted() if not event.planned:
            return replace(state, restarts=_seen(state.restarts, event.total_s))
        case _:
            return state


def estimate(state: Estimates, *, t: float, world_size: int) -> Estimate:
    """What is believed at `t` about a job on `world_size` devices. Every number is finite."""
    shape = max(state.prior_failures + state.failures, _LEAST_SHAPE)
    exposure = _exposure(state, t)
    total = max(state.prior_device_seconds + exposure, 1.0)
    devices = max(world_size, 1)

    def mtbf(rate_times_total: float) -> float:
        return min(total / (rate_times_total * devices), MAX_MTBF_S) if rate_times_total > 0 else MAX_MTBF_S

    tail = (1 - CREDIBLE) / 2
    return Estimate(
        mtbf_s=mtbf(shape),
        mtbf_low_s=mtbf(gamma_quantile(1 - tail, shape)),
        mtbf_high_s=mtbf(gamma_quantile(tail, shape)),
        stall_s=_stall(state),
        restart_s=_median(state.restarts),
        upload_s=_median(state.uploads),
        step_s=_median(state.steps),
        failures=state.failures,
        planned=state.planned,
        exposure_device_s=exposure,
        stall_count=state.stall_count,
        world_size=devices,
    )


# --- the parts of the fold ----------------------------------------------------------------------------------------------


def _exposure(state: Estimates, t: float) -> float:
    if state.up_since is None:
        return state.exposure_device_s
    until = max(t, state.t) if math.isfinite(t) else state.t
    spent = state.exposure_device_s + max(0.0, until - state.up_since) * max(state.world_size, 0)
    return min(spent, sys.float_info.max)  # a time that makes no sense must not make every estimate infinite


def _down(state: Estimates) -> Estimates:
    return replace(state, exposure_device_s=_exposure(state, state.t), up_since=None, nodes=frozenset())


def _ended(state: Estimates, event: ev.AttemptEnded) -> Estimates:
    """The attempt is over when it is over on its last node."""
    if event.attempt not in (None, state.attempt):
        return state
    left = frozenset[str]() if event.node is None else state.nodes - {event.node}
    return replace(state, nodes=left) if left else _down(state)


def _saved(state: Estimates, event: ev.SaveCommitted) -> Estimates:
    """Count a save once, though each tier that it reaches commits it again."""
    if state.last_save == (event.attempt, event.step):
        return state
    return replace(
        state,
        stalls=_seen(state.stalls, event.stall_s),
        stall_count=state.stall_count + 1,
        uploads=_seen(state.uploads, event.upload_s),
        last_save=(event.attempt, event.step),
    )


def _stall(state: Estimates) -> float | None:
    """The median stall; the run's first save, into cold buffers, is left out once there are two others."""
    first_remembered = state.stall_count == len(state.stalls)
    return _median(state.stalls[1:] if first_remembered and len(state.stalls) >= 3 else state.stalls)


def _seen(values: tuple[float, ...], value: float | None, *, least: float = 0.0) -> tuple[float, ...]:
    if value is None or not math.isfinite(value) or value < least:
        return values
    return (*values[1 - WINDOW :], value)


def _median(values: tuple[float, ...]) -> float | None:
    return statistics.median(values) if values else None


# --- the Gamma distribution ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def gamma_quantile(p: float, shape: float) -> float:
    """The x with P(shape, x) = p for a Gamma variable of scale 1; relative error below 1e-6 for shapes up to 1e5.

    Newton's method on log P as a function of log x: that is concave and rises, so it converges from any start, and for
    small x it is a straight line, which serves shapes far below 1.

    Raises:
        ValueError: `p` is not inside (0, 1) or `shape` is not above zero.
    """
    if not (0 < p < 1 and 0 < shape < math.inf):
        raise ValueError(f"no quantile {p!r} of a Gamma variable of shape {shape!r}")
    log_x = (math.log(p) + math.lgamma(shape + 1)) / shape
    if shape >= 1:  # Wilson and Hilferty 1931
        z = statistics.NormalDist().inv_cdf(p)
        root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
        if root > 0:
            log_x = max(log_x, math.log(shape) + 3 * math.log(root))
    for _ in range(100):
        log_cdf, slope = _log_cdf(shape, log_x)
        move = (math.log(p) - log_cdf) / slope
        log_x += move
        if abs(move) < 1e-12:
            break
    return math.exp(log_x) if log_x > -700 else 0.0


def _log_cdf(shape: float, log_x: float) -> tuple[float, float]:
    """(log P(shape, x), its derivative in log x): by the series below the mean, by Lentz's continued fraction above."""
    x = math.exp(log_x)
    log_density = shape * log_x - x - math.lgamma(shape)  # of log x
    if x < shape + 1:
        term = total = 1 / shape
        n = shape
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        log_cdf = log_density + math.log(total)
        return log_cdf, 1 / total
    tiny = 1e-300
    b = x + 1 - shape
    c = 1 / tiny
    d = 1 / b
    h = d
    for i in range(1, 1_000_000):
        a = -i * (i - shape)
        b += 2
        d = 1 / (a * d + b or tiny)
        c = b + a / c or tiny
        h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    upper = math.exp(log_density) * h
    log_cdf = math.log1p(-min(upper, 1 - 1e-16))
    return log_cdf, math.exp(log_density - log_cdf)
