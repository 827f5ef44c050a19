"""How do several nodes, each with a part of a commit, bring it to a slower tier, whole or not at all?

One of them leads: it says which commit goes, asks each of the others for what that one's ranks wrote, or for a copy of
it where that node is gone, and commits when every file is there and verified. The others do what they are asked, so two
commits are never mixed. On a tier that each node has for itself, each brings all that it holds, and its own marker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptd.core.holdings import as_ranges
from ckptd.node.gather import Dial, Source
from ckptd.node.shelf import Commit, Shelf
from ckptd.node.tiers import Tier
from ckptd.tiers import Copied, Pace, StoreError
from ckptd.tiers.copying import begin_copy, commit_copy, copy_alone, copy_files, occupied

SHOWN_LATE_S: Final = 30.0
"""How late a network file system may show one node what another has written."""
MIRROR_PATIENCE_S: Final = 30.0
"""How long a copy to a tier of its own waits for a second copy of the neighbour's files, to take it along."""
AT_ONCE: Final = 16

Own = Callable[[Commit, Collection[int]], int]
"""Brings these files of a commit to the slower tier from here; returns the bytes that moved. Raises StoreError."""


def copy(
    commit: Commit, target: Tier, *, me: str, peers: Mapping[str, Source], dial: Dial, own: Own, pace: Pace
) -> Copied:
    """Make a commit of this node's own tier one of `target`, with the help of the other nodes.

    Raises:
        StoreError: a node cannot, and nobody else has what it holds; or the target failed. What is there is kept.
    """
    begun = time.monotonic()
    store, marker = target.store(), commit.marker
    total = sum(file.size for file in marker.files)
    if target.shared:
        if occupied(store, commit.name, commit.data):
            return Copied(bytes=total, moved=0, seconds=time.monotonic() - begun)
        begin_copy(store, commit.name, marker, pace)
    parts: dict[str, list[int]] = {node: places for node, places in marker.nodes.items() if places}
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="together") as pool:
        jobs = [pool.submit(_ask, commit, target, node, places, peers, dial, pace) for node, places in parts.items() if node != me]  # fmt: skip
        try:
            moved = own(commit, parts.get(me, []))
        finally:
            results = [job.exception() or job.result() for job in jobs]
    for result in results:
        if isinstance(result, BaseException):
            raise result
        moved += result
    if target.shared:
        commit_copy(store, commit.name, commit.data, marker.files, pace=pace, patience_s=SHOWN_LATE_S)
    return Copied(bytes=total, moved=moved, seconds=time.monotonic() - begun)


def _ask(  # noqa: PLR0917
    commit: Commit, target: Tier, node: str, places: list[int], peers: Mapping[str, Source], dial: Dial, pace: Pace
) -> int:
    """Have a node's part brought, by itself or, onto a tier that all see, by whoever else has it."""
    request = {
        "type": "contribute", "tier": commit.tier.name, "to": target.name, "name": commit.name,
        "marker_crc32c": commit.crc, "places": as_ranges(places),
    }  # fmt: skip
    others = [peer for name, peer in peers.items() if name != node] if target.shared else []
    problems = []
    for source in ([peers[node]] if node in peers else []) + others:
        try:
            with dial(source) as peer:
                return int(peer.ask(request, pace)["moved"])
        except StoreError as error:
            problems.append(str(error))
    raise StoreError(f"{commit.name}: node {node}'s part is missing: {'; '.join(problems) or 'the node is gone'}")


def bring(commit: Commit, target: Tier, places: Collection[int], *, pace: Pace) -> int:
    """Put files of this node's own directory into a copy on a tier that all nodes see. Returns the bytes that moved.

    Raises:
        Damaged, StoreError: see `copy_files`.
    """
    files = [commit.marker.files[place] for place in sorted(places)]
    return copy_files(commit.tier.store(), target.store(), commit.name, commit.marker, files, pace=pace)


def bring_all(commit: Commit, target: Tier, *, shelf: Shelf, hoped_for: Collection[int], pace: Pace) -> int:
    """Put all that this node holds of a commit on a slower tier of its own. Returns the bytes that moved.

    `hoped_for`: files that are here or are about to be.

    Raises:
        StoreError: source or target failed.
    """
    store = target.store()
    if occupied(store, commit.name, commit.data, partial=True):
        return 0
    deadline = time.monotonic() + MIRROR_PATIENCE_S
    while True:
        having, _ = shelf.held(commit.tier.store(), commit.name, commit.marker, pace, read=False)
        if having >= set(hoped_for) or time.monotonic() >= deadline:
            break
        pace.beat()
        time.sleep(0.2)
    files = [commit.marker.files[place] for place in sorted(having)]
    return copy_alone(commit.tier.store(), store, commit.name, commit.marker, commit.data, files, pace=pace)
