"""How does each commit come to lie on two nodes? This one copies what the node before it in the ring holds.

A thread looks for new commits in this node's own directory, since a marker there says that the whole is committed, and
fetches the other node's files into the same directory. Only the newest is copied: one that was overtaken is left out.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptd.node.gather import Dial, Source
from ckptd.node.inuse import InUse
from ckptd.node.peers import Rate, give_way
from ckptd.node.promote import Tell, retry_after
from ckptd.node.shelf import Commit, Shelf, places_of
from ckptd.node.tiers import Found, Tier, scan
from ckptd.tiers import Abandoned, Crew, Pace, StoreError
from ckptd_shim.digest import committed_paths

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
STALL_S: Final = 120.0


class Mirror(threading.Thread):
    """Copies for one node, from the node that `follow` names.

    Args:
        tier: of which each node has its own directory.
        run_id: whose commits are copied.
        dial: connects to another node's agent.
        tell: takes events.
        seen: told of the sequence of a commit that was found here.
        bytes_per_s: bound; None: none.
    """

    def __init__(
        self, *, tier: Tier, run_id: str, crew: Crew, shelf: Shelf, in_use: InUse, dial: Dial, tell: Tell,
        seen: Callable[[int], None] = lambda _sequence: None, bytes_per_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name=f"mirror on {tier.name}", daemon=True)
        self.tier = tier
        self._run_id = run_id
        self._crew = crew
        self._shelf = shelf
        self._in_use = in_use
        self._dial = dial
        self._tell = tell
        self._seen = seen
        self._rate = Rate(bytes_per_s)
        self._source: Source | None = None
        self._settled: set[str] | None = None
        """The commits that were here when there was nothing more to do."""
        self._newest = 0
        self._failures = 0
        self._not_before = 0.0
        self._wake = threading.Event()
        self._stop_event = threading.Event()

    def follow(self, source: Source | None) -> None:
        """Copy this node's files from now on; None: nobody's."""
        if source != self._source:
            self._source, self._failures, self._not_before, self._settled = source, 0, 0.0, None
        self._wake.set()

    @property
    def following(self) -> str:
        """Name of the node whose files are copied; empty: none."""
        return self._source.node if self._source is not None else ""

    def close(self) -> None:
        """Have the thread end; a copy that is under way stays half done."""
        self._stop_event.set()
        self._wake.set()

    def run(self) -> None:
        """Look, copy, for ever."""
        give_way()
        while not self._stop_event.is_set():
            self._wake.wait(max(LOOK_S, self._not_before - time.monotonic()))
            self._wake.clear()
            if self._stop_event.is_set() or time.monotonic() < self._not_before:
                continue
            try:
                self._turn()
            except Abandoned:
                return
            except Exception:
                log.exception("looking for commits to mirror failed")
                self._not_before = time.monotonic() + retry_after(3, jitter=0.0)

    def _turn(self) -> None:
        source = self._source
        try:
            committed = set(committed_paths(self.tier.directory))
            if committed == self._settled:
                return
            found = scan(self.tier)
        except OSError as error:
            log.warning("tier %s cannot be read: %s", self.tier.name, error)
            self._not_before = time.monotonic() + retry_after(2, jitter=random.uniform(-1, 1))
            return
        own = [f for f in found if f.marker is not None and f.marker.run_id == self._run_id]
        newest = max(own, key=lambda f: f.sequence, default=None)
        if newest is None or newest.marker is None:
            return
        if newest.sequence > self._newest:
            self._newest = newest.sequence
            self._seen(newest.sequence)
        if source is None:
            return
        if source.node not in newest.marker.nodes:
            self._settled = committed
            return
        begun = time.monotonic()
        try:
            moved = self._crew.run(
                f"mirror {source.node}", lambda pace: self._copy(newest, source, pace), stall_s=STALL_S, nice=True,
                stop=self._stop_event,
            )  # fmt: skip
        except OSError as error:
            if source == self._source:  # else it was lost, and the one that took its place has failed in nothing
                self._failed(newest, source, error)
            return
        self._failures, self._not_before = 0, 0.0
        self._settled = committed
        self._tell(
            "checkpoint_mirrored", attempt=newest.attempt, step=newest.step, tier=self.tier.name, path=newest.path,
            source=source.node, nodes=len(newest.marker.nodes), sequence=newest.sequence, bytes=moved,
            seconds=time.monotonic() - begun,
        )  # fmt: skip

    def _copy(self, found: Found, source: Source, pace: Pace) -> int:
        """Bytes that were fetched."""
        marker = found.marker
        assert marker is not None
        store = self.tier.store()
        with self._in_use.hold(found.path):
            wanted = places_of(marker, source.node)
            having, _ = self._shelf.held(store, found.name, marker, pace, only=wanted)
            lacking = wanted - having
            if not lacking:
                return 0
            with self._dial(source) as peer:
                commit = Commit(tier=self.tier, name=found.name, marker=marker, data=store.marker(found.name))
                return self._shelf.fetch(commit, lacking, peer, pace=pace, rate=self._rate)

    def _failed(self, found: Found, source: Source, error: OSError) -> None:
        self._failures += 1
        retry_s = retry_after(self._failures, jitter=random.uniform(-1, 1))
        self._not_before = time.monotonic() + retry_s
        told = StoreError(f"no second copy of what node {source.node} holds: {error}")
        log.warning("%s", told)
        self._tell(
            "copy_failed", attempt=found.attempt, step=found.step, tier=self.tier.name, path=found.path,
            source=source.node, error=str(told)[:500], errno=getattr(error, "errno", None), attempts=self._failures,
            retry_s=retry_s,
        )  # fmt: skip
