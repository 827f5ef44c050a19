"""What does this node hold of the commits on a tier that is its own, and how do further files get there?

The directory of a commit has the files of this node's ranks, copies of another node's, and what was fetched to resume
from; `COMMITTED` in it lists those of all nodes. A file counts as held when it has its size and, where somebody looked,
its digest.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import crc32c

from ckptd.core.holdings import as_ranges
from ckptd.node.peers import Peer, Rate
from ckptd.node.tiers import Found, Tier, scan
from ckptd.tiers import Pace, Store, StoreError, read_marker
from ckptd.tiers.base import CHUNK, chunks, telling
from ckptd_shim import contract
from ckptd_shim.contract import FileDigest, Marker
from ckptd_shim.digest import crc32c_bytes

VERIFIED: Final = 2
"""So many of the newest commits are read before they are told; an older one is, before anything is resumed from it."""
FETCH_PREFIX: Final = ".fetch-"
"""Marks a file that is not all there yet."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What this node holds on one tier."""

    holdings: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Files that are not what was committed."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit, as a node that knows of it has it."""

    tier: Tier
    name: str
    marker: Marker
    data: bytes
    """The marker's very bytes."""

    @property
    def crc(self) -> str:
        """CRC-32C of the marker."""
        return crc32c_bytes(self.data)

    @property
    def path(self) -> str:
        """Its directory on this node, which need not be there yet."""
        return self.tier.store().path(self.name)


class Shelf:
    """Remembers which files were read and found good or bad, as long as they do not change. For several threads."""

    def __init__(self) -> None:
        self._looked: dict[str, tuple[int, int, bool]] = {}
        """Path -> size, time of the last change, and whether its digest is right."""

    def tell(self, tier: Tier, run_id: str, known: Mapping[str, str], pace: Pace) -> Told:
        """What this node holds on `tier`; see `core.holdings` for the form. Raises StoreError."""
        store = tier.store()
        told = Told()
        found = scan(tier, known, store=store, pace=pace)
        told.rejected.extend(_rejected(f, f.problem) for f in found if f.problem)
        commits = sorted((f for f in found if f.marker is not None), key=lambda f: f.sequence, reverse=True)
        own = [f for f in commits if f.marker is not None and f.marker.run_id == run_id] or commits
        read = {f.name for f in own[:VERIFIED]}
        for each in commits:
            assert each.marker is not None
            having, bad = self.held(store, each.name, each.marker, pace, read=each.name in read)
            told.rejected.extend(_rejected(each, problem) for problem in bad)
            told.holdings.append(_holding(each, each.marker, having))
        return told

    def held(
        self, store: Store, name: str, marker: Marker, pace: Pace, *, read: bool = True, only: Collection[int] | None = None
    ) -> tuple[set[int], list[str]]:  # fmt: skip
        """(places of the files that are here, what is wrong with others). `read`: every byte, unless it was read before."""
        sizes = store.sizes(name)
        having, bad = set(), []
        for place, listed in enumerate(marker.files):
            if only is not None and place not in only:
                continue
            if sizes.get(listed.name) != listed.size:
                if listed.name in sizes:
                    bad.append(f"{store.path(name)}/{listed.name} has {sizes[listed.name]} bytes, not {listed.size}")
                continue
            good = self._good(store, name, listed, pace, read=read)
            if good:
                having.add(place)
            else:
                bad.append(f"{store.path(name)}/{listed.name} is not what was committed: its bytes have changed")
        return having, bad

    def _good(self, store: Store, name: str, listed: FileDigest, pace: Pace, *, read: bool) -> bool:
        path = os.path.join(store.path(name), listed.name)
        with telling(path):
            stat = os.stat(path)
        before = self._looked.get(path)
        if before is not None and before[:2] == (stat.st_size, stat.st_mtime_ns):
            return before[2]
        if not read:
            return True
        crc = 0
        with store.reading(name, listed.name) as reader:
            for chunk in chunks(reader, bytearray(CHUNK)):
                crc = crc32c.crc32c(chunk, crc)
                pace.beat(len(chunk))
        good = f"{crc:08x}" == listed.crc32c
        self._looked[path] = (stat.st_size, stat.st_mtime_ns, good)
        return good

    def fetch(
        self, commit: Commit, places: Collection[int], peer: Peer, *, pace: Pace, rate: Rate | None = None
    ) -> int:
        """Bring files of a commit here from another node, each verified; then its marker. Returns their bytes.

        Raises:
            NoSuchFile: the other node has one of them no more.
            StoreError: it does not answer, sends something else than was committed, or nothing can be written here.
        """
        with telling(commit.path):
            if not os.path.isdir(commit.path):
                os.makedirs(commit.path, exist_ok=True)
                contract.write_atomically(os.path.join(commit.path, contract.OWNER), commit.marker.run_id.encode())
        moved = 0
        for place in sorted(places):
            moved += self._fetch_file(commit, commit.marker.files[place], peer, pace=pace, rate=rate or Rate(None))
        self.mark(commit)
        return moved

    def mark(self, commit: Commit) -> None:
        """Have the marker of a commit here, where it is missing. Raises StoreError."""
        path = os.path.join(commit.path, contract.COMMITTED)
        with telling(path):
            if not os.path.exists(path):
                contract.write_atomically(path, commit.data, durable=True)

    def _fetch_file(self, commit: Commit, listed: FileDigest, peer: Peer, *, pace: Pace, rate: Rate) -> int:
        temporary, path = (os.path.join(commit.path, each) for each in (FETCH_PREFIX + listed.name, listed.name))
        crc = 0
        try:
            with telling(temporary):
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for piece in peer.get(commit.tier.name, commit.name, listed.name, most=listed.size):
                    crc = crc32c.crc32c(piece, crc)
                    with telling(temporary):
                        _write(fd, piece)
                    pace.beat(len(piece))
                    rate.took(len(piece))
                with telling(temporary):
                    os.fsync(fd)
            finally:
                os.close(fd)
            if f"{crc:08x}" != listed.crc32c:
                raise StoreError(
                    f"node {peer.node}: {commit.name}/{listed.name} came with CRC-32C {crc:08x}, {listed.crc32c} was committed"
                )
            with telling(path):
                os.rename(temporary, path)
                stat = os.stat(path)
        except BaseException:
            contract.unlink_quietly(temporary)
            raise
        self._looked[path] = (stat.st_size, stat.st_mtime_ns, True)
        return listed.size


def commit_of(tier: Tier, name: str, crc: str | None, peer: Peer | None = None) -> Commit:
    """The commit whose marker has this CRC-32C, by the marker that is here, or another node's.

    Raises:
        Damaged: it is another one.
        StoreError: there is none.
    """
    store: Store | _Fetched = tier.store()
    if peer is not None:
        data = b"".join(map(bytes, peer.get(tier.name, name, contract.COMMITTED, most=64 << 20)))
        store = _Fetched(data, f"node {peer.node}: {name}")
    marker, data = read_marker(store, name, crc)  # type: ignore[arg-type]
    return Commit(tier=tier, name=name, marker=marker, data=data)


class _Fetched:
    """As much of a store as reading a marker needs."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where

    def marker(self, _name: str) -> bytes:
        return self._data

    def path(self, _name: str) -> str:
        return self._where


def places_of(marker: Marker, node: str) -> set[int]:
    """The files of a commit that a node's ranks wrote, and the description of all tensors, which every node has."""
    metadata = {i for i, f in enumerate(marker.files) if f.name == contract.DCP_METADATA}
    return set(marker.nodes.get(node, ())) | (metadata if marker.nodes.get(node) else set())


def needed_by(marker: Marker, ranks: Collection[int], world_size: int, *, everything: bool) -> set[int]:
    """The files of a commit that ranks of a world of `world_size` read when they resume.

    Where the world is as it was, each rank reads what it would have written and what others wrote for it. Where it is
    another one, tensors are cut anew, and nobody but torch knows where: all of them, and rank 0's extras.
    """
    places = {listed.name: i for i, listed in enumerate(marker.files)}
    same = marker.world_size == world_size
    extras = {contract.extras_name(0)} | ({contract.extras_name(rank) for rank in ranks} if same else set())
    if everything or not same or len(marker.needs) != world_size:
        all_extras = {contract.extras_name(rank) for rank in range(marker.world_size)}
        return {i for name, i in places.items() if name in extras or name not in all_extras}
    wanted = {place for rank in ranks for place in marker.needs[rank]}
    return wanted | {places[name] for name in (*extras, contract.DCP_METADATA) if name in places}


def _holding(found: Found, marker: Marker, having: Collection[int]) -> dict[str, Any]:
    return {
        "tier": found.tier, "name": found.name, "path": found.path, "step": marker.step, "attempt": marker.attempt,
        "sequence": marker.sequence, "run_id": marker.run_id, "created": marker.created,
        "samples_seen": marker.samples_seen, "world_size": marker.world_size, "comparable": marker.comparable,
        "marker_crc32c": found.marker_crc32c, "files": len(marker.files), "held": as_ranges(having),
    }  # fmt: skip


def _rejected(found: Found, problem: str) -> dict[str, Any]:
    return {"step": found.step, "tier": found.tier, "path": found.path, "problem": problem}


def _write(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):  # a raw write may take a part only
        done += os.write(fd, data[done:])
