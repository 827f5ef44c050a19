"""Which way of choosing the interval wastes least, and by how much? Policies side by side on the same simulated failures."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptd.core import interval
from ckptd.core.policy import Policy
from ckptd.failure_times import Source, Trace
from ckptd.simulate import Job, Oracle, Outcome, Production, best_interval, fixed, follow

STEPS_PER_OCTAVE = 8
OCTAVES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one policy came to over all seeds. Shares of wall-clock; a `..._ci` is half a 95 % interval over seeds."""

    name: str
    interval_s: float | None
    """None: it changes."""
    waste: float
    waste_ci: float
    save: float
    rework: float
    restart: float
    regret: float = 0.0
    """Waste beyond the reference's, as a share of the reference's; the same failures are compared with each other."""
    regret_ci: float = 0.0
    saves: float = 0.0
    """Saves of a run, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All policies, and what they are measured against."""

    scores: tuple[Score, ...]
    reference: str
    seeds: int
    days: float
    failures: float
    """Failures of a run, on average."""
    mtbf_s: float
    """M of the law, or of the log."""


def compare(
    source: Source,
    job: Job,
    policy: Policy,
    *,
    seeds: int,
    fixed_s: float,
    vendor_mtbf_s: float | None,
    oracle: bool,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Simulate each policy on the failures of `seeds` runs.

    `oracle` False: nobody knows the law (a log); the best fixed interval, found afterwards, is what others are measured by.
    """
    traces = [source(random.Random(seed)) for seed in range(seeds)]
    outcomes: dict[str, list[Outcome]] = {"ckptd": []}
    for done, trace in enumerate(traces, 1):
        outcomes["ckptd"].append(follow(trace, job, policy, Production(policy, job.devices)))
        if progress is not None:
            progress(done)
    intervals: dict[str, float | None] = {"ckptd": None}
    mtbf_s = traces[0].mtbf_s[0][1]
    if oracle:
        if all(len(trace.mtbf_s) == 1 for trace in traces):  # the oracle never moves
            intervals["oracle"] = best = best_interval(mtbf_s, job)
            outcomes["oracle"] = [fixed(trace, job, best) for trace in traces]
        else:
            intervals["oracle"] = None
            outcomes["oracle"] = [follow(trace, job, policy, Oracle(trace, job)) for trace in traces]
    best_s = hindsight(traces, job)
    choices = {"best fixed": best_s, "fixed": fixed_s}
    if vendor_mtbf_s is not None:
        choices["vendor"] = max(interval.young(max(job.stall_s, interval.MIN_STALL_S), vendor_mtbf_s), job.upload_s)
    for name, seconds in choices.items():
        outcomes[name] = [fixed(trace, job, seconds) for trace in traces]
        intervals[name] = max(seconds, job.upload_s)
    reference = "oracle" if oracle else "best fixed"
    return Comparison(
        scores=tuple(score(name, intervals[name], got, outcomes[reference]) for name, got in outcomes.items()),
        reference=reference,
        seeds=seeds,
        days=traces[0].horizon_s / 86_400,
        failures=statistics.fmean(len(trace.times) for trace in traces),
        mtbf_s=mtbf_s,
    )


def score(name: str, interval_s: float | None, got: Sequence[Outcome], reference: Sequence[Outcome]) -> Score:
    """Average outcomes and set them against those of the reference, run by run."""
    wastes = [outcome.waste for outcome in got]
    base = statistics.fmean(outcome.waste for outcome in reference)
    more = [a.waste - b.waste for a, b in zip(got, reference, strict=True)]
    return Score(
        name=name,
        interval_s=interval_s,
        waste=statistics.fmean(wastes),
        waste_ci=_ci(wastes),
        save=statistics.fmean(o.saving_s / o.wall_s for o in got),
        rework=statistics.fmean(o.rework_s / o.wall_s for o in got),
        restart=statistics.fmean(o.restart_s / o.wall_s for o in got),
        regret=statistics.fmean(more) / base if base > 0 else 0.0,
        regret_ci=_ci(more) / base if base > 0 else 0.0,
        saves=statistics.fmean(o.saves for o in got),
    )


def grid(job: Job, mtbf_s: float) -> list[float]:
    """Intervals round the optimum, evenly on a logarithmic scale, none shorter than U."""
    best = best_interval(mtbf_s, job)
    around = range(-OCTAVES * STEPS_PER_OCTAVE, OCTAVES * STEPS_PER_OCTAVE + 1)
    return sorted({max(best * 2 ** (k / STEPS_PER_OCTAVE), job.upload_s) for k in around})


def curve(traces: Sequence[Trace], job: Job) -> list[tuple[float, float]]:
    """(interval, mean waste) of fixed intervals on the same failures."""
    return [
        (seconds, statistics.fmean(fixed(trace, job, seconds).waste for trace in traces))
        for seconds in grid(job, traces[0].mtbf_s[0][1])
    ]


def hindsight(traces: Sequence[Trace], job: Job) -> float:
    """The fixed interval that wastes least on these failures: nobody can know it before."""
    return min(curve(traces, job), key=lambda point: point[1])[0]


def _ci(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; 0 for a single value, of which nothing is known."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
