"""The Prometheus metrics of a run: a fold that counts, and a collector that reads it and the status document.

Counters come from the ledger, so they go on where they were when the daemon is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ckptd import __version__
from ckptd.core import accounting, events
from ckptd.core.state import Status

SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
SAVES_REMEMBERED = 1000
"""Saves whose beginning is known when a copy of them arrives on a slow tier."""
RESTART_PHASES = ("detect", "stop", "wait", "launch", "init", "restore", "first_step")


class Histogram:
    """Counts by bucket, and a sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[sum(1 for bound in SECONDS_BUCKETS if value > bound)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        found, running = [], 0
        for bound, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), self.counts, strict=True):
            running += count
            found.append((bound, float(running)))
        return found


class Tally:
    """What only counting can tell. An observer of the daemon's events; written by one thread, read by another."""

    def __init__(self) -> None:
        self.interruptions: dict[tuple[str, str], int] = {}
        self.restarts: dict[str, int] = {}
        self.restart_seconds = Histogram()
        self.last_restart: dict[str, float] = {}
        self.checkpoints: dict[tuple[str, str], int] = {}
        self.stalls = Histogram()
        self.commits: dict[str, Histogram] = {}
        self.last_commit: dict[str, float] = {}
        self.checkpoint_bytes: dict[str, int] = {}
        self.failing: dict[str, bool] = {}
        self.copies: dict[tuple[str, str], int] = {}
        self._begun: dict[tuple[int | None, int], float] = {}
        """When the newest saves began, by attempt and step."""
        self.lost_steps = 0
        self.rejections = 0

    def apply(self, event: events.Event) -> None:
        """Count one event."""
        match event:
            case events.Interrupted():
                _count(self.interruptions, (event.cause, event.severity))
                self.lost_steps += event.lost_steps
            case events.Restarted():
                _count(self.restarts, "planned" if event.planned else event.severity)
                self.restart_seconds.observe(event.total_s)
                self.last_restart = {phase: getattr(event, f"{phase}_s") for phase in RESTART_PHASES}
            case events.SaveCommitted():
                _count(self.checkpoints, (event.tier, "committed"))
                self.stalls.observe(event.stall_s)
                self.commits.setdefault(event.tier, Histogram()).observe(event.upload_s)
                self.last_commit[event.tier] = event.at
                self.checkpoint_bytes[event.tier] = event.bytes
                self.failing[event.tier] = False
                self._begun[event.attempt, event.step] = event.t - event.upload_s
                while len(self._begun) > SAVES_REMEMBERED:
                    del self._begun[next(iter(self._begun))]
            case events.CheckpointCopied():
                _count(self.checkpoints, (event.tier, "committed"))
                _count(self.copies, (event.tier, "committed"))
                begun = self._begun.get((event.attempt, event.step), event.t - event.seconds)
                self.commits.setdefault(event.tier, Histogram()).observe(max(0.0, event.t - begun))
                self.failing[event.tier] = False
                self.last_commit[event.tier] = event.at
                self.checkpoint_bytes[event.tier] = event.bytes
            case events.CopyFailed():
                _count(self.checkpoints, (event.tier, "failed"))
                _count(self.copies, (event.tier, "failed"))
                self.failing[event.tier] = True
            case events.SaveFailed():
                _count(self.checkpoints, (event.tier, "failed"))
                self.failing[event.tier] = True
            case events.SaveRejected():
                _count(self.checkpoints, (event.tier, "rejected"))
                self.rejections += 1
            case _:
                pass


def _count(table: dict[Any, int], key: Any) -> None:
    table[key] = table.get(key, 0) + 1


class RunCollector(Collector):
    """Yields the metrics of one run at the moment of the scrape."""

    def __init__(self, tally: Tally, status: Callable[[], dict[str, Any]]) -> None:
        self._tally = tally
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing to say before a scrape: the registry need not build a status to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._of_status(self._status())
        yield from self._of_tally()

    def _of_status(self, status: dict[str, Any]) -> Iterator[Metric]:
        yield _gauge("ckptd_build_info", "The ckptd that supervises this run.", {(__version__,): 1.0}, ["version"])
        states = {(state.value,): float(state.value == status["state"]) for state in Status}
        yield _gauge("ckptd_run_state", "1 for the state that the run is in.", states, ["state"])
        goodput = status["goodput"]
        yield _gauge("ckptd_goodput_ratio", "Productive share of the wall-clock.", {(): goodput["ratio"]})
        phases = {(phase,): goodput["seconds_by_phase"][phase] for phase in accounting.PHASES}
        yield _gauge(
            "ckptd_phase_seconds",
            "Wall-clock by phase; a crash turns productive time into wasted time.",
            phases,
            ["phase"],
        )
        estimates = status["estimates"]
        mtbf = {
            ("mean",): estimates["mtbf_s"],
            ("low",): estimates["mtbf_low_s"],
            ("high",): estimates["mtbf_high_s"],
        }
        yield _gauge("ckptd_mtbf_seconds", "M, mean time between failures of the job as it runs now.", mtbf, ["bound"])
        yield _gauge("ckptd_interval_seconds", "Interval between checkpoints.", _known(status["interval"]["seconds"]))
        yield _gauge("ckptd_interval_steps", "The interval in steps.", _known(status["interval"]["steps"]))
        waste = (
            {(term,): estimates["waste"][term] for term in ("save", "rework", "restart")} if estimates["waste"] else {}
        )
        yield _gauge("ckptd_waste_ratio", "Share of the wall-clock that the model expects to lose.", waste, ["term"])
        yield _gauge("ckptd_step", "The newest step that is complete.", {(): float(status["step"])})
        yield _gauge("ckptd_step_seconds", "Time of a step.", _known(estimates["step_s"]))
        yield _counter("ckptd_samples", "Samples trained on.", {(): float(status["samples_seen"])})
        yield _gauge("ckptd_world_size", "Workers of the live attempt.", {(): float(status["world_size"])})
        healthy, known = status["devices_healthy"], status["devices_known"]
        devices = {("healthy",): float(healthy), ("unhealthy",): float(known - healthy)}
        yield _gauge("ckptd_devices", "Devices by state.", devices, ["state"])
        drill = status["drill"] or {"good_at": {}, "last": {}}
        yield _gauge(
            "ckptd_drill_last_success_timestamp_seconds", "When a checkpoint was last restored for trial, and was good.",
            {(tier,): float(at) for tier, at in drill["good_at"].items()}, ["tier"],
        )  # fmt: skip
        results = {(tier,): float(ok) for tier, ok in drill["last"].items()}
        yield _gauge("ckptd_drill_last_result", "1: the newest drill was good, 0: it was not.", results, ["tier"])
        beat = status["heartbeat_at"]
        yield _gauge("ckptd_last_heartbeat_timestamp_seconds", "When a rank was last heard of.", _known(beat))

    def _of_tally(self) -> Iterator[Metric]:
        tally = self._tally
        yield _counter(
            "ckptd_interruptions", "Interruptions.", dict(tally.interruptions.items()), ["cause", "severity"]
        )
        yield _counter("ckptd_restarts", "Restarts.", {(k,): n for k, n in tally.restarts.items()}, ["kind"])
        yield _histogram("ckptd_restart_seconds", "R, failure to first step.", {(): tally.restart_seconds})
        yield _gauge(
            "ckptd_restart_phase_seconds", "Where the newest restart's time went.",
            {(phase,): seconds for phase, seconds in tally.last_restart.items()}, ["phase"],
        )  # fmt: skip
        yield _counter("ckptd_checkpoints", "Saves by their end.", dict(tally.checkpoints.items()), ["tier", "result"])
        yield _histogram("ckptd_checkpoint_stall_seconds", "C, what training pays for a save.", {(): tally.stalls})
        commits = {(tier,): histogram for tier, histogram in tally.commits.items()}
        yield _histogram("ckptd_checkpoint_commit_seconds", "U, save begun to committed.", commits, ["tier"])
        yield _gauge(
            "ckptd_checkpoint_last_commit_timestamp_seconds", "When a checkpoint was last committed.",
            {(tier,): at for tier, at in tally.last_commit.items()}, ["tier"],
        )  # fmt: skip
        sizes = {(tier,): float(size) for tier, size in tally.checkpoint_bytes.items()}
        yield _counter("ckptd_tier_copies", "Copies to slower tiers.", dict(tally.copies.items()), ["tier", "result"])
        yield _gauge("ckptd_checkpoint_bytes", "Size of the newest checkpoint.", sizes, ["tier"])
        failing = {(tier,): float(failing) for tier, failing in tally.failing.items()}
        yield _gauge("ckptd_tier_failing", "1 where the last save or copy to the tier failed.", failing, ["tier"])
        yield _counter("ckptd_lost_steps", "Steps that were trained and thrown away.", {(): float(tally.lost_steps)})
        rejections = {(): float(tally.rejections)}
        yield _counter("ckptd_guard_rejections", "States that were not fit to be committed.", rejections)


Values = dict[tuple[str, ...], float]


def _known(value: float | None) -> Values:
    return {} if value is None else {(): float(value)}


def _gauge(name: str, text: str, values: Mapping[Any, float], labels: list[str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels or [])
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _counter(name: str, text: str, values: dict[Any, Any], labels: list[str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels or [])
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _histogram(name: str, text: str, values: dict[Any, Histogram], labels: list[str] | None = None) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels or [])
    for key, histogram in values.items():
        family.add_metric(list(key), buckets=histogram.buckets(), sum_value=histogram.total)
    return family
