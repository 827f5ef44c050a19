"""When did the run do what? The account of time cut into slices along the run, few enough to draw.

An axis of wall-clock as the account counts it: it begins with the run, and stands still while the run is stopped. The
slices hold what the account holds, phase by phase, at every moment: what a failure throws away is moved out of
productive time in the slices in which it was trained.
"""

from __future__ import annotations

import math
from typing import Any, Final

from ckptd.core import events as ev
from ckptd.core.accounting import PHASES, Account

MOST_SLICES: Final = 240
"""Twice as long slices, and half as many, when there would be more."""
FIRST_SLICE_S: Final = 0.25
_LEAST_S: Final = 1e-9
"""Below this an amount of time is a rounding error."""

_PRODUCTIVE: Final = "productive"
_WASTED: Final = "wasted_progress"


class Slice:
    """What happened within one stretch of the axis."""

    __slots__ = ("device_s", "failures", "planned", "saves", "seconds", "wanted_s")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By phase."""
        self.device_s = 0.0
        self.wanted_s = 0.0
        """Device-seconds at work, and wanted."""
        self.failures = 0
        self.planned = 0
        self.saves: dict[str, Saves] = {}
        """By tier."""

    def take_in(self, other: Slice) -> None:
        """Become this slice and the one after it."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.device_s += other.device_s
        self.wanted_s += other.wanted_s
        self.failures += other.failures
        self.planned += other.planned
        for tier, saves in other.saves.items():
            self.saves.setdefault(tier, Saves()).take_in(saves)


class Saves:
    """The commits of one tier within a slice. Seconds."""

    __slots__ = ("count", "stall_max", "stall_sum", "upload_max", "upload_sum")

    def __init__(self) -> None:
        self.count = 0
        self.stall_sum = self.stall_max = 0.0
        self.upload_sum = self.upload_max = 0.0

    def add(self, stall_s: float, upload_s: float) -> None:
        self.count += 1
        self.stall_sum += stall_s
        self.stall_max = max(self.stall_max, stall_s)
        self.upload_sum += upload_s
        self.upload_max = max(self.upload_max, upload_s)

    def take_in(self, other: Saves) -> None:
        self.count += other.count
        self.stall_sum += other.stall_sum
        self.stall_max = max(self.stall_max, other.stall_max)
        self.upload_sum += other.upload_sum
        self.upload_max = max(self.upload_max, other.upload_max)


class Timeline:
    """Follows an account from event to event. Bounded; changed in place, by one thread."""

    def __init__(self) -> None:
        self.slice_s = FIRST_SLICE_S
        self._slices: list[Slice] = []
        self._lost_from = 0.0
        """Where on the axis the progress that was thrown away last begins: what of it turns out to be safe lies there."""

    def moved(self, before: Account, after: Account) -> None:
        """The account went from `before` to `after` by one event or by the passing of time."""
        if after is before:
            return
        start = before.wall_s
        room = max(0.0, after.wall_s - start)
        self._count_devices(before, start, room)
        gained = {
            phase: amount - before.spent.get(phase, 0.0)
            for phase, amount in after.spent.items()
            if amount != before.spent.get(phase, 0.0)
        }
        trained = after.trained.seconds - before.trained.seconds
        if trained > 0:
            gained[_PRODUCTIVE] = trained
        # The time that passed goes to the phase that held first; what is left over was productive time until now.
        for phase in sorted(gained, key=lambda name: name != before.phase):
            passed = min(gained[phase], room)
            if passed > 0:
                self._pass(phase, start, passed)
                start, room = start + passed, room - passed
            self._take_back(gained[phase] - passed, phase)
        self._waste(_wasted(after) - _wasted(before))

    def mark(self, at: float, event: ev.Event) -> None:
        """Something worth a mark happened at `at` of the axis, in seconds."""
        match event:
            case ev.Interrupted():
                here = self._at(at)
                here.planned += event.planned
                here.failures += not event.planned
            case ev.SaveCommitted():
                self._at(at).saves.setdefault(event.tier, Saves()).add(_sane(event.stall_s), _sane(event.upload_s))
            case _:
                pass

    def copy(self) -> Timeline:
        """A timeline that goes its own way from here on."""
        other = Timeline()
        other.slice_s, other._lost_from = self.slice_s, self._lost_from
        for piece in self._slices:
            fresh = Slice()
            fresh.take_in(piece)
            other._slices.append(fresh)
        return other

    def document(self) -> dict[str, Any]:
        """Columns, one value a slice: the JSON of the timeline. Seconds; devices are means over the slice."""
        slices = self._slices
        tiers = sorted({tier for piece in slices for tier in piece.saves})
        lengths = [math.fsum(piece.seconds.values()) for piece in slices]
        return {
            "slice_s": self.slice_s,
            "start_s": [_short(i * self.slice_s) for i in range(len(slices))],
            "seconds_by_phase": {
                phase: [_short(piece.seconds.get(phase, 0.0)) for piece in slices]
                for phase in PHASES
                if any(phase in piece.seconds for piece in slices)
            },
            "failures": [piece.failures for piece in slices],
            "planned": [piece.planned for piece in slices],
            "devices": [_mean(piece.device_s, length) for piece, length in zip(slices, lengths, strict=True)],
            "devices_wanted": [_mean(piece.wanted_s, length) for piece, length in zip(slices, lengths, strict=True)],
            "saves": {tier: _columns([piece.saves.get(tier) for piece in slices]) for tier in tiers},
        }

    def seconds_by_phase(self) -> dict[str, float]:
        """Of all slices together: what the account says, phase by phase."""
        return {phase: math.fsum(piece.seconds.get(phase, 0.0) for piece in self._slices) for phase in PHASES}

    # --- the slices -------------------------------------------------------------------------------------------------

    def _at(self, at: float) -> Slice:
        """The slice at `at` of the axis, made if need be, with all before it."""
        while at >= self.slice_s * MOST_SLICES:
            for first, second in zip(self._slices[::2], self._slices[1::2], strict=False):
                first.take_in(second)
            del self._slices[1::2]
            self.slice_s *= 2
        index = int(at / self.slice_s)
        while len(self._slices) <= index:
            self._slices.append(Slice())
        return self._slices[index]

    def _pieces(self, start: float, length: float) -> list[tuple[Slice, float]]:
        """`length` seconds from `start` on, slice by slice."""
        self._at(max(0.0, start + length - _LEAST_S))
        found: list[tuple[Slice, float]] = []
        index = min(int(start / self.slice_s), len(self._slices) - 1)
        while index < len(self._slices) - 1 and length > 0:
            part = min(length, max(0.0, (index + 1) * self.slice_s - start))
            if part > 0:
                found.append((self._slices[index], part))
                start, length = start + part, length - part
            index += 1
        if length > 0:
            found.append((self._slices[-1], length))
        return found

    def _pass(self, phase: str, start: float, length: float) -> None:
        for piece, part in self._pieces(start, length):
            piece.seconds[phase] = piece.seconds.get(phase, 0.0) + part

    def _count_devices(self, account: Account, start: float, length: float) -> None:
        if length > 0 and account.wanted:
            for piece, part in self._pieces(start, length):
                piece.device_s += part * account.world
                piece.wanted_s += part * account.wanted

    def _take_back(self, seconds: float, phase: str) -> float:
        """Move so much of the newest productive time to `phase`; returns where on the axis it began."""
        at = len(self._slices) - 1
        while seconds > _LEAST_S and at >= 0:
            seconds -= _move(self._slices[at], _PRODUCTIVE, phase, seconds)
            at -= 1
        return (at + 1) * self.slice_s

    def _waste(self, seconds: float) -> None:
        """So much more of what was trained is thrown away; less than nothing: so much of it is safe after all."""
        if seconds > _LEAST_S:
            self._lost_from = self._take_back(seconds, _WASTED)
        elif seconds < -_LEAST_S:
            seconds = -seconds
            first = min(int(self._lost_from / self.slice_s), max(0, len(self._slices) - 1))
            for piece in (*self._slices[first:], *reversed(self._slices[:first])):
                seconds -= _move(piece, _WASTED, _PRODUCTIVE, seconds)
                if seconds <= _LEAST_S:
                    break


def _move(piece: Slice, old: str, new: str, seconds: float) -> float:
    moved = min(seconds, piece.seconds.get(old, 0.0))
    if moved > 0:
        piece.seconds[old] -= moved
        piece.seconds[new] = piece.seconds.get(new, 0.0) + moved
    return moved


def _wasted(account: Account) -> float:
    return max(0.0, account.trained.seconds - account.useful.seconds)


def _sane(seconds: float | None) -> float:
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


def _mean(total: float, length: float) -> float | None:
    return _short(total / length) if length > _LEAST_S else None


def _columns(saves: list[Saves | None]) -> dict[str, list[Any]]:
    def column(name: str, *, mean: bool) -> list[float | None]:
        return [None if s is None else _short(getattr(s, name) / (s.count if mean else 1)) for s in saves]

    return {
        "count": [0 if s is None else s.count for s in saves],
        "stall_mean_s": column("stall_sum", mean=True),
        "stall_max_s": column("stall_max", mean=False),
        "upload_mean_s": column("upload_sum", mean=True),
        "upload_max_s": column("upload_max", mean=False),
    }


def _short(value: float) -> float:
    """Six digits: enough for a picture, and half the bytes."""
    return float(f"{value:.6g}")
