"""Which checkpoint does this run go on from? The newest whole one on any tier, brought where workers can read it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import keeping
from ckptd.core.keeping import Range
from ckptd.node.inuse import InUse
from ckptd.node.tiers import Found, Tier, scan
from ckptd.tiers import Copied, Crew, Pace, StoreError, copy_checkpoint, verify

log = logging.getLogger(__name__)

SCAN_PATIENCE_S = 30.0
"""How long a tier may take for each answer while it is looked through."""
READ_PATIENCE_S = 120.0
"""How long no byte may come out of a tier while a checkpoint on it is read."""
HEADROOM = 1.05
"""Room that must be free for a checkpoint that is fetched, as a multiple of its size."""


@dataclass(kw_only=True)
class Question:
    """What is asked of a node, and with what it answers."""

    tiers: list[Tier]
    """Fastest first."""
    run_id: str
    known: Mapping[str, str] = field(default_factory=dict)
    """CRC-32C of markers by `marker_key`."""
    avoid: Collection[str] = ()
    """Paths of checkpoints to take only where there is no other: those of their names on other tiers, too."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """The highest commit sequence that the ledger knows of on each tier."""
    suspects: Sequence[Range] = ()
    """Commit sequences, first and last of each branch that the run went back from: not resumed from at all."""
    floor: int = 0
    """Commit sequence of what can be resumed from anyway, out of the nodes' own directories: older ones do not count."""
    settle: bool = False
    """Tiers that do not answer have been waited for: go on without them if anything can be resumed from."""
    crew: Crew = field(default_factory=Crew)
    in_use: InUse = field(default_factory=InUse)
    """What is being read or written is held in it."""
    fetched: Callable[[Found, Tier, Copied], None] = lambda _found, _tier, _copied: None
    """Told of a checkpoint that was copied to another tier."""


def inventory(question: Question) -> dict[str, Any]:
    """The answer to "which checkpoint?": the fields of `InventoryReported`.

    Newest first by commit sequence, and of one commit the copy on the fastest tier, the first whose files all have the
    sizes and digests of the marker. Slower tiers are not asked where a faster one has the newest commit that the ledger
    knows of. Where this run has no commits but an earlier run of the same name has (its run directory was lost), those
    are taken, and `chosen.run_id` tells.
    """
    begun = time.monotonic()
    search = _Search(question)
    chosen = search.run()
    problem = search.why_to_wait(chosen)
    return {
        "chosen": None if problem else chosen,
        "rejected": search.rejected,
        "unreachable": search.unreachable,
        "commits": search.commits,
        "newest_sequence": search.newest_sequence,
        "seconds": time.monotonic() - begun,
        "problem": problem,
    }


class _Search:
    def __init__(self, question: Question) -> None:
        self._q = question
        self._order = {tier.name: i for i, tier in enumerate(question.tiers)}
        self._tier = {tier.name: tier for tier in question.tiers}
        self._avoid = {keeping.name_of(path) for path in question.avoid}
        self._found: list[Found] = []
        self._tried: dict[str, bool] = {}
        """Path -> whether it is whole."""
        self._fetched: dict[str, Tier] = {}
        """Path on an object store -> where it was brought."""
        self.rejected: list[dict[str, Any]] = []
        self.unreachable: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any] | None:
        waiting = [tier for tier in self._q.tiers if tier.shared]  # what nodes have for themselves they tell apart
        while waiting:
            tier = waiting.pop(0)
            self._scan(tier)
            newer = max((self._q.expected.get(other.name, 0) for other in waiting), default=0)
            best = self._best(at_least=max(newer, self._q.floor + 1)) if waiting and self._q.expected else None
            if best is not None and best.name not in self._avoid:
                return self._chosen(best)
        best = self._best(at_least=self._q.floor + 1 if self._q.floor else 0)
        return None if best is None else self._chosen(best)

    @property
    def commits(self) -> int:
        gone_back_from = {f.name for f in self._found if f.marker is not None and self._suspect(f)}
        return len({f.name for f in self._own()} | gone_back_from) + sum(1 for f in self._found if f.problem)

    @property
    def newest_sequence(self) -> int:
        """The highest that was ever given, as far as can be known: the next commit counts on from it."""
        return max([f.sequence for f in self._found] + list(self._q.expected.values()), default=0)

    def why_to_wait(self, chosen: dict[str, Any] | None) -> str:
        """Why this answer is not to be acted on; empty: it is."""
        if not self.unreachable:
            return ""
        told = "; ".join(f"tier {u['tier']!r} cannot be read: {u['problem']}" for u in self.unreachable)
        if chosen is None and not self._q.floor:
            return told  # it may hold all there is: nothing begins again from the start on such grounds
        newest = max(u["expected"] for u in self.unreachable)
        known = self._q.floor if chosen is None else chosen["sequence"]
        if newest > known and not self._q.settle:
            return f"{told}; it holds a newer commit than all others, {newest} and not {known}"
        return ""

    # --- looking ---

    def _scan(self, tier: Tier) -> None:
        expected = self._q.expected.get(tier.name, 0)
        try:
            found = self._q.crew.run(
                f"look through {tier.name}", lambda pace: scan(tier, self._q.known, pace=pace), stall_s=SCAN_PATIENCE_S
            )
        except OSError as error:
            self.unreachable.append({"tier": tier.name, "problem": str(error), "expected": expected})
            return
        self._found += found
        self.rejected += [
            {"step": f.step, "tier": f.tier, "path": f.path, "problem": f.problem} for f in found if f.problem
        ]

    def _own(self) -> list[Found]:
        """Commits of this run; where there are none, of the run of the same name that committed last."""
        committed = [f for f in self._found if f.marker is not None and not self._suspect(f)]
        own = [f for f in committed if f.marker is not None and f.marker.run_id == self._q.run_id]
        if own or not committed:
            return own
        newest = max(committed, key=lambda f: f.marker.created if f.marker is not None else 0.0)
        assert newest.marker is not None
        return [f for f in committed if f.marker is not None and f.marker.run_id == newest.marker.run_id]

    def _suspect(self, found: Found) -> bool:
        return keeping.is_suspect(self._q.suspects, found.sequence)

    def _best(self, at_least: int = 0) -> Found | None:
        """The first whole one, of commits not older than `at_least`."""
        ranked = sorted(self._own(), key=lambda f: (f.name in self._avoid, -f.sequence, self._order[f.tier]))
        return next((f for f in ranked if f.sequence >= at_least and self._whole(f)), None)

    def _whole(self, found: Found) -> bool:
        """Whether it is whole, and, of one on an object store, now on a tier that workers can read."""
        if found.path not in self._tried:
            self._tried[found.path] = False
            tier = self._tier[found.tier]
            try:
                if tier.remote:
                    return self._fetch(found, tier)
                self._q.crew.run(
                    f"read {tier.name}", lambda pace: self._verify(found, tier, pace), stall_s=READ_PATIENCE_S
                )
                self._tried[found.path] = True
            except OSError as error:
                self._reject(found, str(error))
        return self._tried[found.path]

    def _verify(self, found: Found, tier: Tier, pace: Pace) -> None:
        with self._q.in_use.hold(found.path):
            verify(tier.store(), found.name, found.marker_crc32c, pace)

    def _reject(self, found: Found, problem: str) -> None:
        self.rejected.append({"step": found.step, "tier": found.tier, "path": found.path, "problem": problem})

    # --- fetching ---

    def _fetch(self, found: Found, source: Tier) -> bool:
        """Stream it to the fastest tier that has a directory and room. What is chosen then is that copy."""
        assert found.marker is not None
        size = sum(file.size for file in found.marker.files)
        problems = []
        for target in self._q.tiers:
            if target.remote:
                continue
            try:
                copied = self._q.crew.run(
                    f"fetch to {target.name}", lambda pace, t=target: self._copy(found, source, t, size, pace),  # type: ignore[misc]
                    stall_s=READ_PATIENCE_S,
                )  # fmt: skip
            except OSError as error:
                problems.append(f"to tier {target.name!r}: {error}")
                continue
            self._fetched[found.path] = target
            self._tried[found.path] = True
            self._q.fetched(found, target, copied)
            return True
        self._reject(found, "it cannot be fetched: " + "; ".join(problems))
        return False

    def _copy(self, found: Found, source: Tier, target: Tier, size: int, pace: Pace) -> Copied:
        into, out_of = target.store(), source.store()
        free = into.free_bytes()
        if free is not None and free < size * HEADROOM:
            raise StoreError(f"{size} bytes are needed, {free} are free")
        with self._q.in_use.hold(found.path):
            return copy_checkpoint(out_of, into, found.name, expected_crc32c=found.marker_crc32c, pace=pace)

    def _chosen(self, found: Found) -> dict[str, Any]:
        marker = found.marker
        assert marker is not None
        tier = self._fetched.get(found.path)
        chosen = {
            "step": marker.step,
            "tier": found.tier if tier is None else tier.name,
            "path": found.path if tier is None else tier.store().path(found.name),
            "marker_crc32c": found.marker_crc32c,
            "sequence": marker.sequence,
            "attempt": marker.attempt,
            "samples_seen": marker.samples_seen,
            "world_size": marker.world_size,
            "comparable": marker.comparable,
            "run_id": marker.run_id,
            "files": len(marker.files),
        }
        return chosen if tier is None else {**chosen, "fetched_from": {"tier": found.tier, "path": found.path}}
