"""How many seconds of training does an upload cost, beyond the time in which training stood still for it?"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

_WINDOW: Final = 64
_LEAST: Final = 5
_CAP: Final = 5.0
"""A step counts for so many medians at most: what takes longer, such as a new epoch's workers, is no upload's doing."""


class Slowdown:
    """Compares the steps during an upload with those before it, on one rank. All times are of one monotonic clock."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._during: list[float] = []
        self._uploading = False
        self._over_at: float | None = None

    def begin(self) -> None:
        """An upload begins, between two steps."""
        self._during = []
        self._uploading, self._over_at = True, None

    def over(self, now: float) -> None:
        """The upload is over; may be called from its thread."""
        self._over_at = now

    def step(self, begun: float, seconds: float) -> None:
        """A step is done: when it began and how long it took, without what it waited for a save."""
        if self._uploading and self._over_at is not None and begun >= self._over_at:
            self._uploading = False
        if self._uploading:
            self._during.append(seconds)
        else:
            self._usual.append(seconds)

    def take(self) -> float | None:
        """Seconds that the last upload cost, once: against the mean of the usual steps. None: it cannot be told.

        Steps differ, so this is noise around the truth, and may be negative: who averages needs the sign.
        """
        during, self._during = self._during, []
        if not during or len(self._usual) < _LEAST:
            return None
        cap = _CAP * statistics.median(self._usual)
        usual = statistics.fmean(min(each, cap) for each in self._usual)
        return sum(min(each, cap) for each in during) - len(during) * usual
