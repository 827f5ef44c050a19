"""The run's own clock: seconds since the run began, carried on over restarts of the daemon, never going back."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.core import events

_DONE_BY_HAND = (events.CheckpointPinned, events.CheckpointDeleted, events.RolledBack, events.Drilled)


def clocked_by(last: events.Event | None, event: events.Event) -> events.Event:
    """Which of two events in a row the clock goes by: what is done to a run that is over does not set it going."""
    return last if isinstance(last, events.RunEnded) and isinstance(event, _DONE_BY_HAND) else event


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """Maps this process's monotonic clock to the run's."""

    base_t: float
    base_mono: float

    def now(self) -> float:
        return self.base_t + (time.monotonic() - self.base_mono)

    @classmethod
    def after(cls, history: Iterable[events.Event], *, last_t: float, boot_id: str) -> RunClock:
        """The clock of a run that has this history; `last_t`: of its ledger."""
        last: events.Event | None = None
        anchor: events.DaemonStarted | None = None
        for event in history:
            last = clocked_by(last, event)
            if isinstance(event, events.DaemonStarted):
                anchor = event
        return cls.resume(last_t=last_t, last=last, anchor=anchor, boot_id=boot_id)

    @classmethod
    def resume(
        cls, *, last_t: float, last: events.Event | None, anchor: events.DaemonStarted | None, boot_id: str
    ) -> RunClock:
        """The clock of a run whose ledger ends with `last`, whose newest daemon started with `anchor`.

        While a run is over its clock stands still. Within one boot of the machine the time without a daemon is known
        exactly; after a reboot only the wall clock can tell, and only forwards.
        """
        mono = time.monotonic()
        t = last_t
        if last is not None and anchor is not None and not isinstance(last, events.RunEnded):
            if anchor.boot_id == boot_id:
                t = max(t, anchor.t + (mono - anchor.mono))
            else:
                t += max(0.0, time.time() - last.at)
        return cls(base_t=t, base_mono=mono)
