"""Does training still move? Thresholds by phase, learned from the run itself, and which rank is the one that stands.

A rank is silent for as long as its step and its phase stay what they are. What silences were normal in a phase is
remembered over attempts; who has been silent since when is forgotten with each attempt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

KEPT = 512
"""Normal silences remembered for each phase."""
QUANTILE = 0.99
DECLARED = ("eval", "save")
"""Phases that a script declares, in which the other ranks wait."""
ENOUGH = 5
"""With fewer silences known, a phase is as good as unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`hang` of job.yaml. Seconds."""

    enabled: bool = True
    factor: float = 10.0
    floor_s: float = 30.0
    startup_s: float = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Where one rank is."""

    step: int
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Training does not move."""

    rank: int
    """The rank that is behind, or in another phase than the others: the likeliest culprit."""
    phase: str
    step: int
    silent_s: float
    limit_s: float

    @property
    def detail(self) -> str:
        """One line for people."""
        return (
            f"rank {self.rank} has been in phase {self.phase} at step {self.step} for {self.silent_s:.1f} s, "
            f"where {self.limit_s:.1f} s is the limit"
        )


@dataclass(kw_only=True, slots=True)
class Detector:
    """Watches the ranks of a run. Fed with every picture of the ranks; times are a monotonic clock's, seconds.

    Each rank may have a clock of its own: only times of one rank are ever compared.
    """

    limits: Limits = field(default_factory=Limits)
    normal: dict[str, list[float]] = field(default_factory=dict)
    _beats: dict[int, Beat] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _heard: dict[int, float] = field(default_factory=dict)
    _declared: int = 0
    """How many ranks are in a declared phase."""
    _limits: dict[str, float] = field(default_factory=dict)
    """Limits that were worked out since the last silence was learned."""
    _witness: int | None = None
    """The rank that was seen last to be within its limit: as long as it is, there is no hang, and none has to be looked at."""

    def begin(self) -> None:
        """A new attempt: nobody has been silent yet."""
        self._beats.clear()
        self._since.clear()
        self._heard.clear()
        self._declared = 0
        self._witness = None

    @property
    def blank(self) -> bool:
        """No rank of the attempt has been heard of."""
        return not self._beats

    def feed(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take a picture of the ranks."""
        # A rank that waits for another one's eval is silent for longer than a step of its own would take.
        waiting = self._declared > 0
        for rank, beat in beats.items():
            self._heard[rank] = now
            before = self._beats.get(rank)
            if before == beat:
                continue
            if before is not None and (before.phase in DECLARED or not waiting):
                steps = max(1, beat.step - before.step)
                # As many silences as steps were seen: a fast run is soon known.
                self.learn(before.phase, (now - self._since[rank]) / steps, times=min(steps, ENOUGH))
            self._declared += (beat.phase in DECLARED) - (before is not None and before.phase in DECLARED)
            self._beats[rank] = beat
            self._since[rank] = now

    def learn(self, phase: str, silence_s: float, times: int = 1) -> None:
        """Remember a silence that ended well, as if it had come so many times."""
        if not math.isfinite(silence_s) or silence_s < 0:
            return
        self._limits.pop(phase, None)
        known = self.normal.setdefault(phase, [])
        known += [silence_s] * times
        if len(known) > KEPT:
            del known[: len(known) - KEPT]

    def limit(self, phase: str) -> float:
        """How long a rank may be silent in a phase. Seconds."""
        if phase not in self._limits:
            self._limits[phase] = self._limit(phase)
        return self._limits[phase]

    def _limit(self, phase: str) -> float:
        known = self.normal.get(phase, [])
        if phase == "end":
            # Nothing is left to do but to tear down: no generosity.
            return max(self.limits.floor_s, self.limits.factor * max(known, default=0.0))
        if len(known) < ENOUGH:
            # One long eval, say, is more than was known before, but no reason to be strict yet.
            return max(self.limits.startup_s, self.limits.factor * max(known, default=0.0))
        usual = sorted(known)[min(len(known) - 1, math.ceil(QUANTILE * len(known)) - 1)]
        return max(self.limits.floor_s, self.limits.factor * usual)

    def hung(self, now: float | None = None, *, expected: int) -> Hang | None:
        """The hang, if training does not move: every rank is silent beyond the limit of its phase.

        Ranks wait for each other, so one that stands makes all stand; while any of them moves, the others only wait.
        `expected` ranks must have been heard of, except where those that were are all beyond their limits. `now` None:
        judged by what was last heard of each rank, so that a watcher who hears nothing does not take that for silence.
        """
        if not self.limits.enabled or not self._beats:
            return None
        if self._witness is not None and self._within_limit(self._witness, now):
            return None
        self._witness = next((rank for rank in self._beats if self._within_limit(rank, now)), None)
        if self._witness is not None:
            return None
        silences = {rank: self._silence(rank, now) for rank in self._beats}
        late = [rank for rank, s in silences.items() if s > self.limit(self._beats[rank].phase)]
        if not late:
            return None
        if len(self._beats) < expected and max(silences.values()) < self.limits.startup_s:
            return None  # the others may still be on their way
        rank = self._suspect(late, silences)
        beat = self._beats[rank]
        return Hang(
            rank=rank, phase=beat.phase, step=beat.step, silent_s=silences[rank], limit_s=self.limit(beat.phase)
        )

    def _silence(self, rank: int, now: float | None) -> float:
        return (self._heard[rank] if now is None else now) - self._since[rank]

    def _within_limit(self, rank: int, now: float | None) -> bool:
        """Whether a rank that is still to end shows that training may move."""
        silence, phase = self._silence(rank, now), self._beats[rank].phase
        # No limit is below the lesser of these: while training moves, which is nearly always, none has to be worked out.
        least = min(self.limits.floor_s, self.limits.startup_s)
        return phase != "end" and (silence <= least or silence <= self.limit(phase))

    def _suspect(self, late: list[int], silences: Mapping[int, float]) -> int:
        """The rank that is furthest behind; where several are, the one whose phase is not the others'."""
        late = [rank for rank in late if self._beats[rank].phase != "end"] or late
        behind = min(self._beats[rank].step for rank in late)
        candidates = [rank for rank in late if self._beats[rank].step == behind]
        phases = [beat.phase for beat in self._beats.values()]
        # The rarest phase first; then who has been silent longest.
        return min(candidates, key=lambda r: (phases.count(self._beats[r].phase), -silences[r], r))
