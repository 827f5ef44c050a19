"""Is the interval right, going by what saving and failures have really cost?

At the optimum of C/T + T/2M its two terms are equal: as much time goes into saving as is lost to rework (Young 1974). What a
failure loses because the newest save was still on its way (U) is no business of T's and is taken off first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptd.core.interval import Decision

FEWEST_FAILURES = 3
"""With fewer the time lost to rework is chance."""
FACTOR = 2.0
"""Terms this far apart are worth a word: an interval 1.4 times its optimum, 6 % more waste than need be."""
_SPREAD = 2 / math.sqrt(3)
"""Standard deviation of the loss of one failure over its mean, were it uniform between two saves and their number chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The two sides, and what follows."""

    saving_s: float
    """Time that training has paid for saves."""
    rework_s: float
    """Training that failures threw away, but for what uploads under way account for."""
    failures: int
    ratio: float | None
    """`saving_s / rework_s`; None while there is nothing to divide by."""
    balanced: bool | None
    """None: too few failures to tell."""
    advice: str


def audit(
    *, saving_s: float, rework_s: float, failures: int, upload_s: float | None, decision: Decision | None
) -> Audit:
    """Compare the two sides. Seconds of the run so far; `decision`: the interval that holds."""
    rework_s = max(0.0, rework_s - failures * (upload_s or 0.0))
    ratio = saving_s / rework_s if rework_s > 0 and math.isfinite(saving_s / rework_s) else None

    def found(balanced: bool | None, advice: str) -> Audit:
        return Audit(
            saving_s=saving_s, rework_s=rework_s, failures=failures, ratio=ratio, balanced=balanced, advice=advice
        )

    if failures < FEWEST_FAILURES:
        return found(None, f"too few failures to compare ({failures})")
    if saving_s <= 0:
        return found(None, "no save has been measured")
    # Chance alone sets the terms apart while failures are few: two standard deviations of it are allowed for.
    allowed = max(math.log(FACTOR), 2 * _SPREAD / math.sqrt(failures))
    distance = math.inf if ratio is None else math.log(ratio)
    if abs(distance) <= allowed:
        return found(True, "balanced")
    apart = "" if ratio is None else f"{max(ratio, 1 / ratio):.2g} times "
    if distance > 0:
        return found(False, f"saving costs {apart}more than rework: {_what_to_do(decision, 'less')}")
    return found(False, f"rework costs {apart}more than saving: {_what_to_do(decision, 'more')}")


def _what_to_do(decision: Decision | None, often: str) -> str:
    if decision is None or decision.interval_s is None:
        return f"save {often} often"
    if decision.formula == "fixed":
        best = f", or about {decision.best_s:.4g} s" if decision.best_s is not None else ""
        return f"checkpoint.interval in job.yaml saves too {'often' if often == 'less' else 'seldom'}; let it be auto{best}"
    limit = {
        ("less", "max_interval"): "raise checkpoint.max_interval",
        ("more", "min_interval"): "lower checkpoint.min_interval",
        ("more", "upload"): "one save is in flight at a time, so a faster tier is what would help",
        ("more", "step"): "no save can come between two steps",
    }.get((often, decision.clamped_by or ""))
    return limit or "the interval follows C and M by itself; nothing to do"
