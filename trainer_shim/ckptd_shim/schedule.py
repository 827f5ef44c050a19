"""At which step does everybody save, and at which do they stop?

Between two agreements every rank knows the step of the next one, so an ordinary step costs one comparison. At an agreed
step one small all-reduce makes the decision of rank 0, and the wish to stop of any rank, everybody's. Only rank 0 reads
the clock and the control file. The upper half of this module is arithmetic without a clock; `Schedule` joins it to both.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from ckptd_shim import contract

if TYPE_CHECKING:
    from collections.abc import Callable

AGREEMENT_PERIOD_S: Final = 1.0
"""How far apart in time agreements are meant to be: the longest that a request waits, as long as steps are shorter."""

EXPOSURE: Final = 0.25
"""The part of an interval that may pass between two agreements if all the steps between turn out the longest known."""

_WINDOW: Final = 32
_FADE: Final = 0.999
_MOST_STEPS: Final = 10_000
_MOST: Final = 2**62
_LEAST: Final = -(2**63)
_NONE: Final = -1
_DECISION: Final = 6
"""How many of the numbers in an agreement are rank 0's alone."""


class StepTimes:
    """What the last agreements say of the time of a step: the longest step for safety, the mean for aim."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)
        self.worst_s = 0.0
        """The longest step known, seconds, faded by a thousandth an agreement: a spell of long steps may come again."""

    def add(self, seconds: float, steps: int, longest_s: float | None) -> None:
        """`steps` steps took `seconds`; one of them is known to have taken `longest_s`."""
        if steps > 0 and seconds >= 0:
            longest = max(seconds / steps, longest_s or 0.0)
            self._recent.append((seconds, steps, longest))
            self.worst_s = max(longest, self.worst_s * _FADE)

    @property
    def longest_s(self) -> float | None:
        """The longest recent step, in seconds, as far as is known; None: nothing is."""
        return max((longest for _, _, longest in self._recent), default=None)

    @property
    def mean_s(self) -> float | None:
        """The mean of the recent steps, in seconds; None: nothing is known."""
        return sum(s for s, _, _ in self._recent) / sum(n for _, n, _ in self._recent) if self._recent else None


def gap_steps(
    *,
    longest_s: float | None,
    mean_s: float | None,
    worst_s: float,
    previous: int,
    interval_s: float | None,
    left_s: float | None,
    left_steps: int | None,
) -> int:
    """How many steps from now the next agreement is, 1 at least.

    About `AGREEMENT_PERIOD_S` by the longest recent step, at most double the gap before (a spell of short steps that
    has only begun must not stretch it by a hundred), no more than `EXPOSURE` of `interval_s` by `worst_s`,
    and not beyond the end of the interval, which is `left_s` seconds or `left_steps` steps away (None: there is none).
    """
    if longest_s is None or mean_s is None:
        return 1
    gap = min(max(previous, 1) * 2, _MOST_STEPS)
    if longest_s > 0:
        gap = min(gap, int(AGREEMENT_PERIOD_S / longest_s))
    if interval_s is not None and worst_s > 0:
        gap = min(gap, int(interval_s * EXPOSURE / worst_s))
    if left_s is not None and mean_s > 0:
        gap = min(gap, int(max(left_s, 0.0) / mean_s))
    if left_steps is not None:
        gap = min(gap, left_steps)
    return max(gap, 1)


def is_due(
    *,
    elapsed_s: float,
    elapsed_steps: int,
    interval_s: float | None,
    interval_steps: int | None,
    next_in_s: float,
) -> bool:
    """Whether the interval asks for a save now, at an agreement whose next one is `next_in_s` seconds away.

    In seconds, the agreement nearer to the end of the interval takes the save: this one, a little early, or the next.
    Of two intervals the earlier counts; without one, none is ever due.
    """
    if elapsed_steps <= 0:
        return False
    if interval_steps is not None and elapsed_steps >= interval_steps:
        return True
    if interval_s is None:
        return False
    early = interval_s - elapsed_s
    late = elapsed_s + next_in_s - interval_s
    return early <= 0 or early < late


def check_intervals(interval_s: float | None, interval_steps: int | None) -> None:
    """Raise ValueError unless each interval is None or above zero, and finite."""
    if interval_s is not None and not (math.isfinite(interval_s) and interval_s > 0):
        raise ValueError(f"an interval of {interval_s} s makes no sense: it must be a finite time above zero")
    if interval_steps is not None and not 1 <= interval_steps < _MOST:
        raise ValueError(f"an interval of {interval_steps} steps makes no sense: it must be 1 at least")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What every rank does at this step."""

    save: bool
    stop: bool
    """Training ends with this step, once the save at it is committed."""
    save_request: int
    """Number of the request from the control file that this save serves; 0: it serves none."""
    reason: str
    """Why, the same text on every rank; empty when there is nothing to do."""


_REASONS: Final = ("", "interval", "save request", "stop after save")


class ControlReader:
    """Rank 0's view of the control file: hands out each newer document once, and says why it ignores another."""

    def __init__(self, path: str | None, attempt: int, on_ignored: Callable[[str], None] | None) -> None:
        self._path = path
        self._attempt = attempt
        self._on_ignored = on_ignored
        self._signature: tuple[int, int, int] | None = None
        self._seq: int | None = None
        self._complaint: str | None = None

    def poll(self) -> contract.Control | None:
        """The document, if the file has changed and is for this attempt and newer; None otherwise. Never raises."""
        try:
            control = self._read_if_changed()
        except contract.ContractError as error:
            why = str(error)
        except (OSError, ValueError, RecursionError) as error:
            why = f"the control file {self._path} cannot be used: {error}"
        else:
            if control is not None:
                self._seq, self._complaint = control.seq, None
            return control
        if why != self._complaint:
            self._complaint = why
            if self._on_ignored is not None:
                self._on_ignored(why)
        return None

    def _read_if_changed(self) -> contract.Control | None:
        if self._path is None:
            return None
        try:
            if _signature(os.stat(self._path)) == self._signature:
                return None
        except FileNotFoundError:
            if self._signature is None:
                return None  # none yet: so an attempt may begin
            raise
        with open(self._path, "rb") as file:
            # Of the file that is read, not of the one that was there before: a rename may lie between the two.
            self._signature = _signature(os.fstat(file.fileno()))
            control = contract.Control.from_json(file.read(), where=self._path)
        check_intervals(control.interval_s, control.interval_steps)
        if not 0 <= control.save_request < _MOST:
            raise ValueError(f"save_request is {control.save_request}")
        if control.attempt != self._attempt:
            raise ValueError(f"it is for attempt {control.attempt}, this is attempt {self._attempt}")
        if self._seq is not None and control.seq <= self._seq:
            raise ValueError(f"its seq {control.seq} is not above {self._seq}, which was read before")
        return control


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_ino, status.st_mtime_ns, status.st_size)


class Schedule:
    """When to save, agreed between the ranks. All of them call `start`, `agree` and `saved` at the same steps.

    Args:
        rank: this rank; rank 0 decides.
        world_size: the number of ranks in `group`.
        group: a gloo process group of nobody else's use; None in a world of one.
        attempt: a control file for another attempt is ignored.
        control_path: the control file, read on rank 0 only; None: there is none.
        interval_s: seconds from the start of one save to the start of the next; None: not by time.
        interval_steps: steps between saves; None: not by steps. With both None there are saves on request only.
        clock: monotonic seconds.
        on_ignored: told once, on rank 0, why a control file was ignored.
        may_save: asked on rank 0 with the step and the request (0: none) before a save that does not end training: False
            puts it off, and it is asked again about a second later.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        attempt: int,
        control_path: str | None,
        interval_s: float | None,
        interval_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        on_ignored: Callable[[str], None] | None = None,
        may_save: Callable[[int, int], bool] | None = None,
    ) -> None:
        check_intervals(interval_s, interval_steps)
        if world_size > 1 and group is None:
            raise ValueError(f"{world_size} ranks need a process group to agree in")
        self._rank = rank
        self._group = group if world_size > 1 else None
        self._interval_s = interval_s
        self._interval_steps = interval_steps
        self._clock = clock
        self._may_save = may_save
        self._control = ControlReader(control_path if rank == 0 else None, attempt, on_ignored)
        self._times = StepTimes()
        self._requested = self._served = 0
        self._stop = False
        self._gap = 1
        self._next = 0
        self._mark: tuple[float, int] | None = None  # where the steps that `_times` learns from next begin
        self._last_save: tuple[float, int] = (0.0, 0)

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds, as of the last agreement: the same on every rank."""
        return self._interval_s

    @property
    def interval_steps(self) -> int | None:
        """The interval in steps, as of the last agreement: the same on every rank."""
        return self._interval_steps

    def start(self, step: int) -> None:
        """Training goes on from `step` steps done: the intervals count from here, the first agreement is one step on."""
        self._last_save = (self._clock(), step)
        self._mark = None  # the first step warms caches up and compiles: it says nothing of those to come
        self._gap = 1
        self._next = step + 1

    def due(self, step: int) -> bool:
        """Whether the ranks agree at this step: then each of them calls `agree`."""
        return step >= self._next

    def saved(self, step: int) -> None:
        """A save was begun at this step: the intervals count from here.

        An agreed save that is not begun (a state not fit to be kept) stays due: the next agreement asks again.
        """
        now = self._clock()
        self._last_save = (now, step)
        self._mark = (now, step)  # the stall is not the steps' time

    def agree(self, step: int, *, step_s: float | None, want_stop: bool = False) -> Agreement:
        """Decide together what happens at this step. A collective: every rank calls it at the same step.

        Args:
            step: optimizer steps done.
            step_s: seconds that the longest recent step, or the last one, took here; None: not known.
            want_stop: this rank was asked to stop (a SIGTERM that perhaps no other rank saw).

        Raises:
            RuntimeError: the ranks are at different steps, or one of them is gone.
        """
        mine = self._decide(step, step_s) if self._rank == 0 else [_LEAST] * _DECISION
        mine += [self._rank + 1 if want_stop else 0, step, -step]
        if self._group is not None:
            tensor = torch.tensor(mine, dtype=torch.int64)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
            mine = tensor.tolist()
        reason, stop, request, gap, interval_s, interval_steps, wants, last, minus_first = mine
        if last != -minus_first:
            raise RuntimeError(
                f"the ranks agree at different steps: this is {step}, they range from {-minus_first} to {last}; "
                "every rank has to call step() once per optimizer step"
            )
        self._gap = gap
        self._next = step + gap
        self._interval_s = None if interval_s == _NONE else _float_of(interval_s)
        self._interval_steps = None if interval_steps == _NONE else interval_steps
        text = _REASONS[reason]
        if wants and not stop:
            text = f"rank {wants - 1} was asked to stop"
        return Agreement(save=bool(reason or wants), stop=bool(stop or wants), save_request=request, reason=text)

    def _decide(self, step: int, step_s: float | None) -> list[int]:
        """Rank 0's part: [reason, stop, request, gap, interval in seconds, interval in steps]."""
        control = self._control.poll()
        if control is not None:
            self._interval_s, self._interval_steps = control.interval_s, control.interval_steps
            self._requested = max(self._requested, control.save_request)
            self._stop = control.stop_after_save
        now = self._clock()
        if self._mark is not None:
            self._times.add(now - self._mark[0], step - self._mark[1], step_s)
        self._mark = (now, step)
        elapsed_s, elapsed_steps = now - self._last_save[0], step - self._last_save[1]
        gap = self._gap_after(elapsed_s, elapsed_steps)
        due = is_due(
            elapsed_s=elapsed_s,
            elapsed_steps=elapsed_steps,
            interval_s=self._interval_s,
            interval_steps=self._interval_steps,
            next_in_s=gap * (self._times.mean_s or 0.0),
        )
        request = self._requested if self._requested > self._served else 0
        self._served = max(self._served, request)
        reason = 3 if self._stop else 2 if request else 1 if due else 0
        if reason:
            gap = self._gap_after(0.0, 0)
        if reason in (1, 2) and self._may_save is not None and not self._may_save(step, request):
            reason = request = 0
        return [
            reason,
            int(self._stop),
            request,
            gap,
            _NONE if self._interval_s is None else _bits_of(self._interval_s),
            _NONE if self._interval_steps is None else self._interval_steps,
        ]

    def _gap_after(self, elapsed_s: float, elapsed_steps: int) -> int:
        return gap_steps(
            longest_s=self._times.longest_s,
            mean_s=self._times.mean_s,
            worst_s=self._times.worst_s,
            previous=self._gap,
            interval_s=self._interval_s,
            left_s=None if self._interval_s is None else self._interval_s - elapsed_s,
            left_steps=None if self._interval_steps is None else self._interval_steps - elapsed_steps,
        )


def _bits_of(value: float) -> int:
    """A positive float as the integer of its bits: the ranks then hold the very same interval."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
