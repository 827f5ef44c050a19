"""How often should a checkpoint go on to a slower tier, and which one goes next?

A tier is as good as the failures that nothing faster survives are frequent, and as dear as a copy to it takes. The
fastest tier saves every T_1; of those, every n-th goes on to tier l, where n T_1 comes near T_l = sqrt(2 C_l / r_l)
(Young 1974, level by level: Benoit et al. 2017), C_l the seconds of a copy and r_l the rate of failures that need tier l
or a slower one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from ckptd.core.estimates import MAX_MTBF_S
from ckptd.core.interval import MIN_STALL_S, young

Promote = Literal["auto"] | int

SURVIVED_BY_MEMORY: Final = frozenset({"process", "device", "code", "launch"})
"""Severities after which the host's memory and disks are as they were."""
DEEPER: Final = 0.25
"""Share of the failures that take one tier which take the next one, too. Assumed: nobody can measure it in time."""
LONGEST_S: Final = 86_400.0
"""However rare failures are believed to be, a copy goes on once a day: the belief is what may be wrong."""
WORTH_MOVING: Final = 0.2
"""Relative change of n below which a tier is left alone: the waste is flat around its minimum."""


def rate_of_level(level: int, rates: Mapping[str, float]) -> float:
    """Failures per second that need tier `level` or a slower one; `rates`: failures per second by severity.

    Level 0, the fastest tier, is needed by all. Level 1 by those that take the host, the next ones by `DEEPER` of them.

    Raises:
        ValueError: `level` is negative.
    """
    if level < 0:
        raise ValueError(f"there is no level {level}")
    if level == 0:
        return math.fsum(rates.values())
    return math.fsum(rate for severity, rate in rates.items() if severity not in SURVIVED_BY_MEMORY) * DEEPER ** (
        level - 1
    )


def best_every(level: int, *, copy_s: float, interval_s: float, rates: Mapping[str, float]) -> int:
    """The n of one tier: every so many-th commit of the fastest tier goes there. At least 1.

    Args:
        level: 1 for the second tier, and so on.
        copy_s: what a copy to it takes, seconds.
        interval_s: T_1, seconds between commits of the fastest tier.
        rates: failures per second by severity.

    Raises:
        ValueError: `level` is below 1, or `copy_s` or `interval_s` is no time.
    """
    if level < 1 or not (0 <= copy_s < math.inf and 0 < interval_s < math.inf):
        raise ValueError(f"no n for level {level}, a copy of {copy_s!r} s and an interval of {interval_s!r} s")
    rate = rate_of_level(level, rates)
    mtbf_s = min(1 / rate, MAX_MTBF_S) if rate > 1 / MAX_MTBF_S else MAX_MTBF_S
    wanted_s = min(max(young(max(copy_s, MIN_STALL_S), mtbf_s), copy_s), max(LONGEST_S, copy_s))
    return max(1, round(wanted_s / interval_s))


def every(
    told: Sequence[Promote | None],
    copies_s: Sequence[float | None],
    *,
    interval_s: float | None,
    rates: Mapping[str, float],
) -> list[int]:
    """The n of each tier, fastest first, in commits of the fastest tier, which has 1; never lower than the tier before.

    Args:
        told: `promote` of each tier in job.yaml. A number counts checkpoints of the tier before; None is `auto`.
        copies_s: median seconds of a copy to each tier; None: not measured, and every commit goes there until it is.
        interval_s: seconds between commits; None: not known yet.
        rates: failures per second by severity.
    """
    found: list[int] = []
    for level, (asked, copy_s) in enumerate(zip(told, copies_s, strict=True)):
        if level == 0:
            found.append(1)
        elif isinstance(asked, int):
            found.append(found[-1] * max(1, asked))
        elif copy_s is None or interval_s is None:
            found.append(found[-1])
        else:
            found.append(max(found[-1], best_every(level, copy_s=copy_s, interval_s=interval_s, rates=rates)))
    return found


def worth_moving(old: int | None, new: int) -> bool:
    """Is `new` far enough from `old` to tell a node?"""
    return old is None or abs(new - old) > WORTH_MOVING * old


def due(newest: int, there: int, n: int, *, last: bool = False) -> bool:
    """Should commit `newest` go to a tier whose newest commit is `there`? Sequences of one run; 0: none.

    A tier that has nothing of the run is given the first commit: that is safety early, and measures the copy. `last`:
    nothing will be committed after it.
    """
    if newest <= there:
        return False
    return last or there == 0 or newest >= there + n
