"""How much would a job waste under each way of choosing the interval? Simulated runs, failure by failure and save by save.

The policy `ckptd` is the production one: made-up events go through the fold in `core/estimates.py` and the decisions in
`core/interval.py`, on a virtual clock. All policies meet the same failures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ckptd.core import estimates, events, interval
from ckptd.core.policy import Policy
from ckptd.failure_times import Trace

UP_SHARE = 0.5
"""Of R, the part in which devices are held by the new attempt (launch, init, restore, first step): exposure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a simulated job pays, in seconds."""

    devices: int
    stall_s: float
    restart_s: float
    upload_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one run under one policy. Seconds."""

    wall_s: float
    saving_s: float
    rework_s: float
    restart_s: float
    failures: int
    saves: int

    @property
    def waste(self) -> float:
        """Share of the wall-clock that was not productive."""
        return (self.saving_s + self.rework_s + self.restart_s) / self.wall_s if self.wall_s > 0 else 0.0


NODE = "all"
"""One node stands for them all: neither estimates nor interval look at it."""


class Follower(Protocol):
    """A policy that is told what happens, as the daemon is."""

    stages: bool
    """Whether it makes anything of `SaveStaged`: half of all events."""

    def tell(self, event: events.Event) -> None:
        """This happened, and is to be learnt from."""

    def due(self, since: float) -> float:
        """When to save, where training has gone on without a save since `since`."""


class Production:
    """ckptd's own policy: the fold of the estimates and the decision about the interval.

    It derives the interval after the same events as `core/picture.py` does, and moves it when that pays. State machine and
    account are left out, since they have no say in the interval: years take seconds.
    """

    stages = False

    def __init__(self, policy: Policy, devices: int) -> None:
        self._policy = policy
        self._devices = devices
        self._state = estimates.initial()
        self.decision: interval.Decision | None = None

    def due(self, since: float) -> float:
        assert self.decision is not None
        assert self.decision.interval_s is not None
        return since + self.decision.interval_s

    def tell(self, event: events.Event) -> None:
        """Fold one event in."""
        self._state = estimates.apply(self._state, event)
        if isinstance(event, events.SaveCommitted | events.FirstStep | events.Interrupted):
            known = estimates.estimate(self._state, t=event.t, world_size=self._devices, bounds=False)
            proposal = interval.decide(known, self._policy)
            if interval.worth_moving(self.decision, proposal):
                self.decision = proposal


class Oracle:
    """Knows C, and M at each moment: the optimum for exponential failures (R and U do not move it)."""

    stages = False

    def __init__(self, trace: Trace, job: Job) -> None:
        self._from = [start for start, _ in trace.mtbf_s]
        self._best = [best_interval(mtbf_s, job) for _, mtbf_s in trace.mtbf_s]

    def due(self, since: float) -> float:
        at = bisect_right(self._from, since) - 1
        due = since + self._best[at]
        while at + 1 < len(self._from) and self._from[at + 1] < due:  # the rate changes before then
            at += 1
            due = max(self._from[at], since + self._best[at])
        return due

    def tell(self, event: events.Event) -> None:
        """Nothing to learn."""


def best_interval(mtbf_s: float, job: Job) -> float:
    """The optimum that knows everything: exact for exponential failures, no shorter than U."""
    return max(interval.exact(max(job.stall_s, interval.MIN_STALL_S), mtbf_s), job.upload_s)


# --- one run ------------------------------------------------------------------------------------------------------------


def follow(trace: Trace, job: Job, policy: Policy, follower: Follower) -> Outcome:
    """One run under a policy that is told of every save and every failure."""
    tell, upload_s = follower.tell, max(job.upload_s, job.stall_s)
    saving = rework = restarting = 0.0
    attempt = step = saves = failures = 0
    times = iter((*trace.times, math.inf))
    failure = next(times)
    t = 0.0
    tell(events.DaemonStarted(t=t, policy=policy.to_dict()))
    first = up = -math.inf
    newest: dict[str, Any] | None = None
    while t < trace.horizon_s:
        attempt += 1
        _start(tell, attempt, t, job, after=first, resume=newest)
        since = t  # training has gone on without a save since then; all before it is committed
        while True:
            begin = max(follower.due(since), t)
            done, t = begin + job.stall_s, begin + upload_s
            if t > failure or t > trace.horizon_s:
                break
            step += 1
            saves += 1
            saving += job.stall_s
            newest = {"step": step, "attempt": attempt}
            if follower.stages:
                tell(events.SaveStaged(t=done, attempt=attempt, step=step, stall_s=job.stall_s))
            tell(events.SaveCommitted(t=t, attempt=attempt, step=step, stall_s=job.stall_s, upload_s=job.upload_s))
            since = done
        end = min(failure, trace.horizon_s)
        saving += min(max(end - begin, 0.0), job.stall_s)
        if failure >= trace.horizon_s:
            break
        if done <= failure and follower.stages:
            step += 1
            tell(events.SaveStaged(t=done, attempt=attempt, step=step, stall_s=job.stall_s))
        rework += min(begin, end) - since + max(end - done, 0.0)
        first = failure
        while failure <= max(up, first):  # failures before the first step lose nothing: it begins again
            failures += 1
            _fail(tell, attempt, failure)
            up = failure + job.restart_s
            failure = next(times)
        restarting += min(up, trace.horizon_s) - first
        t = up
    return Outcome(
        wall_s=trace.horizon_s, saving_s=saving, rework_s=rework, restart_s=restarting, failures=failures, saves=saves
    )


def _fail(tell: Callable[[events.Event], None], attempt: int, t: float) -> None:
    tell(events.FailureDetected(t=t, detected_t=t, attempt=attempt, node=NODE, rank=0, exitcode=-9))
    tell(events.AttemptEnded(t=t, attempt=attempt, node=NODE))
    tell(events.Interrupted(t=t, detected_t=t, attempt=attempt, cause="simulated"))


def _start(
    tell: Callable[[events.Event], None],
    attempt: int,
    t: float,
    job: Job,
    *,
    after: float,
    resume: dict[str, Any] | None,
) -> None:
    """An attempt whose first step is complete at `t`. `after`: the failure before it, -inf for none."""
    launch = t if math.isinf(after) else t - UP_SHARE * job.restart_s
    tell(
        events.AttemptLaunched(t=launch, attempt=attempt, world_size=job.devices, placement={NODE: [0]}, resume=resume)
    )
    tell(events.WorkersStarted(t=launch, attempt=attempt, node=NODE))
    tell(events.WorkersInitialised(t=launch, attempt=attempt, node=NODE))
    tell(events.StateRestored(t=launch, attempt=attempt, node=NODE))
    tell(events.FirstStep(t=t, attempt=attempt, node=NODE))
    if not math.isinf(after):
        total = t - after
        tell(events.Restarted(t=t, attempt=attempt, total_s=total, launch_s=total))


def fixed(trace: Trace, job: Job, interval_s: float) -> Outcome:
    """One run that saves after every `interval_s` of training: as `follow`, but a whole attempt at once."""
    interval_s = max(interval_s, job.upload_s)
    cycle, upload_s = interval_s + job.stall_s, max(job.upload_s, job.stall_s)
    saving = rework = restarting = 0.0
    failures = saves = 0
    t, up = 0.0, -math.inf
    times = iter((*trace.times, math.inf))
    failure = next(times)
    while t < trace.horizon_s:
        end = min(failure, trace.horizon_s)
        committed = max(0, math.floor((end - t - interval_s - upload_s) / cycle) + 1)
        since = t + committed * cycle
        stall = min(max(end - since - interval_s, 0.0), job.stall_s)
        saves += committed
        saving += committed * job.stall_s + stall
        if failure >= trace.horizon_s:
            break
        rework += end - since - stall
        first = failure
        while failure <= max(up, first):
            failures += 1
            up = failure + job.restart_s
            failure = next(times)
        restarting += min(up, trace.horizon_s) - first
        t = up
    return Outcome(
        wall_s=trace.horizon_s, saving_s=saving, rework_s=rework, restart_s=restarting, failures=failures, saves=saves
    )
