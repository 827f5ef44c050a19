"""Where did every second of the run go?

Each second of wall-clock is booked to exactly one phase, so the phases sum to the wall-clock by construction. Two
amounts are moved after the fact, both out of productive time: the stall of a save, and what a failure threw away.
Of all time spent training (`trained`), `useful` is what the present state of the model still contains; the difference
is wasted progress. Falling back to a checkpoint means that `useful` becomes what it was when that was staged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ckptd.core import events as ev
from ckptd.core.records import replace

PHASES: Final = (
    "productive",
    "checkpoint_stall",
    "wasted_progress",
    "detect",
    "stop",
    "wait_for_devices",
    "launch",
    "init",
    "restore",
    "first_step",
    "startup",
    "drain",
    "other",
)
"""The phases of wall-clock, which sum to it."""
DEGRADED: Final = "degraded"
"""In device-seconds only: devices that were wanted and missing while the job ran on fewer."""

_BEFORE_TRAINING = ("startup", "launch", "init", "restore", "first_step")
_RESTART_PARTS = {
    "detect_s": ("detect",),
    "stop_s": ("stop", "drain"),
    "wait_s": ("wait_for_devices", "other"),
    "launch_s": ("launch", "startup"),
    "init_s": ("init",),
    "restore_s": ("restore",),
    "first_step_s": ("first_step",),
}
_MOST_MARKS = 256


class _Amount(NamedTuple):
    """Time, as wall-clock and as device time."""

    seconds: float = 0.0
    device_seconds: float = 0.0


_NOTHING: Final = _Amount()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """A save: what was useful when it was staged, and how much of its stall has been booked."""

    attempt: int | None
    step: int
    useful: _Amount
    stall_s: float
    committed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Restart:
    """A restart under way, or complete and not yet acknowledged by a `Restarted` event."""

    attempt: int | None
    """The attempt that was interrupted."""
    spent: dict[str, float]
    """`Account.spent` when it was interrupted."""
    planned: bool = False
    severity: str = "process"
    done: dict[str, float] | None = None
    """`Account.spent` at the first step; None before."""
    warm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """State of the fold. Bounded; no part of it is changed in place."""

    t: float = -math.inf
    """The newest `t` seen."""
    phase: str | None = None
    """What the next second is booked to; None: the run has not begun, or is over."""
    wall_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, but for the productive and the wasted ones."""
    device_spent: dict[str, float] = field(default_factory=dict)
    trained: _Amount = _NOTHING
    useful: _Amount = _NOTHING
    anchor: float = 0.0
    """`useful` seconds at the latest point behind which no later event may take time back."""
    marks: tuple[_Mark, ...] = ()
    base: _Amount = _NOTHING
    """What was useful in the checkpoint that the present attempt came from."""
    attempt: int | None = None
    attempts: int = 0
    world: int = 0
    """Devices at work, 0 while no attempt is up."""
    wanted: int = 0
    not_started: frozenset[str] = frozenset()
    not_ended: frozenset[str] = frozenset()
    """Nodes that the attempt has yet to start on, and to end on."""
    warm: bool = False
    stop_requested: bool = False
    finished: bool = False
    lost_s: float = 0.0
    """Training time that the attempt's failure threw away, as it stood when it was detected."""
    restart: _Restart | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The account at one moment."""

    wall_s: float
    goodput: float
    """Productive share of the wall-clock; 0 before the run begins."""
    seconds_by_phase: dict[str, float]
    """A key for each of `PHASES`."""
    device_seconds_by_phase: dict[str, float]
    """The same in device-seconds, and `degraded`; they sum to wanted devices times wall-clock."""


def initial() -> Account:
    """The account of a run that has not begun."""
    return Account()


def apply(account: Account, event: ev.Event) -> Account:
    """The account after `event`. Never raises and never goes negative, whatever the order of events and their times."""
    if account.phase is None:
        account = replace(account, t=_later(account.t, event.t))
        return _begin(account) if isinstance(event, ev.DaemonStarted) else account
    if isinstance(event, ev.FailureDetected):
        return _failed(account, event) if _is_current(account, event) else _advance(account, event.t)
    account = _advance(account, event.t)
    match event:
        case ev.AttemptLaunched():
            return _launched(account, event)
        case ev.Requested() if event.request != "save":
            stop = event.request in ("stop", "stop_now")
            return replace(_drain(account), stop_requested=account.stop_requested or stop)
        case ev.Interrupted():
            return _interrupted(account, event)
        case ev.RolledBack():
            drained = _drain(account)
            return drained if drained is account else replace(drained, phase="stop")
        case ev.Restarted():
            return replace(account, restart=None)
        case ev.RunEnded():
            return replace(
                account, phase=None, world=0, not_started=frozenset(), not_ended=frozenset(), restart=None,
                stop_requested=False,
            )  # fmt: skip
        case _ if _is_current(account, event):
            return _in_attempt(account, event)
        case _:
            return account


def advance(account: Account, t: float) -> Account:
    """The account at `t`, nothing having happened since its newest event; a `t` before that changes nothing."""
    return _advance(account, t)


def summary(account: Account, *, t: float) -> Summary:
    """The account at `t`; a `t` before the newest event counts as that event's."""
    account = _advance(account, t)
    seconds = dict.fromkeys(PHASES, 0.0) | account.spent
    devices = dict.fromkeys((*PHASES, DEGRADED), 0.0) | account.device_spent
    for i, table in enumerate((seconds, devices)):
        table["productive"] = account.useful[i]
        table["wasted_progress"] = max(0.0, account.trained[i] - account.useful[i])
    return Summary(
        wall_s=account.wall_s,
        goodput=min(1.0, seconds["productive"] / account.wall_s) if account.wall_s > 0 else 0.0,
        seconds_by_phase=seconds,
        device_seconds_by_phase=devices,
    )


def pending_restart(account: Account, first_step_t: float) -> dict[str, Any] | None:
    """The own fields of the `Restarted` event that is due, or None: nothing was interrupted, or it is not up again.

    Works before the `FirstStep` event is applied, with the `t` of that event, and after it until `Restarted` is. A
    restart begins with the first failure and includes attempts that failed before their first step; `total_s` is the
    sum of the parts, none of which is negative.
    """
    restart = account.restart
    if restart is None or (restart.done is None and account.phase not in _BEFORE_TRAINING):
        return None
    after = restart.done if restart.done is not None else _advance(account, first_step_t).spent
    parts = {
        name: math.fsum(after.get(phase, 0.0) - restart.spent.get(phase, 0.0) for phase in phases)
        for name, phases in _RESTART_PARTS.items()
    }
    return {
        "interrupted_attempt": restart.attempt or 0,
        "total_s": math.fsum(parts.values()),
        **parts,
        "warm": restart.warm if restart.done is not None else account.warm,
        "severity": restart.severity,
        "planned": restart.planned,
    }


# --- time ---------------------------------------------------------------------------------------------------------------


def _later(old: float, new: float) -> float:
    return new if math.isfinite(new) and new > old else old


def _positive(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _advance(account: Account, t: float) -> Account:
    """Book the time since the newest event to the present phase."""
    later, phase = _later(account.t, t), account.phase
    if phase is None or later == account.t:
        return account
    seconds = later - account.t
    account = replace(account, t=later, wall_s=account.wall_s + seconds)
    if phase != "productive":
        return _book(account, phase, seconds, account.world or account.wanted)
    gain = _Amount(seconds, seconds * account.world)
    return replace(
        account,
        trained=_plus(account.trained, gain),
        useful=_plus(account.useful, gain),
        device_spent=_add(account.device_spent, DEGRADED, seconds * _missing(account)),
    )


def _book(account: Account, phase: str, seconds: float, devices: int) -> Account:
    device_spent = _add(account.device_spent, phase, seconds * devices)
    if account.world:
        device_spent = _add(device_spent, DEGRADED, seconds * _missing(account))
    return replace(account, spent=_add(account.spent, phase, seconds), device_spent=device_spent)


def _take_back(account: Account, seconds: float, phase: str) -> Account:
    """Move up to `seconds` of this attempt's productive time, not from before the anchor, to `phase`."""
    seconds = min(_positive(seconds), max(0.0, account.useful.seconds - account.anchor))
    moved = _Amount(seconds, min(seconds * account.world, account.useful.device_seconds))
    return replace(
        account,
        trained=_minus(account.trained, moved),
        useful=_minus(account.useful, moved),
        spent=_add(account.spent, phase, moved.seconds),
        device_spent=_add(account.device_spent, phase, moved.device_seconds),
    )


def _fall_back(account: Account, useful: _Amount) -> Account:
    return replace(account, useful=useful, anchor=useful.seconds)


def _missing(account: Account) -> int:
    return max(0, account.wanted - account.world)


def _add(table: dict[str, float], phase: str, amount: float) -> dict[str, float]:
    return {**table, phase: table.get(phase, 0.0) + amount}


def _plus(a: _Amount, b: _Amount) -> _Amount:
    return _Amount(a.seconds + b.seconds, a.device_seconds + b.device_seconds)


def _minus(a: _Amount, b: _Amount) -> _Amount:
    return _Amount(max(0.0, a.seconds - b.seconds), max(0.0, a.device_seconds - b.device_seconds))


# --- the life of an attempt -----------------------------------------------------------------------------------------------


def _begin(account: Account) -> Account:
    t = account.t if math.isfinite(account.t) else 0.0
    return replace(account, t=t, phase="startup", finished=False, stop_requested=False, restart=None)


def _is_current(account: Account, event: ev.Event) -> bool:
    """Does the event speak of the attempt that is up?"""
    return account.world > 0 and event.attempt in (None, account.attempt)


def _launched(account: Account, event: ev.AttemptLaunched) -> Account:
    wanted = max(event.devices_wanted, event.world_size, 1)
    if account.wanted == 0:  # until now nobody knew how many devices were waiting
        account = replace(account, device_spent={phase: s * wanted for phase, s in account.spent.items()})
    useful = _useful_at(account, event.resume)
    nodes = frozenset(event.placement)
    return replace(
        _fall_back(account, useful),
        base=useful,
        phase="startup" if account.attempts == 0 else "launch",
        attempt=event.attempt,
        attempts=account.attempts + 1,
        world=max(event.world_size, 1),
        wanted=wanted,
        not_started=nodes,
        not_ended=nodes,
        warm=True,
        stop_requested=False,
        finished=False,
        lost_s=0.0,
    )


def _in_attempt(account: Account, event: ev.Event) -> Account:
    phase = account.phase
    match event:
        case ev.WorkersStarted():
            left = frozenset[str]() if event.node is None else account.not_started - {event.node}
            account = replace(account, not_started=left, warm=account.warm and event.warm)
            return replace(account, phase="init") if phase == "launch" and not left else account
        case ev.WorkersInitialised() if phase in ("launch", "init"):
            return replace(account, phase="restore")
        case ev.StateRestored() if phase in ("launch", "init", "restore"):
            return replace(account, phase="first_step")
        case ev.FirstStep() if phase in _BEFORE_TRAINING:
            return _first_step(account)
        case ev.SaveStaged():
            return _staged(account, event.attempt, event.step, event.stall_s)
        case ev.SaveCommitted():
            return _staged(account, event.attempt, event.step, event.stall_s, committed=True)
        case ev.SaveFailed() | ev.SaveRejected():
            return _save_failed(account, event)
        case ev.WorkersFinished() if event.closed or event.stopping:
            return replace(_drain(account), finished=account.finished or not event.stopping)
        case ev.AttemptEnded():
            return _node_ended(account, event.node)
        case _:
            return account


def _first_step(account: Account) -> Account:
    restart = account.restart
    if restart is not None:
        restart = replace(restart, done=account.spent, warm=account.warm)
    return replace(account, phase="productive", anchor=account.useful.seconds, restart=restart)


def _drain(account: Account) -> Account:
    """An attempt is to end without a failure: from now on the time goes into ending it."""
    if account.world == 0 or account.phase not in ("productive", *_BEFORE_TRAINING):
        return account
    return replace(_interrupt(account, planned=True), phase="drain")


def _interrupt(account: Account, *, planned: bool) -> Account:
    """Begin a restart, unless one is under way: that one goes on until training does."""
    if account.restart is not None and account.restart.done is None and not account.restart.planned:
        return account
    return replace(account, restart=_Restart(attempt=account.attempt, spent=account.spent, planned=planned))


def _failed(account: Account, event: ev.FailureDetected) -> Account:
    if account.phase in ("detect", "stop"):
        return _advance(account, event.t)
    training = account.phase == "productive"
    # The daemon may have booked the time since the death as productive before it learnt of it.
    late = _positive(account.t - event.t) if training else 0.0
    detect = min(late, _positive(event.detected_t - event.t))
    account = _interrupt(_advance(account, event.t), planned=False)
    account = _take_back(account, detect, "detect")
    account = _take_back(account, late - detect, "stop")
    account = _advance(replace(account, phase="detect"), event.detected_t)
    safe = account.base
    for mark in account.marks:
        if mark.committed and mark.attempt == account.attempt:
            safe = mark.useful
    lost_s = max(0.0, account.useful.seconds - safe.seconds)
    return replace(_fall_back(account, safe), phase="stop", lost_s=lost_s)


def _node_ended(account: Account, node: str | None) -> Account:
    """The attempt is over when it is over on its last node."""
    left = frozenset[str]() if node is None else account.not_ended - {node}
    if left:
        return replace(account, not_ended=left)
    if account.phase not in ("detect", "stop", "drain"):
        account = _interrupt(account, planned=False)
    over = account.stop_requested or account.finished
    return replace(account, phase="other" if over else "wait_for_devices", world=0, not_started=left)


def _interrupted(account: Account, event: ev.Interrupted) -> Account:
    restart = account.restart
    if restart is None or restart.done is not None or event.attempt not in (None, restart.attempt):
        return account
    return replace(account, restart=replace(restart, severity=event.severity, planned=event.planned))


# --- saves --------------------------------------------------------------------------------------------------------------


def _staged(account: Account, attempt: int | None, step: int, stall_s: float, *, committed: bool = False) -> Account:
    """Book what is new of a save's stall; the first event of a save sets its mark."""
    attempt = account.attempt if attempt is None else attempt
    at = _find(account.marks, attempt, step)
    known = None if at is None else account.marks[at]
    booked = 0.0 if known is None else known.stall_s
    if account.phase == "productive" and stall_s > booked:
        account = _take_back(account, stall_s - booked, "checkpoint_stall")
    if at is not None and known is not None:
        mark = replace(known, stall_s=max(booked, _positive(stall_s)), committed=known.committed or committed)
        return replace(account, marks=(*account.marks[:at], mark, *account.marks[at + 1 :]))
    mark = _Mark(attempt=attempt, step=step, useful=account.useful, stall_s=_positive(stall_s), committed=committed)
    marks = (*account.marks, mark)
    if len(marks) > _MOST_MARKS:  # old saves are rarely gone back to: every other one is near enough
        marks = (*marks[: _MOST_MARKS // 2 : 2], *marks[_MOST_MARKS // 2 :])
    return replace(account, marks=marks, anchor=account.useful.seconds)


def _save_failed(account: Account, event: ev.SaveFailed | ev.SaveRejected) -> Account:
    account = _staged(account, event.attempt, event.step, event.stall_s)
    at = _find(account.marks, account.attempt, event.step)
    if at is None or account.marks[at].committed:  # committed on one tier, failed on another
        return account
    return replace(account, marks=(*account.marks[:at], *account.marks[at + 1 :]))


def _find(marks: tuple[_Mark, ...], attempt: int | None, step: int) -> int | None:
    """Index of a save's mark; searched from the newest, which is the usual one."""
    for at in range(len(marks) - 1, -1, -1):
        if marks[at].step == step and marks[at].attempt == attempt:
            return at
    return None


def _useful_at(account: Account, resume: dict[str, Any] | None) -> _Amount:
    """What the checkpoint that an attempt resumes from contains; of an unknown one, what the newest before it does."""
    step = None if resume is None else resume.get("step")
    if not isinstance(step, int):
        return _NOTHING
    assert resume is not None
    same = [m for m in account.marks if m.step == step]
    of_attempt = [m for m in same if m.attempt == resume.get("attempt")]
    before = sorted((m for m in account.marks if m.step < step), key=lambda m: m.step)
    best = (of_attempt or same or before)[-1:]
    return best[0].useful if best else _NOTHING
