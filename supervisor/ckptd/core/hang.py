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

    def begin(self) -> None:
        """A new attempt: nobody has been silent yet."""
        self._beats.clear()
        self._since.clear()
        self._heard.clear()

    @property
    def blank(self) -> bool:
        """No rank of the attempt has been heard of."""
        return not self._beats

    def feed(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take a picture of the ranks."""
        # A rank that waits for another one's eval is silent for longer than a step of its own would take.
        waiting = any(beat.phase in DECLARED for beat in self._beats.values())
        for rank, beat in beats.items():
            self._heard[rank] = now
            before = self._beats.get(rank)
            if before == beat:
                continue
            if before is not None and (before.phase in DECLARED or not waiting):
                steps = max(1, beat.step - before.step)
                for _ in range(min(steps, ENOUGH)):  # as many silences as steps were seen: a fast run is soon known
                    self.learn(before.phase, (now - self._since[rank]) / steps)
            self._beats[rank] = beat
            self._since[rank] = now

    def learn(self, phase: str, silence_s: float) -> None:
        """Remember a silence that ended well."""
        if not math.isfinite(silence_s) or silence_s < 0:
            return
        known = self.normal.setdefault(phase, [])
        known.append(silence_s)
        if len(known) > KEPT:
            del known[0]

    def limit(self, phase: str) -> float:
        """How long a rank may be silent in a phase. Seconds."""
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
        silences = {rank: (self._heard[rank] if now is None else now) - since for rank, since in self._since.items()}
        # No limit is below this: while training moves, which is nearly always, none has to be worked out.
        least = min(self.limits.floor_s, self.limits.startup_s)
        late = [rank for rank, s in silences.items() if s > least and s > self.limit(self._beats[rank].phase)]
        if not late or not all(rank in late or beat.phase == "end" for rank, beat in self._beats.items()):
            return None
        if len(self._beats) < expected and max(silences.values()) < self.limits.startup_s:
            return None  # the others may still be on their way
        rank = self._suspect(late, silences)
        beat = self._beats[rank]
        return Hang(
            rank=rank, phase=beat.phase, step=beat.step, silent_s=silences[rank], limit_s=self.limit(beat.phase)
        )

    def _suspect(self, late: list[int], silences: Mapping[int, float]) -> int:
        """The rank that is furthest behind; where several are, the one whose phase is not the others'."""
        late = [rank for rank in late if self._beats[rank].phase != "end"] or late
        behind = min(self._beats[rank].step for rank in late)
        candidates = [rank for rank in late if self._beats[rank].step == behind]
        phases = [beat.phase for beat in self._beats.values()]
        # The rarest phase first; then who has been silent longest.
        return min(candidates, key=lambda r: (phases.count(self._beats[r].phase), -silences[r], r))
