"""Bring commits of the fastest tier to the slower ones, beside training, and keep trying where a tier will not take them.

Each slower tier has a thread of its own that waits, decides and reports, and touches no tier: what may hang, it has done
by another one, which it leaves behind if nothing moves. Nothing is remembered that matters: what a tier lacks is read off
the tiers themselves, so an agent that is killed and started again goes on where this one was.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptd.core import promotion
from ckptd.core.keeping import Range, is_suspect
from ckptd.node.inuse import InUse
from ckptd.node.tiers import Found, Tier, scan
from ckptd.tiers import Abandoned, Copied, Crew, Damaged, Pace, Stalled, StoreError, copy_checkpoint

log = logging.getLogger(__name__)

STALL_S: Final = 120.0
"""A copy that moves no byte for so long is given up and tried again."""
FIRST_RETRY_S: Final = 2.0
MAX_RETRY_S: Final = 300.0
JITTER: Final = 0.25
LOOK_AGAIN_S: Final = 300.0
"""How long a thread sleeps when it hears of no commit."""
DRAIN_TRIES: Final = 3
"""Failures in a row at the end of a run, after which a tier is not waited for any more."""
DRAIN_RETRY_S: Final = 1.0

Tell = Callable[..., None]
"""(kind of event, attempt=..., **data); called from any thread."""
Together = Callable[[Found, Tier, Tier, Pace], Copied]
"""Copies a commit from a tier of which each node has its own to another one. Raises StoreError."""


def retry_after(failures: int, *, jitter: float) -> float:
    """Seconds to wait after so many failures in a row; `jitter`: from -1 to 1."""
    return float(min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 20)) * (1.0 + JITTER * jitter))


def copied_event(found: Found, target: Tier, done: Copied) -> dict[str, Any]:
    """What `CheckpointCopied` says of a copy of `found` to `target`."""
    return {
        "attempt": found.attempt, "step": found.step, "tier": target.name, "path": target.store().path(found.name),
        "source": found.path, "bytes": done.bytes, "seconds": done.seconds, "sequence": found.sequence,
        "marker_crc32c": found.marker_crc32c,
    }  # fmt: skip


class Promoter:
    """All slower tiers of one node.

    Args:
        tiers: fastest first.
        run_id: whose commits are promoted.
        crew: threads for what may hang.
        in_use: is told which checkpoints are read and written.
        tell: takes events.
        stall_s: see `STALL_S`.
        together: copies a commit of which each node holds a part; None: there is no such tier.
    """

    def __init__(
        self, *, tiers: list[Tier], run_id: str, crew: Crew, in_use: InUse, tell: Tell, stall_s: float = STALL_S,
        together: Together | None = None,
    ) -> None:  # fmt: skip
        self.tiers = tiers
        self.together = together
        self.known: dict[str, str] = {}
        """CRC-32C of markers by `marker_key`, as far as they are known."""
        self.suspects: Sequence[Range] = ()
        """Commit sequences, first and last of each branch that the run went back from: they are not copied."""
        self._workers = [
            _Worker(target, tiers[:i], run_id=run_id, crew=crew, in_use=in_use, tell=tell, stall_s=stall_s, shared=self)
            for i, target in enumerate(tiers)
            if i > 0
        ]
        for worker in self._workers:
            worker.start()

    def committed(self, sequence: int) -> None:
        """The fastest tier has a new commit."""
        for worker in self._workers:
            worker.committed(sequence)

    def set_every(self, every: Mapping[str, int]) -> None:
        """Change how often each tier is served: n by name, in commits of the fastest tier."""
        for worker in self._workers:
            if worker.target.name in every:
                worker.every = max(1, int(every[worker.target.name]))
                worker.wake()

    def drain(self, bound_s: float) -> list[str]:
        """Bring the last commit to every tier, for the end of a run. Blocks for at most `bound_s` seconds.

        Returns what is missing where, in words; empty: nothing.
        """
        deadline = time.monotonic() + bound_s
        for worker in self._workers:
            worker.finish()
        missing = []
        for worker in self._workers:
            if not worker.settled.wait(max(0.0, deadline - time.monotonic())):
                missing.append(worker.lacks(f"not copied within {bound_s:.0f} s"))
            elif worker.error:
                missing.append(worker.lacks(worker.error))
        return missing

    @property
    def behind(self) -> bool:
        """Whether a tier lacks the last commit, as far as is known: then `drain` has something to do."""
        return any(worker.behind for worker in self._workers)

    def close(self) -> None:
        """Have every thread end; a copy that is under way stays half done."""
        for worker in self._workers:
            worker.close()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A commit that may be copied, with its copies, fastest tier first."""

    copies: list[Found]

    @property
    def newest(self) -> Found:
        return self.copies[0]


class _Failed(Exception):
    def __init__(self, error: BaseException, found: Found | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.found = found


class _Worker(threading.Thread):
    """One slower tier."""

    def __init__(
        self, target: Tier, sources: list[Tier], *, run_id: str, crew: Crew, in_use: InUse, tell: Tell, stall_s: float,
        shared: Promoter,
    ) -> None:  # fmt: skip
        super().__init__(name=f"promote to {target.name}", daemon=True)
        self.target = target
        self.every = max(1, target.every)
        self.settled = threading.Event()
        """Nothing is left to do, or not worth more tries; only after `finish`."""
        self.error = ""
        """Why the last try failed."""
        self._sources = sources
        self._run_id = run_id
        self._crew = crew
        self._in_use = in_use
        self._tell = tell
        self._stall_s = stall_s
        self._shared = shared
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._last = False
        self._failures = 0
        self._not_before = 0.0
        self._newest: Found | None = None
        self._heard = 0
        """Newest commit of the fastest tier that this was told of."""
        self._there = 0
        """Newest commit on the target, as of the last look."""
        self._bad: set[str] = set()
        """Copies that turned out not to be what was committed."""

    # --- from other threads ---

    def committed(self, sequence: int) -> None:
        self._heard = max(self._heard, sequence)
        if promotion.due(self._heard, self._there, self.every, last=self._last):
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    def finish(self) -> None:
        """No commit comes any more: bring the last one, and then say so by `settled`."""
        self._last = True
        self._failures = 0
        self._not_before = 0.0
        self.wake()

    def close(self) -> None:
        self._stop.set()
        self.wake()

    @property
    def behind(self) -> bool:
        newest = max(self._heard, self._newest.sequence if self._newest else 0)
        return newest > self._there

    def lacks(self, why: str) -> str:
        """What is missing on this tier, in words."""
        step = f"step {self._newest.step}" if self._newest is not None else "the last commit"
        there = f"; the newest there is commit {self._there}" if self._there else "; nothing of this run is there"
        return f"tier {self.target.name!r} lacks {step}: {why}{there}"

    # --- the thread ---

    def run(self) -> None:
        """Wait, look, copy, for ever."""
        while not self._stop.is_set():
            try:
                again = self._turn()
            except Abandoned:
                return
            if again:
                continue
            self._wake.wait(self._pause())
            self._wake.clear()
            while not self._stop.is_set() and (left := self._not_before - time.monotonic()) > 0:
                self._wake.wait(left)  # news does not make a tier that fails any better; `finish` sets the time to now
                self._wake.clear()

    def _pause(self) -> float:
        return max(0.0, self._not_before - time.monotonic()) if self._failures else LOOK_AGAIN_S

    def _turn(self) -> bool:
        """One look and at most one copy. Whether to look again at once."""
        last = self._last
        try:
            copied = self._promote(last=last)
        except _Failed as failure:
            return self._after_failure(failure, last=last)
        except OSError as error:
            return self._after_failure(_Failed(error, self._newest), last=last)
        except Exception as error:
            log.exception("copying to tier %s failed", self.target.name)
            return self._after_failure(_Failed(error, self._newest), last=last)
        self._failures, self.error = 0, ""
        if not copied and last:
            self.settled.set()
        return copied

    def _after_failure(self, failure: _Failed, *, last: bool) -> bool:
        error = failure.error
        self._failures += 1
        self.error = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        retry_s = DRAIN_RETRY_S if last else retry_after(self._failures, jitter=random.uniform(-1, 1))
        self._not_before = time.monotonic() + retry_s
        found = failure.found
        self._tell(
            "copy_failed", attempt=found.attempt if found else None, step=found.step if found else 0,
            tier=self.target.name, path=self._path(found) if found else self.target.directory,
            source=found.path if found else "", error=self.error[:500], errno=getattr(error, "errno", None),
            attempts=self._failures, retry_s=retry_s,
        )  # fmt: skip
        if last and self._failures >= DRAIN_TRIES:
            self.settled.set()
        return False

    def _path(self, found: Found) -> str:
        return self.target.store().path(found.name)

    # --- looking and copying ---

    def _promote(self, *, last: bool) -> bool:
        """Copy the newest commit that is due. False: none is."""
        candidates = self._candidates()
        if not candidates:
            return False
        self._newest = candidates[0].newest
        newest = self._newest.sequence
        if self._there and not promotion.due(newest, self._there, self.every, last=last):
            return False
        self._there = self._look_at_target()
        if not promotion.due(newest, self._there, self.every, last=last):
            return False
        damage: _Failed | None = None
        for candidate in candidates:
            if candidate.newest.sequence <= self._there:
                break
            try:
                self._copy(candidate)
            except _Failed as failure:
                if not isinstance(failure.error, Damaged):
                    raise
                damage = damage or failure
                continue  # an older one is better than none
            if damage is not None:
                log.warning("%s", damage)
            return True
        if damage is not None:
            raise damage
        return False

    def _candidates(self) -> list[_Candidate]:
        """Commits of this run on faster tiers, newest first. A tier that cannot be read has none."""
        by_name: dict[str, list[Found]] = {}
        problems: list[OSError] = []
        for tier in self._sources:
            try:
                found = self._crew.run(
                    f"look at {tier.name} for {self.target.name}", lambda pace, t=tier: scan(t, self._shared.known, pace=pace),  # type: ignore[misc]
                    stall_s=self._stall_s, nice=True, stop=self._stop,
                )  # fmt: skip
            except OSError as error:
                problems.append(error)
                continue
            for each in found:
                if (
                    self._own(each)
                    and each.path not in self._bad
                    and not is_suspect(self._shared.suspects, each.sequence)
                ):
                    by_name.setdefault(each.name, []).append(each)
        if len(problems) == len(self._sources):
            raise _Failed(problems[0], self._newest)
        return sorted((_Candidate(copies=f) for f in by_name.values()), key=lambda c: c.newest.sequence, reverse=True)

    def _own(self, found: Found) -> bool:
        return found.marker is not None and found.marker.run_id == self._run_id

    def _look_at_target(self) -> int:
        try:
            found = self._crew.run(
                f"look at {self.target.name}", lambda pace: scan(self.target, self._shared.known, pace=pace),
                stall_s=self._stall_s, nice=True, stop=self._stop,
            )  # fmt: skip
        except OSError as error:
            raise _Failed(error, self._newest) from error
        return max((f.sequence for f in found if self._own(f)), default=0)

    def _copy(self, candidate: _Candidate) -> None:
        """Copy one commit, from the fastest tier whose copy is whole and can be read."""
        failure: _Failed | None = None
        for found in candidate.copies:
            try:
                done = self._crew.run(
                    f"copy from {found.tier} to {self.target.name}", lambda pace, f=found: self._stream(f, pace),  # type: ignore[misc]
                    stall_s=self._stall_s, nice=True, stop=self._stop,
                )  # fmt: skip
            except Damaged as error:
                self._bad.add(found.path)
                failure = _Failed(error, found)
            except Stalled as error:
                failure = _Failed(error, found)
            except Exception as error:
                if getattr(error, "errno", None) != errno.EIO:
                    raise _Failed(error, found) from error
                failure = _Failed(error, found)  # it may be this copy's disk that reads badly
            else:
                self._copied(found, done)
                return
        assert failure is not None
        raise failure

    def _stream(self, found: Found, pace: Pace) -> Copied:
        tier = next(tier for tier in self._sources if tier.name == found.tier)
        source = tier.store()
        target = self.target.store()
        with self._in_use.hold(found.path):
            if not tier.shared:
                if self._shared.together is None:
                    raise StoreError(f"tier {tier.name!r}: no other node is known to have the rest of {found.name}")
                return self._shared.together(found, tier, self.target, pace)
            try:
                return copy_checkpoint(source, target, found.name, expected_crc32c=found.marker_crc32c, pace=pace)
            except StoreError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    target.abandon(found.name)  # what is there of it only takes room from the commits that are whole
                raise

    def _copied(self, found: Found, done: Copied) -> None:
        assert found.marker is not None
        self._there = found.sequence
        self._tell("checkpoint_copied", **copied_event(found, self.target, done))
