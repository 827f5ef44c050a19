"""When does a simulated job fail? Seconds since its start, drawn from a law or taken from a log."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckptd.core import sitelog
from ckptd.core.sitelog import Summary
from ckptd.errors import UsageError
from ckptd.sitelogs import importing
from ckptd.sitelogs.reading import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The failures of one simulated run, and the rate that an oracle would know."""

    times: tuple[float, ...]
    """Rising; all before the horizon."""
    horizon_s: float
    mtbf_s: tuple[tuple[float, float], ...]
    """(from this second on, M in seconds); the first from 0 on. Of a log: its own mean."""


Source = Callable[[random.Random], Trace]
"""Draws the failures of one run."""


def exponential(mtbf_s: float, horizon_s: float) -> Source:
    """Failures that know nothing of each other: the same rate all the time."""
    return weibull(mtbf_s, 1.0, horizon_s)


def weibull(mtbf_s: float, shape: float, horizon_s: float) -> Source:
    """Gaps from a Weibull distribution of mean `mtbf_s`; a shape below 1 clusters failures, as the field sees them."""
    scale = mtbf_s / math.gamma(1 + 1 / shape)

    def draw(dice: random.Random) -> Trace:
        times, t = [], 0.0
        while (t := t + dice.weibullvariate(scale, shape)) < horizon_s:
            times.append(t)
        return Trace(times=tuple(times), horizon_s=horizon_s, mtbf_s=((0.0, mtbf_s),))

    return draw


def surges(mtbf_s: float, factor: float, length_s: float, horizon_s: float, *, calm_s: float | None = None) -> Source:
    """A rate that is `factor` times as high for `length_s`, then again what it was.

    Once, beginning anywhere inside the horizon; with `calm_s` again and again, after calm times of that mean.
    """

    def draw(dice: random.Random) -> Trace:
        spans: list[tuple[float, float]] = [(0.0, mtbf_s)]
        begin = dice.uniform(0.0, max(horizon_s - length_s, 0.0)) if calm_s is None else dice.expovariate(1 / calm_s)
        while begin < horizon_s:
            spans += [(begin, mtbf_s / factor), (begin + length_s, mtbf_s)]
            begin = math.inf if calm_s is None else begin + length_s + dice.expovariate(1 / calm_s)
        times = []
        for (start, mtbf), (end, _) in zip(spans, [*spans[1:], (horizon_s, 0.0)], strict=True):
            t = start
            while (t := t + dice.expovariate(1 / mtbf)) < min(end, horizon_s):
                times.append(t)
        return Trace(times=tuple(times), horizon_s=horizon_s, mtbf_s=tuple(spans))

    return draw


def replay(gaps: Sequence[float], tail_s: float, *, jitter_s: float) -> Source:
    """A log's failures by the gaps before each, each moved by up to `jitter_s` either way.

    A log says to the hour when things happened, not how long after a save: without the jitter one replay would be chance.
    """
    times, t = [], 0.0
    for gap in gaps:
        t += max(gap, 0.0)
        times.append(t)
    horizon_s = t + max(tail_s, 0.0)

    def draw(dice: random.Random) -> Trace:
        moved = (t + dice.uniform(-jitter_s, jitter_s) for t in times)
        kept = sorted(min(max(t, 0.0), horizon_s * (1 - 1e-12)) for t in moved)
        return Trace(times=tuple(kept), horizon_s=horizon_s, mtbf_s=((0.0, horizon_s / len(times)),))

    return draw


# --- logs ---------------------------------------------------------------------------------------------------------------


def read_log(data: bytes, options: Options, devices: float) -> tuple[list[float], float]:
    """(gaps before each failure, time after the last), in seconds, as a job on `devices` devices would have met them.

    The file is a CSV with a column of seconds whose name has `gap` in it, or whatever `ckptd import` reads.

    Raises:
        UsageError: it is neither, or no failure is left in it.
    """
    found = _gaps(data)
    if found is not None:
        return found, 0.0
    # A log that does not say is one of a job as large as the simulated one.
    options = replace(options, devices=options.devices or devices)
    parsed = importing.read(data, options)
    if parsed is None:
        raise UsageError(f"{options.source} is empty")
    log = sitelog.Log(name=options.source, form=parsed.form, devices=options.devices, to_at=options.to_at)
    return gaps_of(sitelog.summarize(log, parsed.rows), devices)


def gaps_of(summary: Summary, devices: float) -> tuple[list[float], float]:
    """The same of a log that was imported.

    Raises:
        UsageError: the log has no failure, or counts only.
    """
    if not summary.gaps_device_s or not math.fsum(summary.gaps_device_s) > 0:
        raise UsageError(f"the log {summary.log.name} names no moments of failures: there is nothing to replay")
    return [gap / devices for gap in summary.gaps_device_s], summary.tail_device_s / devices


def _gaps(data: bytes) -> list[float] | None:
    """Numbers of the first column whose name has `gap` in it; None: there is no such column."""
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig", errors="replace")))
    column = next((name for name in reader.fieldnames or [] if name and "gap" in name.lower()), None)
    if column is None:
        return None
    found = []
    for row in reader:
        text = (row.get(column) or "").strip()
        try:
            gap = float(text)
        except ValueError:
            raise UsageError(f"line {reader.line_num}: {column} is {text[:40]!r}, not a number of seconds") from None
        if not 0 <= gap < math.inf:
            raise UsageError(f"line {reader.line_num}: a gap of {text[:40]} s cannot be")
        found.append(gap)
    if not found or not math.fsum(found) > 0:
        raise UsageError(f"column {column} holds no gap")
    return found
