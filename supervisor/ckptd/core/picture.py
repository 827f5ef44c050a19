"""The folds as one: everything that the ledger says about a run, and what that calls for next.

The daemon, `ckptd status`, a report and a simulation all build the same `Picture` from the same events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.core import (
    accounting,
    decisions,
    drilling,
    estimates,
    events,
    interval,
    placement,
    run,
    tierbook,
)
from ckptd.core.accounting import Account
from ckptd.core.commands import Command, Record
from ckptd.core.estimates import Estimate, Estimates
from ckptd.core.interval import Decision
from ckptd.core.records import replace
from ckptd.core.state import RunState, Status
from ckptd.core.tierbook import TierBook

DEFAULT_RESTART_S = 60.0
"""R before the first restart was seen, where it must be weighed against something."""
_RECONSIDER = (
    events.DaemonStarted, events.AttemptLaunched, events.FirstStep, events.Progress, events.SaveCommitted,
    events.Restarted, events.Interrupted, events.CheckpointCopied,
)  # fmt: skip
"""After these the interval is derived again, and how often a checkpoint goes to each tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """What is known of a run."""

    run: RunState = field(default_factory=RunState)
    estimates: Estimates = field(default_factory=estimates.initial)
    account: Account = field(default_factory=accounting.initial)
    tiers: TierBook = ()
    decision: Decision | None = None
    """The interval that holds."""
    proposal: Decision | None = None
    """What the newest observations would make it."""
    last_save: events.SaveCommitted | events.SaveFailed | events.SaveRejected | None = None
    last_interruption: events.Interrupted | None = None
    last_restart: events.Restarted | None = None
    saves: int = 0
    saves_failed: int = 0
    saves_rejected: int = 0
    notes: tuple[events.Noted, ...] = ()
    """The last few."""
    drills: drilling.Drills = field(default_factory=drilling.Drills)

    @property
    def estimate(self) -> Estimate:
        """M, C, R, U and step time as of the newest event, for the world that runs now or would."""
        return estimates.estimate(self.estimates, t=self.run.t, world_size=self.world)

    @property
    def world(self) -> int:
        return self.run.world_size or self.run.first_world or max(1, self.run.devices_healthy)


def apply(picture: Picture, event: events.Event) -> Picture:
    """The picture after `event`."""
    changed = replace(
        picture,
        run=run.apply(picture.run, event),
        estimates=estimates.apply(picture.estimates, event),
        account=accounting.apply(picture.account, event),
        drills=drilling.apply(picture.drills, event),
        tiers=tierbook.apply(picture.tiers, event),
    )
    match event:
        case events.IntervalDecided():
            decision = changed.proposal or changed.decision
            if decision is not None:
                decision = dataclasses.replace(decision, reason=event.reason)
            return dataclasses.replace(changed, decision=decision, proposal=None)
        case events.SaveCommitted():
            changed = dataclasses.replace(changed, last_save=event, saves=picture.saves + 1)
        case events.SaveFailed():
            changed = dataclasses.replace(changed, last_save=event, saves_failed=picture.saves_failed + 1)
        case events.SaveRejected():
            changed = dataclasses.replace(changed, last_save=event, saves_rejected=picture.saves_rejected + 1)
        case events.Interrupted():
            changed = dataclasses.replace(changed, last_interruption=event)
        case events.Restarted():
            changed = dataclasses.replace(changed, last_restart=event)
        case events.Noted():
            changed = dataclasses.replace(changed, notes=(*picture.notes, event)[-8:])
        case _:
            pass
    if isinstance(event, _RECONSIDER):
        known = estimates.estimate(changed.estimates, t=changed.run.t, world_size=changed.world, bounds=False)
        return dataclasses.replace(
            changed, proposal=interval.decide(known, changed.run.policy), tiers=_promotion(changed)
        )
    return changed


def _promotion(picture: Picture) -> TierBook:
    if len(picture.tiers) < 2:
        return picture.tiers
    rates = estimates.rates_by_severity(picture.estimates, t=picture.run.t, world_size=picture.world)
    decision = picture.decision
    return tierbook.decided(picture.tiers, interval_s=decision.interval_s if decision else None, rates=rates)


def replay(history: Iterable[events.Event]) -> Picture:
    """The picture after a whole history."""
    picture = Picture()
    for event in history:
        picture = apply(picture, event)
    return picture


def decide(picture: Picture, t: float) -> list[Command]:
    """What the picture calls for at `t`: the run's own commands, and the records that follow from the other folds."""
    waiting = picture.account.restart
    if picture.run.status is Status.TRAINING and waiting is not None and waiting.done is not None:
        restart = accounting.pending_restart(picture.account, t)
        if restart is not None:
            return [Record(event=events.Restarted(t=t, attempt=picture.run.attempt, **restart))]
    if picture.proposal is not None and interval.worth_moving(picture.decision, picture.proposal):
        return [Record(event=_decided(picture, picture.proposal, t))]
    commands = decisions.decide(picture.run, t)
    if not any(isinstance(command, Record) for command in commands):
        growth = _growth(picture, t)
        if growth is not None:
            return [growth]
        commands += drilling.decide(picture.drills, picture.run, t)
    return [_complete(picture, command) for command in commands]


def _growth(picture: Picture, t: float) -> Command | None:
    """Take up devices that came back, right after a commit, where the gain until the next failure outweighs a restart."""
    state, last = picture.run, picture.last_save
    if state.status is not Status.TRAINING or not state.policy.grow_at_checkpoint or state.request is not None:
        return None
    if not isinstance(last, events.SaveCommitted) or last.attempt != state.attempt or last.t < state.devices_changed_t:
        return None
    available = {name: state.usable(name, t) for name in state.placeable()}
    better = placement.choose(available, state.policy)
    if better is None or better.world_size <= state.world_size:
        return None
    estimate = estimates.estimate(picture.estimates, t=t, world_size=better.world_size, bounds=False)
    gain = estimate.mtbf_s * (1.0 - state.world_size / better.world_size)
    cost = (estimate.restart_s or DEFAULT_RESTART_S) + (estimate.stall_s or 0.0)
    if gain <= cost:
        return None
    reason = f"{better.world_size} devices are usable again, {state.world_size} are used"
    return Record(event=events.Requested(t=t, request="relaunch", source="grow", reason=reason))


def _complete(picture: Picture, command: Command) -> Command:
    """Fill in what the state machine does not know: how much training time an interruption threw away."""
    if isinstance(command, Record) and isinstance(command.event, events.Interrupted):
        return Record(event=dataclasses.replace(command.event, lost_seconds=picture.account.lost_s))
    return command


def _decided(picture: Picture, decision: Decision, t: float) -> events.IntervalDecided:
    estimate = picture.estimate
    why = interval.why_moved(picture.decision, decision)
    return events.IntervalDecided(
        t=t,
        attempt=None,
        mtbf_s=estimate.mtbf_s,
        mtbf_low_s=estimate.mtbf_low_s,
        mtbf_high_s=estimate.mtbf_high_s,
        stall_s=estimate.stall_s,
        restart_s=estimate.restart_s,
        upload_s=estimate.upload_s,
        step_s=estimate.step_s,
        interval_s=decision.interval_s,
        interval_steps=decision.interval_steps,
        formula=decision.formula,
        clamped_by=decision.clamped_by,
        reason=f"{decision.reason}; {why}" if why else decision.reason,
    )
