"""What if restarts had taken 2 minutes, or a save 5 s? This run's own interruptions, replayed at other costs.

Each failure strikes after as much time up (training and saving) as it did, half a cycle more or less. What is lost, and
what saving costs, follows from where in a cycle of T of training and C of saving that falls, with a save committed U after
it began. Planned
stops save first and lose nothing. Time outside of the model (start-up, planned restarts, waiting at the end) stays as it
was.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckptd.core import accounting, interval
from ckptd.core import events as ev
from ckptd.core.accounting import Account
from ckptd.core.estimates import Estimate
from ckptd.core.policy import Policy

TERMS: Final = ("save", "rework", "restart")
"""The terms of the model's waste."""
MOST_STRETCHES: Final = 5_000
"""Interruptions that are remembered, the newest."""
_MOMENTS: Final = tuple((2 * i + 1) / 16 - 1 for i in range(16))
"""Where within its reach, from -1 to 1, a failure is taken to strike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Time up between two interruptions, and how it ended."""

    up_s: float
    """Training and saving, what was lost later included."""
    end: Literal["failure", "planned", "open"]
    restart_s: float | None = None
    """What the restart after a failure cost; None: it is not over, or there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a replay assumes. Seconds; `restart_s` None: each restart takes what it took."""

    interval_s: float
    stall_s: float
    upload_s: float = 0.0
    restart_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Where the time of a run goes. Seconds."""

    productive: float
    save: float
    rework: float
    restart: float
    outside: float

    @property
    def wall_s(self) -> float:
        return self.productive + self.save + self.rework + self.restart + self.outside

    @property
    def goodput(self) -> float:
        """Productive share; 0 of an empty run."""
        return self.productive / self.wall_s if self.wall_s > 0 else 0.0


class Stretches:
    """Follows an account and remembers how long each stretch was. Bounded; changed in place."""

    def __init__(self) -> None:
        self._closed: list[Stretch] = []
        self._began = 0.0

    def saw(self, account: Account, event: ev.Event) -> None:
        """`account` is the one after `event`."""
        if isinstance(event, ev.Interrupted):
            up = up_s(account)
            end: Literal["failure", "planned"] = "planned" if event.planned else "failure"
            self._closed.append(Stretch(up_s=max(0.0, up - self._began), end=end))
            self._began = max(up, self._began)
            del self._closed[:-MOST_STRETCHES]
        elif isinstance(event, ev.Restarted) and not event.planned:
            # A restart goes on over attempts that never trained: it belongs to the first failure among them.
            for index in range(len(self._closed) - 1, -1, -1):
                stretch = self._closed[index]
                if stretch.end == "failure" and stretch.restart_s is None and stretch.up_s > 0:
                    self._closed[index] = dataclasses.replace(stretch, restart_s=event.total_s)
                    break

    def all(self, account: Account) -> list[Stretch]:
        """Those that are over, and the one that is not."""
        return [*self._closed, Stretch(up_s=max(0.0, up_s(account) - self._began), end="open")]


class Cycles:
    """Measures how much time up lies between one save and the next of an attempt."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._last: tuple[int | None, int, float] | None = None

    def committed(self, event: ev.SaveCommitted, up: float) -> None:
        """A save was committed after `up` seconds of training and saving. Of several tiers the first counts."""
        if self._last is not None and self._last[0] == event.attempt:
            if event.step <= self._last[1]:
                return
            self._sum += up - self._last[2]
            self._count += 1
        self._last = (event.attempt, event.step, up)

    @property
    def mean_s(self) -> float | None:
        """None until two saves of one attempt were committed."""
        return self._sum / self._count if self._count and self._sum > 0 else None


def up_s(account: Account) -> float:
    """Seconds of training and saving so far."""
    return account.trained.seconds + account.spent.get("checkpoint_stall", 0.0)


def happened(account: Account, stretches: list[Stretch]) -> Outcome:
    """What the account says, in the terms of the model."""
    spent = accounting.summary(account, t=-math.inf).seconds_by_phase
    productive, save, rework = spent["productive"], spent["checkpoint_stall"], spent["wasted_progress"]
    left = max(0.0, account.wall_s - productive - save - rework)
    restart = min(left, math.fsum(s.restart_s or 0.0 for s in stretches) + _under_way(account))
    return Outcome(productive=productive, save=save, rework=rework, restart=restart, outside=left - restart)


def _under_way(account: Account) -> float:
    """Seconds that the restart after a failure has cost so far; 0 where none is under way."""
    restart = account.restart
    if restart is None or restart.planned or restart.done is not None:
        return 0.0
    return math.fsum(seconds - restart.spent.get(phase, 0.0) for phase, seconds in account.spent.items())


def strike(up_s: float, costs: Costs) -> tuple[float, float]:
    """What a failure after `up_s` seconds up leaves: (training that a commit holds, stall that was paid). Seconds."""
    interval = max(costs.interval_s, costs.upload_s)  # one save in flight
    cycle = interval + costs.stall_s
    begun = int((up_s + costs.stall_s) / cycle)
    stalled = 0.0
    if begun:
        finished = (begun - 1) * costs.stall_s
        stalled = finished + max(0.0, min(costs.stall_s, up_s - begun * interval - finished))
    late = max(costs.upload_s, costs.stall_s) - costs.stall_s
    kept = max(0, int((up_s - late) / cycle)) * interval
    return min(kept, up_s - stalled), stalled


def replay(stretches: list[Stretch], costs: Costs, *, outside_s: float) -> Outcome:
    """This run at other costs. `outside_s`: time that the model does not speak of, as `happened` gives it.

    Whether a failure strikes right before a commit or right after it is luck, which another interval would have dealt
    out otherwise: each is taken to strike at some moment within half a cycle of its own, any as likely as the other.

    Raises:
        ValueError: the interval is not above zero.
    """
    if not costs.interval_s > 0:
        raise ValueError(f"the interval must be above zero, is {costs.interval_s!r} seconds")
    cycle = max(costs.interval_s, costs.upload_s) + costs.stall_s
    productive = save = rework = restart = 0.0
    for stretch in stretches:
        if stretch.end == "failure":
            reach = min(stretch.up_s, cycle / 2)
            struck = [strike(stretch.up_s + reach * where, costs) for where in _MOMENTS]
            kept = math.fsum(k for k, _ in struck) / len(struck)
            stalled = math.fsum(s for _, s in struck) / len(struck)
            rework += stretch.up_s - stalled - kept
            if stretch.restart_s is not None:
                restart += stretch.restart_s if costs.restart_s is None else costs.restart_s
        else:
            stalled = strike(stretch.up_s, costs)[1]
            kept = stretch.up_s - stalled
        productive += kept
        save += stalled
    return Outcome(productive=productive, save=save, rework=rework, restart=restart, outside=outside_s)


def answers(
    asked: list[dict[str, float]] | None, *, stretches: list[Stretch], account: Account, estimate: Estimate | None,
    policy: Policy, cycle_s: float | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The run as it was, and its own interruptions replayed: at its own costs, and at each of `asked`.

    A question gives some of `restart`, `stall`, `upload` and `interval`, in seconds; where it leaves the interval out,
    the run's policy derives one from the rest. Without questions: restarts in half the time, saves at half the stall,
    and both. `cycle_s`: mean time from save to save. An empty list where none was measured yet.
    """
    was = happened(account, stretches)
    if estimate is None or estimate.stall_s is None or was.wall_s <= 0 or cycle_s is None:
        return []
    own = max(cycle_s - estimate.stall_s, interval.MIN_STALL_S)
    if asked is None:
        asked = [{"stall": estimate.stall_s / 2}]
        if estimate.restart_s is not None:
            faster = {"restart": estimate.restart_s / 2}
            asked = [faster, *asked, faster | asked[0]]
    rows = [
        {"name": "as it was", "asked": {}, "interval_s": own, **_told(was)},
        {"name": "replayed at its own costs"}
        | _answer({"interval": own}, stretches=stretches, estimate=estimate, policy=policy, outside_s=was.outside),
    ]
    return rows + [
        {"name": ""} | _answer(question, stretches=stretches, estimate=estimate, policy=policy, outside_s=was.outside)
        for question in asked
    ]


def _answer(
    asked: dict[str, float], *, stretches: list[Stretch], estimate: Estimate, policy: Policy, outside_s: float
) -> dict[str, Any]:
    stall, upload = asked.get("stall", estimate.stall_s or 0.0), asked.get("upload", estimate.upload_s or 0.0)
    seconds = asked.get("interval")
    if seconds is None:
        other = dataclasses.replace(estimate, stall_s=stall, upload_s=upload)
        seconds = interval.decide(other, policy).interval_s or estimate.mtbf_s
    costs = Costs(interval_s=seconds, stall_s=stall, upload_s=upload, restart_s=asked.get("restart"))
    return {"asked": asked, "interval_s": seconds, **_told(replay(stretches, costs, outside_s=outside_s))}


def _told(outcome: Outcome) -> dict[str, Any]:
    wall = outcome.wall_s
    return {
        "goodput": outcome.goodput,
        "wall_s": wall,
        "waste": {term: getattr(outcome, term) / wall for term in TERMS} if wall > 0 else None,
    }
