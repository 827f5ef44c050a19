"""What `ckptd status`, `/api/status` and the terminal show of a run: one document, built from the picture."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

from ckptd.core import accounting, estimates, interval, keeping
from ckptd.core.audit import audit
from ckptd.core.estimates import Estimate
from ckptd.core.picture import Picture
from ckptd.core.state import LIVE, Status

MOST_RANKS = 256
"""More heartbeats than these are not shown: of 16,384 ranks they would be two megabytes at each look."""

Live = dict[str, dict[str, Any]]
"""The newest heartbeat of each rank, as the agents send it."""


def document(
    picture: Picture,
    *,
    t: float,
    live: Live | None = None,
    daemon: dict[str, Any] | None = None,
    heartbeat_at: float | None = None,
) -> dict[str, Any]:
    """The status of a run at `t` of its clock. `daemon` is None when no daemon supervises it.

    `heartbeat_at`: wall clock of the last word from a rank.
    """
    state = picture.run
    estimate = picture.estimate
    decision = picture.decision
    account = accounting.summary(picture.account, t=t)
    front = front_rank(live) if state.status in LIVE else None
    step = max(state.step, int(front["step"])) if front else state.step
    step_s = estimate.step_s if estimate.step_s is not None else (front or {}).get("step_s")
    committed = state.committed
    last = picture.last_interruption
    return {
        "name": state.policy.name,
        "run_id": state.policy.run_id,
        "state": state.status.value,
        "attempt": state.attempt,
        "step": step,
        "samples_seen": int(front["samples"]) if front else (committed.samples if committed else 0),
        "loss": front["loss"] if front else None,
        "world_size": state.world_size,
        "devices_healthy": state.devices_healthy,
        "devices_known": state.devices_known,
        "last_committed": None
        if committed is None
        else {"step": committed.step, "tier": committed.tier, "at": committed.at, "path": committed.path},
        "pins": keeping.pins_as_json(state.keeping),
        "tiers": [
            {
                "name": tier.name,
                "newest_step": tier.newest_step,
                "newest_at": tier.newest_at,
                "copies": tier.copies,
                "failing": tier.failing,
                "error": tier.error,
                "every": tier.every,
                "mirrored_step": tier.mirrored_step,
            }
            for tier in picture.tiers
        ],
        "saves": {"committed": picture.saves, "failed": picture.saves_failed, "rejected": picture.saves_rejected},
        "interval": {
            "seconds": decision.interval_s if decision else None,
            "steps": _interval_steps(decision, step_s),
            "formula": decision.formula if decision else state.policy.formula,
            "clamped_by": decision.clamped_by if decision else None,
            "reason": decision.reason if decision else "",
        },
        "estimates": {
            "mtbf_s": estimate.mtbf_s,
            "mtbf_low_s": estimate.mtbf_low_s,
            "mtbf_high_s": estimate.mtbf_high_s,
            "stall_s": estimate.stall_s,
            "restart_s": estimate.restart_s,
            "upload_s": estimate.upload_s,
            "step_s": step_s,
            "waste": _waste(picture, estimate),
            "mtbf_long_run_s": estimate.mtbf_long_run_s,
            "memory": estimate.memory,
            "failures_counted": estimate.failures,
            "exposure_device_hours": estimate.exposure_device_s / 3600,
            "failures_per_day_by_severity": {
                name: rate * 86_400
                for name, rate in estimates.rates_by_severity(
                    picture.estimates, t=state.t, world_size=picture.world
                ).items()
            },
            "restart_by_kind": {
                kind: {"median_s": median, "count": count}
                for kind, (median, count) in picture.estimates.costs.restart_by_kind().items()
            },
            "restart_by_phase": picture.estimates.costs.restart_by_phase(),
        },
        "audit": dataclasses.asdict(
            audit(
                saving_s=account.seconds_by_phase["checkpoint_stall"]
                + max(0.0, picture.estimates.costs.slowdown_total_s),
                rework_s=account.seconds_by_phase["wasted_progress"],
                failures=estimate.failures,
                upload_s=estimate.upload_s,
                decision=decision
                and dataclasses.replace(decision, best_s=interval.decide(estimate, state.policy).best_s),
            )
        ),
        "failures": state.failures,
        "restarts": state.restarts,
        "attempts_without_progress": state.attempts_without_progress,
        "goodput": {
            "ratio": account.goodput,
            "seconds_by_phase": account.seconds_by_phase,
            "device_seconds_by_phase": account.device_seconds_by_phase,
            "wall_s": account.wall_s,
        },
        "last_interruption": None
        if last is None
        else {
            "cause": last.cause,
            "severity": last.severity,
            "planned": last.planned,
            "node": last.node,
            "rank": last.rank,
            "lost_steps": last.lost_steps,
            "lost_seconds": last.lost_seconds,
            "detail": last.detail,
            "at": last.at,
        },
        "last_restart": None
        if picture.last_restart is None
        else {
            name: getattr(picture.last_restart, name)
            for name in (
                "total_s",
                "detect_s",
                "stop_s",
                "wait_s",
                "launch_s",
                "init_s",
                "restore_s",
                "first_step_s",
                "warm",
            )
        },
        "nodes": {
            name: {
                "connected": node.connected,
                "lost": node.gone_t is not None,
                "devices": list(node.devices),
                "unhealthy": sorted(node.unhealthy),
            }
            for name, node in state.nodes.items()
        },
        "devices_left_out": state.book.held_against(t),
        "ranks": _behind(live or {}),
        "ranks_heard": len(live or {}),
        "drill": _drill(picture),
        "notes": [{"level": note.level, "what": note.what, "at": note.at} for note in picture.notes],
        "outcome": None
        if state.outcome is None or state.status is not Status.ENDED
        else {
            "outcome": state.outcome.outcome,
            "exit_status": state.outcome.exit_status,
            "detail": state.outcome.detail,
            "at": state.outcome.at,
        },
        "heartbeat_at": heartbeat_at,
        "daemon": daemon,
    }


def _drill(picture: Picture) -> dict[str, Any] | None:
    """What the newest drill came to, None: there was none. `good_at`: wall clock of the last good one, by tier."""
    newest = picture.drills.newest
    if newest is None:
        return None
    return {
        "ok": newest.ok, "at": newest.at, "tier": newest.tier, "step": newest.step, "loss": newest.loss,
        "expected": newest.expected, "seconds": newest.seconds, "problem": newest.problem,
        "last": {tier: drilled.ok for tier, drilled in picture.drills.last.items()},
        "good_at": {tier: drilled.at for tier, drilled in picture.drills.last_good.items()},
    }  # fmt: skip


def front_rank(live: Live | None) -> dict[str, Any] | None:
    """The rank that is furthest; rank 0 where several are, since it is the one that knows the loss."""
    if not live:
        return None
    step = max(beat["step"] for beat in live.values())
    return {**live[min(live, key=int)], "step": step}


def _behind(live: Live) -> Live:
    """The heartbeats to show: all, or of a large world those that are furthest behind, which are what one looks for."""
    if len(live) <= MOST_RANKS:
        return live
    return {rank: live[rank] for rank in heapq.nsmallest(MOST_RANKS, live, key=lambda rank: live[rank]["step"])}


def _interval_steps(decision: interval.Decision | None, step_s: float | None) -> int | None:
    """The interval in steps. One in seconds may have been decided before a step's time was known."""
    if decision is None or decision.interval_s is None or not step_s:
        return decision.interval_steps if decision else None
    return decision.interval_steps or max(1, round(decision.interval_s / step_s))


def _waste(picture: Picture, estimate: Estimate) -> dict[str, float] | None:
    decision = picture.decision
    if decision is None or decision.interval_s is None or estimate.stall_s is None:
        return None
    expected = interval.waste(
        decision.interval_s, stall_s=estimate.stall_s, mtbf_s=estimate.mtbf_s, restart_s=estimate.restart_s or 0.0,
        upload_s=estimate.upload_s or 0.0,
    )  # fmt: skip
    return {"save": expected.save, "rework": expected.rework, "restart": expected.restart, "total": expected.total}
