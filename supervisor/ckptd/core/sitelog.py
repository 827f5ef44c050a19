"""How often do devices fail, going by a log of interruptions that somebody kept? Events out of rows, exposure, a rate.

Three forms of log: `events` (one row for each thing that happened, on devices that were in use all the time), `jobs`
(one row for each job, with the time it ran) and `counts` (one row for many failures). Times are seconds since 1970,
spans seconds, exposures device-seconds.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ckptd.core.estimates import CREDIBLE
from ckptd.core.gamma import gamma_quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Form = Literal["events", "jobs", "counts"]
Kind = Literal["failure", "planned", "completed", "running", "launch", "start", "other"]
"""`launch`: it never ran. `start`: the log begins here. `other`: nothing that stopped training."""

MERGE_S: Final = 300.0
"""Rows that follow the first row of an event within this time tell of the same event."""
MAX_FAILURES: Final = 10.0
"""An imported log weighs as much as so many failures at most, so that a run's own soon count for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a log, read and found to be clean."""

    digest: str
    """Names the row: the same row in another import has the same one."""
    kind: Kind
    at: float | None = None
    """When it happened, or the job ended. In the form `counts`: when the last failure came, if the exposure runs from the
    first to the last; None: it is known otherwise."""
    count: int = 1
    """Failures that the row stands for; above one in the form `counts` only."""
    span_s: float | None = None
    """Exposure that the row itself brings, in wall-clock; None in the form `events`."""
    devices: float | None = None
    """Devices that were in use; None: as many as the log says."""
    job: str = ""
    """Rows of different jobs are never the same event."""
    cause: str = ""
    severity: str = ""
    node: str = ""
    down_s: float | None = None
    """How long it took until things went on; None: not known."""
    source: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What holds for all rows of a log."""

    name: str
    form: Form
    devices: float | None = None
    from_at: float | None = None
    """Exposure begins here; None: with the row `start`, or with the first row."""
    to_at: float | None = None
    """Exposure ends here; None: with the last row."""
    span_s: float | None = None
    """Length of the exposure where rows have no times."""
    merge_s: float = MERGE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a log says."""

    log: Log
    rows: int
    failures: int
    """Events, rows of the same one merged."""
    counted: int
    """Failures inside of the exposure: one that opens it is its edge, and would make the rate too high."""
    planned: int
    completed: int
    running: int
    launch: int
    other: int
    merged: int
    """Rows that told of an event which another row had told of."""
    outside: int
    """Events before or after the exposure that was asked for."""
    by_cause: dict[str, int]
    by_severity: dict[str, int]
    span_s: float
    """Exposure in wall-clock; of jobs that ran at the same time, the sum."""
    exposure_device_s: float
    censored_s: float
    """The part of `span_s` that belongs to jobs that are still running."""
    devices: float | None
    """Size of the log's own job: what was given, or the mean, weighted with time."""
    first_at: float | None
    last_at: float | None
    down_median_s: float | None
    down_known: int
    gaps_device_s: tuple[float, ...] = field(repr=False)
    """Device-seconds from each failure to the next, the first from the beginning of the exposure. Empty for `counts`."""
    tail_device_s: float
    """Device-seconds after the last failure."""

    @property
    def rate(self) -> float | None:
        """Failures per device-second; None without exposure."""
        return self.counted / self.exposure_device_s if self.exposure_device_s > 0 else None

    def mtbf(self, devices: float) -> tuple[float, float, float] | None:
        """M of a job on `devices` devices and its 90 % interval (that of a Gamma rate); None without a failure."""
        if not self.counted or self.exposure_device_s <= 0:
            return None
        span, tail = self.exposure_device_s / devices, (1 - CREDIBLE) / 2
        low, high = (span / gamma_quantile(p, self.counted) for p in (1 - tail, tail))
        return span / self.counted, low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """A Gamma prior on the rate: so many failures in so many device-seconds."""

    failures: float
    device_seconds: float


def bounded_prior(summary: Summary, max_failures: float) -> Prior | None:
    """The rate of a log with the weight of at most `max_failures` failures, exposure scaled alike.

    A log without any failure counts as one, which overstates the rate rather than taking failures for impossible.
    None: the log has no exposure, so it says nothing.
    """
    if summary.exposure_device_s <= 0:
        return None
    failures = float(max(summary.counted, 1))
    share = min(1.0, max_failures / failures)
    return Prior(failures=failures * share, device_seconds=summary.exposure_device_s * share)


def summarize(log: Log, rows: Sequence[Row]) -> Summary:
    """Make events of rows, and add up their exposure."""
    if log.form == "counts":
        return _of_counts(log, rows)
    failures, merged = _events(rows, "failure", log.merge_s)
    planned, more = _events(rows, "planned", log.merge_s)
    merged += more
    if log.form == "jobs":
        return _of_jobs(log, rows, failures, len(planned), merged)
    return _of_events(log, rows, failures, planned, merged)


def _events(rows: Iterable[Row], kind: Kind, merge_s: float) -> tuple[list[Row], int]:
    """The first row of each event, in order of time, and how many rows were no first ones."""
    opened: dict[str, float] = {}
    first, merged = [], 0
    timed = [(row.at, row.line, row) for row in rows if row.kind == kind and row.at is not None]
    for at, _, row in sorted(timed, key=lambda item: item[:2]):
        since = opened.get(row.job)
        if since is not None and at - since <= merge_s:
            merged += 1
            continue
        opened[row.job] = at
        first.append(row)
    return first, merged


def _of_events(log: Log, rows: Sequence[Row], failures: list[Row], planned: list[Row], merged: int) -> Summary:
    times = sorted(row.at for row in rows if row.at is not None)
    starts = [row.at for row in rows if row.kind == "start" and row.at is not None]
    opened_by_row = log.from_at is None and not starts
    first = log.from_at if log.from_at is not None else min(starts, default=times[0] if times else None)
    last = log.to_at if log.to_at is not None else (times[-1] if times else None)
    if first is None or last is None or last < first:
        first, last = None, None
    span = 0.0 if first is None or last is None else last - first

    def within(row: Row) -> bool:
        return first is not None and last is not None and row.at is not None and first <= row.at <= last

    kept = [row for row in failures if within(row)]
    stops = [row for row in planned if within(row)]
    counted = [row for row in kept if not (opened_by_row and row.at == first)]
    exposure = _Exposure(log, rows, first, last)
    marks = [exposure.until(row.at) for row in counted if row.at is not None]
    total = exposure.until(last) if last is not None else 0.0
    return _summary(
        log, rows, kept,
        counted=len(counted), planned=len(stops), merged=merged,
        outside=len(failures) - len(kept) + len(planned) - len(stops),
        span_s=span, exposure_device_s=total, first_at=first, last_at=last, marks=marks,
    )  # fmt: skip


class _Exposure:
    """Device-seconds from the beginning of an exposure to a time.

    Where rows name the devices in use, a row speaks for the time since the row before it, and the last one for the rest.
    """

    def __init__(self, log: Log, rows: Sequence[Row], first: float | None, last: float | None) -> None:
        self._edges: list[float] = []
        self._before: list[float] = []
        """Device-seconds up to each edge."""
        self._devices: list[float] = []
        """Devices from each edge on; none from the last one on."""
        if first is None or last is None or last <= first:
            return
        told = sorted((row.at, row.devices) for row in rows if row.at is not None and row.devices is not None)
        pieces = [(at, devices) for at, devices in told if first < at < last] if log.devices is None else []
        later = next((devices for at, devices in told if at >= last), told[-1][1] if told else 0.0)
        pieces.append((last, later if log.devices is None else log.devices))
        since, total = first, 0.0
        for at, devices in pieces:
            self._edges.append(since)
            self._before.append(total)
            self._devices.append(devices)
            total += (at - since) * devices
            since = at
        self._edges.append(last)
        self._before.append(total)
        self._devices.append(0.0)

    def until(self, at: float) -> float:
        """Device-seconds up to `at`."""
        i = bisect.bisect_right(self._edges, at) - 1
        return self._before[i] + (at - self._edges[i]) * self._devices[i] if i >= 0 else 0.0


def _of_jobs(log: Log, rows: Sequence[Row], failures: list[Row], planned: int, merged: int) -> Summary:
    ran = sorted((row for row in rows if row.span_s), key=lambda row: (row.at or 0.0, row.line))
    events = {row.digest for row in failures}
    total, marks = 0.0, []
    for row in ran:
        total += (row.span_s or 0.0) * _size(log, row)
        if row.digest in events:
            marks.append(total)
    # A job that failed the moment it began brings no exposure; it is a failure all the same.
    marks += [total] * (len(failures) - len(marks))
    times = [row.at for row in rows if row.at is not None]
    return _summary(
        log, rows, failures,
        counted=len(failures), planned=planned, merged=merged, outside=0,
        span_s=sum(row.span_s or 0.0 for row in ran), exposure_device_s=total,
        first_at=min((row.at - (row.span_s or 0.0) for row in rows if row.at is not None), default=None),
        last_at=max(times, default=None), marks=marks,
    )  # fmt: skip


def _of_counts(log: Log, rows: Sequence[Row]) -> Summary:
    counted = sum(max(row.count - (row.at is not None), 0) for row in rows)
    span, exposure = 0.0, 0.0
    own = [row for row in rows if row.span_s is not None]
    if own:
        span = sum(row.span_s or 0.0 for row in own)
        exposure = sum((row.span_s or 0.0) * _size(log, row) for row in own)
    elif log.span_s is not None or (log.from_at is not None and log.to_at is not None):
        span = log.span_s if log.span_s is not None else max(0.0, (log.to_at or 0.0) - (log.from_at or 0.0))
        exposure = span * (log.devices or 0.0)
    return _summary(
        log, rows, list(rows),
        counted=counted, planned=0, merged=0, outside=0, span_s=span, exposure_device_s=exposure,
        first_at=log.from_at, last_at=log.to_at, marks=[],
    )  # fmt: skip


def _size(log: Log, row: Row) -> float:
    return row.devices if row.devices is not None else (log.devices or 0.0)


def _summary(
    log: Log,
    rows: Sequence[Row],
    failures: list[Row],
    *,
    counted: int,
    planned: int,
    merged: int,
    outside: int,
    span_s: float,
    exposure_device_s: float,
    first_at: float | None,
    last_at: float | None,
    marks: list[float],
) -> Summary:
    kinds = Counter(row.kind for row in rows)
    downs = [row.down_s for row in failures if row.down_s is not None]
    edges = sorted(marks)
    mean = exposure_device_s / span_s if span_s > 0 and exposure_device_s > 0 else None
    return Summary(
        log=log,
        rows=len(rows),
        failures=sum(row.count for row in failures),
        counted=counted,
        planned=planned,
        completed=kinds["completed"],
        running=kinds["running"],
        launch=kinds["launch"],
        other=kinds["other"] + kinds["start"],
        merged=merged,
        outside=outside,
        by_cause=_counts((row.cause, row.count) for row in failures),
        by_severity=_counts((row.severity, row.count) for row in failures),
        span_s=span_s,
        exposure_device_s=exposure_device_s,
        censored_s=sum(row.span_s or 0.0 for row in rows if row.kind == "running"),
        devices=log.devices if log.devices is not None else mean,
        first_at=first_at,
        last_at=last_at,
        down_median_s=statistics.median(downs) if downs else None,
        down_known=len(downs),
        gaps_device_s=tuple(b - a for a, b in zip([0.0, *edges], edges, strict=False)),
        tail_device_s=exposure_device_s - (edges[-1] if edges else 0.0),
    )


def _counts(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    """How often each name comes, the most frequent first; what has no name is left out."""
    total: Counter[str] = Counter()
    for name, count in found:
        if name:
            total[name] += count
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
