"""Where are the ranks, and do they move? What their heartbeats say, between one message of the agents and the next."""

from __future__ import annotations

import time

from ckptd import status
from ckptd.core import events
from ckptd.core.devices import device_of_rank
from ckptd.core.hang import Beat, Detector, Limits
from ckptd.core.state import LIVE, RunState, Status
from ckptd.link import Message

PROGRESS_INTERVAL_S = 60.0
FIRST_PROGRESS_S = 3.0
FRESH_S = 5.0
"""An older heartbeat is no news of where training is."""
LAUNCH_S = 300.0
"""How long a launch may take before the first sign of any rank is waited for."""
LONGEST_TURN_S = 2.0
"""What one look may count as waiting: a daemon that itself stood still has waited for nobody."""


class Watch:
    """Heartbeats of the live attempt. Nothing of it is kept over a restart of the daemon but what the ledger teaches."""

    def __init__(self, limits: Limits) -> None:
        self._live: status.Live = {}
        self._limits = limits
        self._detector = Detector(limits=limits)
        self._mute_s = 0.0
        self._looked = time.monotonic()
        self._heard = 0.0
        self._progress_due = 0.0

    def saw(self, event: events.Event) -> None:
        """Follow the run: what is normal is learned, and who was silent is forgotten with each attempt."""
        match event:
            case events.AttemptLaunched():
                self._detector.begin()
                self._mute_s = 0.0
                self._live = {}
            case events.FirstStep():
                self._progress_due = time.monotonic() + FIRST_PROGRESS_S
            case events.Progress() if event.step_s is not None:
                self._detector.learn("step", event.step_s)
            case _:
                pass

    def hear(self, message: Message) -> None:
        """An agent's `live` message of the live attempt."""
        self._heard = time.monotonic()
        self._live.update(message["ranks"])
        beats = {int(rank): Beat(step=b["step"], phase=b["phase"]) for rank, b in message["ranks"].items()}
        # By the sender's clock: messages that waited for a daemon which stood still are read in a moment.
        self._detector.feed(beats, float(message.get("mono", self._heard)))

    @property
    def live(self) -> status.Live:
        """The newest heartbeat of each rank. A copy, made in one step: other threads ask for it, while this one listens."""
        return dict(self._live)

    @property
    def heartbeat_at(self) -> float | None:
        """Wall clock of the last word from a rank."""
        return time.time() - (time.monotonic() - self._heard) if self._heard else None

    def hang(self, state: RunState, t: float) -> events.FailureDetected | None:
        """The hang that there is now, if there is one."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_TURN_S), now
        if state.status not in LIVE:
            return None
        if self._detector.blank:
            return self._mute(state, t, passed)
        hang = self._detector.hung(expected=state.world_size)
        if hang is None:
            return None
        where = device_of_rank(state.placement, hang.rank)
        return events.FailureDetected(
            t=max(0.0, t - hang.silent_s), detected_t=t, attempt=state.attempt, node=where and where[0], rank=hang.rank,
            step=max(state.step, hang.step), hang=True, detail=hang.detail,
        )  # fmt: skip

    def _mute(self, state: RunState, t: float, passed: float) -> events.FailureDetected | None:
        """No rank has ever been heard of: a launch that stands, or interpreters that do not even begin."""
        self._mute_s += passed
        limit = self._limits.startup_s + LAUNCH_S
        if not self._limits.enabled or self._mute_s <= limit:
            return None
        return events.FailureDetected(
            t=max(0.0, t - self._mute_s), detected_t=t, attempt=state.attempt, step=state.step, hang=True,
            detail=f"no worker has shown a sign of life within {limit:.0f} s of the launch",
        )  # fmt: skip

    def progress(self, state: RunState, t: float) -> events.Progress | None:
        """Where training is, when that is worth a line in the ledger."""
        now = time.monotonic()
        if state.status not in (Status.TRAINING, Status.DRAINING) or now < self._progress_due:
            return None
        self._progress_due = now + PROGRESS_INTERVAL_S
        front = status.front_rank(self.live)
        if front is None or now - self._heard > FRESH_S:
            return None
        return events.Progress(
            t=t, attempt=state.attempt, step=int(front["step"]), samples=int(front["samples"]), loss=front["loss"],
            step_s=front["step_s"],
        )  # fmt: skip
