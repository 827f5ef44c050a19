"""How often should this job save?

Symbols, all in seconds: C the stall of a save, T the training between two saves, R the cost of a restart, M the mean
time between failures of the whole job, U from the start of a save to its commit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptd.core.estimates import MAX_MTBF_S, Estimate
from ckptd.core.policy import Policy

FIRST_STALL_S = 1.0
"""The stall that is assumed until a save has been measured."""
FIRST_INTERVAL_S = 300.0
"""The first save comes no later than this, however rare failures are: one early save costs one stall, and measures it."""
MIN_STALL_S = 1e-3
"""No save is free: a stall below what can be measured counts as this, so that the interval stays above zero."""
WORTH_SAVING = 0.0025
"""A running job is left alone unless the waste that T decides on (saving and rework) would fall by this share: it is flat
around its minimum, and this much is an interval 7 % away from it."""

_SERIES_BELOW = 0.02


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Waste:
    """Shares of wall-clock that the model expects to lose. At Young's optimum `save` equals the T/2 part of `rework`."""

    save: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        """The whole share; above 1 the job does not get anywhere."""
        return self.save + self.rework + self.restart


def waste(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float, upload_s: float = 0.0) -> Waste:
    """Expected waste per unit of wall-clock: C/T + (T/2 + U)/M + R/M, to first order (Young 1974, U and R added).

    Raises:
        ValueError: `interval_s` or `mtbf_s` is not above zero.
    """
    if not (interval_s > 0 and mtbf_s > 0):
        raise ValueError(f"interval and MTBF must be above zero, are {interval_s!r} and {mtbf_s!r} seconds")
    return Waste(save=stall_s / interval_s, rework=(interval_s / 2 + upload_s) / mtbf_s, restart=restart_s / mtbf_s)


def young(stall_s: float, mtbf_s: float) -> float:
    """Young 1974, first order: T = sqrt(2CM)."""
    _check(stall_s, mtbf_s)
    return math.sqrt(2) * math.sqrt(stall_s) * math.sqrt(mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, higher order: sqrt(2CM) [1 + sqrt(C/2M)/3 + (C/2M)/9] - C while C < 2M, else M."""
    _check(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def exact(stall_s: float, mtbf_s: float) -> float:
    """The optimum for exponential failures: T = M (1 + W0(-exp(-C/M - 1))), W0 the principal Lambert branch (Daly 2006)."""
    _check(stall_s, mtbf_s)
    return mtbf_s * _one_plus_w0(stall_s / mtbf_s)


def silent_error_interval(
    stall_s: float, *, verify_s: float, silent_mtbf_s: float, mtbf_s: float | None = None
) -> float:
    """Interval where a check of `verify_s` before each commit finds silent errors (Benoit et al. 2017).

    T = sqrt((V + C) / (r_silent + r_fail/2)): a silent error costs a whole interval, a crash half of one.
    `mtbf_s` None: no crashes.
    """
    _check(stall_s, silent_mtbf_s)
    rate = 1 / silent_mtbf_s + (0.0 if mtbf_s is None else 0.5 / mtbf_s)
    return math.sqrt((verify_s + stall_s) / rate)


def _check(stall_s: float, mtbf_s: float) -> None:
    if not (stall_s >= 0 and 0 < mtbf_s < math.inf):
        raise ValueError(f"stall must not be negative and MTBF above zero, are {stall_s!r} and {mtbf_s!r} seconds")


def _one_plus_w0(x: float) -> float:
    """1 + W0(-exp(-x - 1)) for x >= 0.

    With u = 1 + W0 the definition of W becomes -log(1 - u) - u = x. Solving that for u avoids the branch point at
    -1/e, where forming the argument of W would already have lost the small x that we are after. The left side is
    convex and rises, and the start lies above the root, so Newton's method comes down to it monotonically.
    """
    if x <= 0:
        return 0.0
    u = min(math.sqrt(2 * x), -math.expm1(-x - 1))
    while 0 < u < 1:
        better = u - (_gap(u) - x) * (1 - u) / u
        if not 0 < better < u * (1 - 1e-15):
            break
        u = better
    return u


def _gap(u: float) -> float:
    """-log(1 - u) - u; by its series where the two terms would cancel."""
    if u >= _SERIES_BELOW:
        return -math.log1p(-u) - u
    return u * u * sum(u**k / (k + 2) for k in range(10))


_FORMULAS = {"young": young, "daly": daly, "exact": exact}


# --- the decision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An interval and why it is that."""

    interval_s: float | None
    """None only where the user fixed steps and no step has been timed yet."""
    interval_steps: int | None
    """None where no step has been timed yet."""
    formula: str
    """`young`, `daly`, `exact`, or `fixed` when job.yaml names the interval."""
    clamped_by: str | None
    """None, `upload`, `step`, `min_interval`, `max_interval` or `job.yaml`: the limit that had the last word."""
    reason: str
    waste: Waste | None
    """What the model expects at this interval; an R or U that was not measured yet counts as 0. None: no C yet."""
    stall_s: float | None = None
    mtbf_s: float | None = None
    """C and M that it was derived from."""
    best_s: float | None = None
    """What the formula gives for them, whatever job.yaml and the limits make of it; None: no C yet."""


def decide(estimate: Estimate, policy: Policy) -> Decision:
    """The interval for what is known now; finite and above zero whatever was measured.

    An interval in job.yaml is taken as it is. Otherwise the formula's T is raised to U (one save in flight), to one
    step and to `min_interval_s`, then lowered to `max_interval_s`, in this order.
    """
    step_s = None if estimate.step_s is None else max(estimate.step_s, 1e-9)
    mtbf_s = min(max(estimate.mtbf_s, MIN_STALL_S), MAX_MTBF_S)
    best_s = None
    if estimate.stall_s is not None:
        best_s = _FORMULAS[policy.formula](max(estimate.stall_s, MIN_STALL_S), mtbf_s)

    def decided(
        interval_s: float | None, steps: int | None, formula: str, clamped_by: str | None, reason: str
    ) -> Decision:
        return Decision(
            interval_s=interval_s, interval_steps=steps, formula=formula, clamped_by=clamped_by, reason=reason,
            waste=_expected(estimate, interval_s, mtbf_s), stall_s=estimate.stall_s, mtbf_s=mtbf_s, best_s=best_s,
        )  # fmt: skip

    if policy.interval_steps is not None:
        steps = max(1, policy.interval_steps)
        interval_s = None if step_s is None else steps * step_s
        return decided(interval_s, steps, "fixed", "job.yaml", f"job.yaml asks for {steps} steps")
    if policy.interval_s is not None:
        reason = f"job.yaml asks for {policy.interval_s:g} s"
        return decided(policy.interval_s, _in_steps(policy.interval_s, step_s), "fixed", "job.yaml", reason)
    if best_s is None:
        interval = min(_FORMULAS[policy.formula](FIRST_STALL_S, mtbf_s), FIRST_INTERVAL_S)
        reason = f"no save measured yet: {interval:.4g} s, for a first save early"
    else:
        interval = best_s
        reason = f"{policy.formula}: C = {estimate.stall_s:.4g} s and M = {mtbf_s:.4g} s give {interval:.4g} s"
    clamped_by = None
    for name, least in (("upload", estimate.upload_s), ("step", step_s), ("min_interval", policy.min_interval_s)):
        if least is not None and interval < least:
            interval, clamped_by = least, name
    if policy.max_interval_s is not None and interval > policy.max_interval_s:
        interval, clamped_by = policy.max_interval_s, "max_interval"
    if clamped_by is not None:
        reason += f"; {clamped_by} makes it {interval:.4g} s"
    return decided(interval, _in_steps(interval, step_s), policy.formula, clamped_by, reason)


def worth_moving(old: Decision | None, new: Decision) -> bool:
    """Does it pay to tell a running job? Near the optimum the waste hardly depends on T."""
    if old is None:
        return True
    if old.clamped_by == new.clamped_by == "job.yaml":
        # Of an interval fixed in steps the seconds follow the step time, and the other way round: only what was asked
        # for counts, and the reason names it.
        return old.reason != new.reason
    if old.interval_s is None or new.interval_s is None:
        return (old.interval_s, old.interval_steps) != (new.interval_s, new.interval_steps)
    return excess(old.interval_s, new.interval_s) >= WORTH_SAVING


def excess(interval_s: float, best_s: float) -> float:
    """What `interval_s` costs beyond the optimum `best_s`, as a share of the waste that T decides on.

    C/T + T/2M is (x + 1/x)/2 times its minimum at x times the T that minimises it (Young 1974); M and C cancel.
    """
    ratio = interval_s / best_s
    return (ratio + 1 / ratio) / 2 - 1


def why_moved(old: Decision | None, new: Decision) -> str:
    """What changed since `old`, and what keeping it would cost: a clause for the reason of a move; empty for a first one."""
    if old is None or old.interval_s is None or new.interval_s is None or new.formula == "fixed":
        return ""
    changes = [
        f"{name} {'fell' if now < before else 'rose'} from {before:.4g} to {now:.4g} s"
        for name, before, now in (("M", old.mtbf_s, new.mtbf_s), ("C", old.stall_s, new.stall_s))
        if before is not None and now is not None and abs(now - before) > 0.01 * before
    ]
    if old.stall_s is None and new.stall_s is not None:
        changes.append("C is measured now")
    cost = excess(old.interval_s, new.interval_s)
    kept = f"keeping {old.interval_s:.4g} s would cost {cost:.2%} more in saving and rework" if cost < 1 else ""
    said = [part for part in (", ".join(changes), kept) if part]
    return "; ".join(said) or f"it was {old.interval_s:.4g} s"


def _in_steps(interval_s: float, step_s: float | None) -> int | None:
    return None if step_s is None else max(1, round(interval_s / step_s))


def _expected(estimate: Estimate, interval_s: float | None, mtbf_s: float) -> Waste | None:
    if interval_s is None or estimate.stall_s is None:
        return None
    return waste(
        interval_s,
        stall_s=estimate.stall_s,
        mtbf_s=mtbf_s,
        restart_s=estimate.restart_s or 0.0,
        upload_s=estimate.upload_s or 0.0,
    )
