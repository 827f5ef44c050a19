"""What do the page and the report show of a run? One document out of its events and its status, of bounded size.

However long the run, the document fits a phone: time is cut into slices, series are thinned, lists end after the newest
few. Medians are over the newest `WINDOW` observations.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Final

from ckptd.core import accounting, interval, whatif
from ckptd.core import events as ev
from ckptd.core.accounting import DEGRADED, Account
from ckptd.core.estimates import Estimate
from ckptd.core.policy import Policy
from ckptd.core.timeline import Timeline
from ckptd.core.whatif import TERMS

WINDOW: Final = 512
MOST_POINTS: Final = 120
MOST_RESTARTS: Final = 40
MOST_CAUSES: Final = 40
MOST_ROLLBACKS: Final = 10
INTERRUPTIONS: Final = 30
"""How many of the newest interruptions are listed, unless more are asked for."""
MESSAGE_LINES: Final = 12
MESSAGE_BYTES: Final = 2000
DETAIL_BYTES: Final = 300

PARTS: Final = ("detect", "stop", "wait", "launch", "init", "restore", "first_step")
_CURVE_POINTS: Final = 61
_CURVE_SPAN: Final = 30.0
_NOT_SHOWN: Final = ("ranks", "nodes")
"""Parts of the status document that grow with the job."""


class Series:
    """Points along the axis, thinned to at most `MOST_POINTS` by dropping every other one; the newest always stays."""

    def __init__(self) -> None:
        self._points: list[dict[str, Any]] = []
        self._newest: dict[str, Any] | None = None
        self._stride = 1
        self._seen = 0

    def add(self, point: dict[str, Any]) -> None:
        self._newest = point
        if self._seen % self._stride == 0:
            self._points.append(point)
            if len(self._points) >= MOST_POINTS:
                del self._points[1::2]
                self._stride *= 2
        self._seen += 1

    def points(self) -> list[dict[str, Any]]:
        newest = self._newest
        return [*self._points, newest] if newest is not None and newest is not self._points[-1] else self._points


class _Tier:
    def __init__(self) -> None:
        self.results = {"committed": 0, "failed": 0, "rejected": 0, "copied": 0, "copy_failed": 0, "deleted": 0}
        self.stalls: deque[float] = deque(maxlen=WINDOW)
        self.uploads: deque[float] = deque(maxlen=WINDOW)
        self.newest: dict[str, Any] | None = None
        self.error: str | None = None


class _Restarts:
    def __init__(self) -> None:
        self.count = 0
        self.totals: deque[float] = deque(maxlen=WINDOW)
        self.parts: dict[str, deque[float]] = {part: deque(maxlen=WINDOW) for part in PARTS}


class Overview:
    """A fold, changed in place: feed it every event of a run in order, and ask for the document at any time."""

    def __init__(self, *, interruptions: int = INTERRUPTIONS) -> None:
        self.account = accounting.initial()
        self.timeline = Timeline()
        self.stretches = whatif.Stretches()
        self.policy = Policy()
        self._decisions = Series()
        self._expected: interval.Waste | None = None
        self._expected_s = dict.fromkeys(TERMS, 0.0)
        self._modelled_s = 0.0
        self._tiers: dict[str, _Tier] = {}
        self._restarts: dict[tuple[str, bool], _Restarts] = {}
        self._newest_restarts: deque[dict[str, Any]] = deque(maxlen=MOST_RESTARTS)
        self._causes: dict[tuple[str, bool], dict[str, Any]] = {}
        self._interruptions: deque[dict[str, Any]] = deque(maxlen=interruptions)
        self._rollbacks: deque[dict[str, Any]] = deque(maxlen=MOST_ROLLBACKS)
        self._drills = {"passed": 0, "failed": 0}
        self._drill: dict[str, Any] | None = None
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self._cycles = whatif.Cycles()
        self._applied = 0
        self._answered = -1
        self._answers: list[dict[str, Any]] = []

    def apply(self, event: ev.Event) -> None:
        """Take in one event."""
        if isinstance(event, ev.Progress):
            return  # says nothing that the next event does not, and most of a long ledger is this
        self._applied += 1
        self._moved(accounting.apply(self.account, event))
        self.stretches.saw(self.account, event)
        here = self.account.wall_s
        self.timeline.mark(here, event)
        if event.at:
            self._ended_at = event.at
        match event:
            case ev.DaemonStarted():
                self.policy = Policy.from_dict(event.policy)
                self._began_at = self._began_at or event.at or None
            case ev.IntervalDecided():
                self._decided(event, here)
            case ev.SaveCommitted():
                self._committed(event)
            case ev.SaveFailed():
                self._tier(event.tier).results["failed"] += 1
                self._tier(event.tier).error = _cut(event.error, DETAIL_BYTES)
            case ev.SaveRejected():
                self._tier(event.tier).results["rejected"] += 1
                self._tier(event.tier).error = _cut(event.why, DETAIL_BYTES)
            case ev.CheckpointDeleted():
                self._tier(event.tier).results["deleted"] += 1
            case ev.RolledBack():
                self._rollbacks.append(
                    {"x": here, "at": event.at, "to_step": event.to_step, "source": event.source,
                     "why": _cut(event.why, DETAIL_BYTES)}
                )  # fmt: skip
            case ev.Drilled():
                self._drilled(event)
            case ev.Restarted():
                self._restarted(event, here)
            case ev.Interrupted():
                self._interrupted(event, here)
            case _:
                self._copied(event)

    def document(self, status: dict[str, Any], *, asked: list[dict[str, float]] | None = None) -> dict[str, Any]:
        """Everything that is drawn. `status`: the status document of this moment; `asked`: see `whatif.answers`."""
        account = self._at(status)
        timeline = self.timeline.copy()
        timeline.moved(self.account, account)
        now = accounting.summary(account, t=account.t)
        devices = now.device_seconds_by_phase
        wanted = math.fsum(devices.values())
        stretches = self.stretches.all(account)
        estimate = _estimate(status)
        if self._answered != self._applied or asked is not None:  # the dearest part: not again while nothing happens
            self._answered = self._applied
            self._answers = whatif.answers(
                asked, stretches=stretches, account=account, estimate=estimate, policy=self.policy,
                cycle_s=self._cycles.mean_s,
            )  # fmt: skip
        return {
            "status": {key: value for key, value in status.items() if key not in _NOT_SHOWN},
            "nodes": _nodes(status),
            "began_at": self._began_at,
            "newest_event_at": self._ended_at,
            "wall_s": now.wall_s,
            "goodput": now.goodput,
            "ettr": devices["productive"] / wanted if wanted > 0 else 0.0,
            "seconds_by_phase": now.seconds_by_phase,
            "device_seconds_by_phase": devices,
            "degraded": devices[DEGRADED] / wanted if wanted > 0 else 0.0,
            "timeline": timeline.document(),
            "waste": self._waste(whatif.happened(account, stretches), status),
            "curve": _curve(estimate, status["interval"]["seconds"]),
            "decisions": self._decisions.points(),
            "restarts": self._restarts_document(),
            "checkpoints": {name: _tier_document(tier) for name, tier in self._tiers.items()},
            "rollbacks": list(reversed(self._rollbacks)),
            "drills": {**self._drills, "newest": self._drill},
            "causes": sorted(self._causes.values(), key=lambda row: -row["count"])[:MOST_CAUSES],
            "interruptions": list(reversed(self._interruptions)),
            "what_if": self._answers,
        }

    # --- the parts of the fold ----------------------------------------------------------------------------------------

    def _moved(self, account: Account) -> None:
        before, self.account = self.account, account
        self.timeline.moved(before, account)
        if self._expected is not None:
            seconds = account.wall_s - before.wall_s
            self._modelled_s += seconds
            for term in TERMS:
                self._expected_s[term] += seconds * min(1.0, getattr(self._expected, term))

    def _decided(self, event: ev.IntervalDecided, here: float) -> None:
        seconds = event.interval_s
        if seconds is None and event.interval_steps is not None and event.step_s is not None:
            seconds = event.interval_steps * event.step_s
        if seconds is not None and seconds > 0 and event.mtbf_s > 0 and event.stall_s is not None:
            self._expected = interval.waste(
                seconds, stall_s=event.stall_s, mtbf_s=event.mtbf_s, restart_s=event.restart_s or 0.0,
                upload_s=event.upload_s or 0.0,
            )  # fmt: skip
        names = ("mtbf_s", "mtbf_low_s", "mtbf_high_s", "stall_s", "restart_s", "upload_s")
        self._decisions.add(
            {"x": _short(here), "interval_s": _short(seconds), "clamped_by": event.clamped_by}
            | {name: _short(getattr(event, name)) for name in names}
        )

    def _committed(self, event: ev.SaveCommitted) -> None:
        tier = self._tier(event.tier)
        tier.results["committed"] += 1
        tier.stalls.append(event.stall_s)
        tier.uploads.append(event.upload_s)
        tier.newest = {"step": event.step, "at": event.at, "bytes": event.bytes, "path": event.path}
        self._cycles.committed(event, whatif.up_s(self.account))

    def _copied(self, event: ev.Event) -> None:
        """Checkpoints that come to a tier as copies, and copies that do not."""
        if event.kind not in ("checkpoint_copied", "copy_failed"):
            return
        data = ev.data_of(event)
        tier = self._tier(data["tier"])
        if event.kind == "copy_failed":
            tier.results["copy_failed"] += 1
            tier.error = _cut(data["error"], DETAIL_BYTES)
        else:
            tier.results["copied"] += 1
            tier.uploads.append(data["seconds"])
            tier.newest = {"step": data["step"], "at": event.at, "bytes": data["bytes"], "path": data["path"]}

    def _drilled(self, event: ev.Drilled) -> None:
        self._drills["passed" if event.ok else "failed"] += 1
        self._drill = {
            "at": event.at, "ok": event.ok, "step": event.step, "tier": event.tier, "seconds": event.seconds,
            "problem": _cut(event.problem, DETAIL_BYTES),
        }  # fmt: skip

    def _tier(self, name: str) -> _Tier:
        return self._tiers.setdefault(name, _Tier())

    def _restarted(self, event: ev.Restarted, here: float) -> None:
        kind = "planned" if event.planned else event.severity
        group = self._restarts.setdefault((kind, event.warm), _Restarts())
        group.count += 1
        group.totals.append(event.total_s)
        parts = {part: getattr(event, f"{part}_s") for part in PARTS}
        for part, seconds in parts.items():
            group.parts[part].append(seconds)
        self._newest_restarts.append(
            {"x": here, "at": event.at, "attempt": event.attempt, "kind": kind, "warm": event.warm,
             "total_s": event.total_s, "parts": parts}
        )  # fmt: skip

    def _interrupted(self, event: ev.Interrupted, here: float) -> None:
        cause = self._causes.setdefault(
            (event.cause, event.planned),
            {"cause": event.cause, "planned": event.planned, "count": 0, "lost_steps": 0, "lost_s": 0.0},
        )
        cause["count"] += 1
        cause["lost_steps"] += event.lost_steps
        cause["lost_s"] += event.lost_seconds
        self._interruptions.append(
            {
                "x": here, "at": event.at, "attempt": event.attempt, "node": event.node, "rank": event.rank,
                "cause": event.cause, "severity": event.severity, "planned": event.planned, "step": event.step,
                "lost_steps": event.lost_steps, "lost_s": event.lost_seconds,
                "detail": _cut(event.detail, DETAIL_BYTES), "message": tail(event.message),
            }
        )  # fmt: skip

    def _at(self, status: dict[str, Any]) -> Account:
        """The account at the moment of the status. The time since the newest event is not kept: it may be booked otherwise."""
        since = float(status["goodput"]["wall_s"]) - self.account.wall_s
        return accounting.advance(self.account, self.account.t + since) if since > 0 else self.account

    # --- the parts of the document ------------------------------------------------------------------------------------

    def _waste(self, outcome: whatif.Outcome, status: dict[str, Any]) -> dict[str, Any]:
        """By term, as shares of the wall-clock: what the model expected, along the way and now, and what happened."""
        wall = outcome.wall_s
        modelled = self._modelled_s
        return {
            "expected_then": {term: self._expected_s[term] / modelled for term in TERMS} if modelled > 0 else None,
            "expected_now": status["estimates"]["waste"],
            "happened": {term: getattr(outcome, term) / wall for term in TERMS} if wall > 0 else None,
            "outside": outcome.outside / wall if wall > 0 else None,
        }

    def _restarts_document(self) -> dict[str, Any]:
        groups = [
            {
                "kind": kind, "warm": warm, "count": group.count, "median_s": statistics.median(group.totals),
                "worst_s": max(group.totals),
                "parts": {part: statistics.median(group.parts[part]) for part in PARTS},
            }
            for (kind, warm), group in sorted(self._restarts.items())
        ]  # fmt: skip
        return {"groups": groups, "newest": list(self._newest_restarts)}


def _curve(estimate: Estimate | None, used_s: float | None) -> dict[str, Any] | None:
    """W(T) round its optimum and the interval in use, and the optimum by each formula. None: no save measured yet."""
    if estimate is None or estimate.stall_s is None:
        return None
    stall, mtbf = max(estimate.stall_s, interval.MIN_STALL_S), max(estimate.mtbf_s, interval.MIN_STALL_S)
    formulas = {"young": interval.young, "daly": interval.daly, "exact": interval.exact}
    optima = {name: formula(stall, mtbf) for name, formula in formulas.items()}
    marks = [*optima.values(), *([used_s] if used_s else [])]
    low, high = min(marks) / _CURVE_SPAN, max(marks) * _CURVE_SPAN
    points = [low * (high / low) ** (i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]
    shares = [
        interval.waste(
            point, stall_s=stall, mtbf_s=mtbf, restart_s=estimate.restart_s or 0.0, upload_s=estimate.upload_s or 0.0
        )
        for point in points
    ]
    return {
        "interval_s": points,
        "waste": {term: [getattr(share, term) for share in shares] for term in (*TERMS, "total")},
        "optimum_s": optima,
        "used_s": used_s,
    }


def _estimate(status: dict[str, Any]) -> Estimate | None:
    told = status["estimates"]
    if not told["mtbf_s"] or told["mtbf_s"] <= 0:
        return None
    names = ("mtbf_s", "mtbf_low_s", "mtbf_high_s", "stall_s", "restart_s", "upload_s", "step_s")
    return Estimate(**{name: told[name] for name in names})


def _nodes(status: dict[str, Any]) -> dict[str, int]:
    nodes = status.get("nodes", {}).values()
    return {"known": len(nodes), "connected": sum(1 for node in nodes if node["connected"])}


def _tier_document(tier: _Tier) -> dict[str, Any]:
    return {
        **tier.results,
        "newest": tier.newest,
        "stall_s": statistics.median(tier.stalls) if tier.stalls else None,
        "upload_s": statistics.median(tier.uploads) if tier.uploads else None,
        "error": tier.error,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def tail(text: str) -> str:
    """The last lines of a log, as much as is shown."""
    return _cut("\n".join(text.rstrip().splitlines()[-MESSAGE_LINES:]), MESSAGE_BYTES, end=True)


def _cut(text: str, most: int, *, end: bool = False) -> str:
    if len(text) <= most:
        return text
    return f"...{text[3 - most :]}" if end else f"{text[: most - 3]}..."
