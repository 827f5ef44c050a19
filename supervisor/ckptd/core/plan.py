"""What would each formula's interval cost, and what a fixed one? The arithmetic of `ckptd plan`, without a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptd.core.estimates import CREDIBLE
from ckptd.core.gamma import gamma_quantile
from ckptd.core.interval import Waste, daly, exact, waste, young

FORMULAS = {"young": young, "daly": daly, "exact": exact}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtbf:
    """A mean time between failures and how far it can be trusted. Seconds."""

    seconds: float
    low_s: float | None = None
    """The 90 % interval; None where M was given and not counted."""
    high_s: float | None = None


def counted_mtbf(failures: int, span_s: float) -> Mtbf:
    """M of `failures` in `span_s` seconds, failures arriving at random.

    The interval is that of a Gamma(failures, span) rate, the posterior of the prior 1/rate.

    Raises:
        ValueError: `failures` is below one or `span_s` not above zero.
    """
    if not (failures >= 1 and 0 < span_s < math.inf):
        raise ValueError(f"no M of {failures!r} failures in {span_s!r} seconds")
    tail = (1 - CREDIBLE) / 2
    return Mtbf(
        seconds=span_s / failures,
        low_s=span_s / gamma_quantile(1 - tail, failures),
        high_s=span_s / gamma_quantile(tail, failures),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An interval and what the model expects of it."""

    name: str
    """`young`, `daly`, `exact` or `fixed`."""
    formula_s: float
    """What the formula says. Seconds."""
    interval_s: float
    """What can be kept: no shorter than U, as one save is in flight at a time. Seconds."""
    clamped_by: str | None
    """`upload`, or None."""
    waste: Waste


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The costs that were put in, in seconds, and what follows from them."""

    mtbf: Mtbf
    stall_s: float
    restart_s: float
    upload_s: float
    offers: tuple[Offer, ...]
    """One for each formula, in the order of `FORMULAS`."""
    fixed: Offer
    """The interval to compare with, taken as it is."""

    @property
    def best(self) -> Offer:
        """The offer with the least waste: the first-order model has its minimum at Young's interval, unless U forbids."""
        return min(self.offers, key=lambda offer: offer.waste.total)


def plan(mtbf: Mtbf, *, stall_s: float, restart_s: float, upload_s: float, fixed_s: float) -> Plan:
    """Weigh the intervals of all formulas and `fixed_s` against each other.

    Raises:
        ValueError: C, M or the fixed interval is not above zero, or anything else negative or infinite.
    """
    if not (stall_s > 0 and fixed_s > 0 and mtbf.seconds > 0 and min(restart_s, upload_s) >= 0):
        raise ValueError("C, M and the fixed interval must be above zero, R and U not below")
    if not all(map(math.isfinite, (mtbf.seconds, stall_s, restart_s, upload_s, fixed_s))):
        raise ValueError("a cost or an interval is infinite")

    def offer(name: str, formula_s: float, *, clamp: bool) -> Offer:
        clamped = clamp and formula_s < upload_s
        interval_s = upload_s if clamped else formula_s
        expected = waste(interval_s, stall_s=stall_s, mtbf_s=mtbf.seconds, restart_s=restart_s, upload_s=upload_s)
        return Offer(
            name=name,
            formula_s=formula_s,
            interval_s=interval_s,
            clamped_by="upload" if clamped else None,
            waste=expected,
        )

    return Plan(
        mtbf=mtbf,
        stall_s=stall_s,
        restart_s=restart_s,
        upload_s=upload_s,
        offers=tuple(offer(name, formula(stall_s, mtbf.seconds), clamp=True) for name, formula in FORMULAS.items()),
        fixed=offer("fixed", fixed_s, clamp=False),
    )


def curve(result: Plan, *, points: int = 200) -> list[tuple[float, Waste]]:
    """(T, W(T)) from well below the smallest interval of a plan to well above the largest, evenly in log T."""
    marked = [offer.interval_s for offer in (*result.offers, result.fixed)]
    low, high = max(min(marked) / 5, result.upload_s, 1e-9), max(marked) * 3
    ratio = high / low
    return [
        (
            t := low * ratio ** (i / (points - 1)),
            waste(
                t,
                stall_s=result.stall_s,
                mtbf_s=result.mtbf.seconds,
                restart_s=result.restart_s,
                upload_s=result.upload_s,
            ),
        )
        for i in range(points)
    ]
