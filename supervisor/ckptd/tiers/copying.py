"""How does a checkpoint get from one store to another, whole or not at all, and is one in a store still whole?

The marker is never rewritten: its bytes, and so its CRC-32C, are the same wherever the checkpoint lies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import crc32c

from ckptd.tiers.base import CHUNK, Damaged, NoSuchFile, Reader, Store, StoreError, chunks
from ckptd.tiers.watched import Pace
from ckptd_shim import contract
from ckptd_shim.contract import ContractError, FileDigest, Marker
from ckptd_shim.digest import crc32c_bytes

_LOOK_AGAIN_S = 0.5


class Occupied(StoreError):
    """Another checkpoint has the name already, and a marker of its own."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What a copy came to."""

    bytes: int
    """Of all its files."""
    moved: int
    """Of those that were not there from an earlier try."""
    seconds: float


def read_marker(store: Store, name: str, expected_crc32c: str | None = None) -> tuple[Marker, bytes]:
    """The marker of a checkpoint and its very bytes.

    Raises:
        Damaged: it cannot be read as one, is of another checkpoint, or its bytes have not the CRC-32C that is expected.
        NoSuchFile: it is not committed.
        StoreError: the store does not answer.
    """
    data = store.marker(name)
    where = f"{store.path(name)}/{contract.COMMITTED}"
    actual = crc32c_bytes(data)
    if expected_crc32c is not None and actual != expected_crc32c:
        raise Damaged(f"its marker has CRC-32C {actual}, {expected_crc32c} was committed: its bytes have changed")
    try:
        marker = Marker.from_json(data, where=where)
    except ContractError as error:
        raise Damaged(str(error)) from error
    if contract.parse_checkpoint_dirname(name) != (marker.step, marker.attempt):
        raise Damaged(f"its marker is of step {marker.step}, attempt {marker.attempt}")
    if marker.format != contract.FORMAT:
        raise Damaged(f"its format is {marker.format}; this ckptd reads {contract.FORMAT}")
    for listed in marker.files:
        if listed.name != os.path.basename(listed.name) or listed.name in ("", ".", "..", contract.COMMITTED):
            raise Damaged(f"{where} lists {listed.name!r}, which is no name of a file in its directory")
    return marker, data


def verify(
    store: Store, name: str, expected_crc32c: str | None = None, pace: Pace | None = None, *, partial: bool = False
) -> Marker:
    """Read every byte of a committed checkpoint and compare it with its marker, which is returned.

    `partial`: files may be missing, as where each node has a directory of its own.

    Raises:
        Damaged: says which file is wrong, and how.
        StoreError: the store does not answer.
    """
    pace = pace or Pace()
    marker, _ = read_marker(store, name, expected_crc32c)
    pace.beat()
    sizes = store.sizes(name)
    files = [listed for listed in marker.files if not partial or listed.name in sizes]
    for listed in files:
        _check_size(f"{store.path(name)}/{listed.name}", listed, sizes.get(listed.name))
    buffer = bytearray(CHUNK)
    for listed in files:
        with _missing_is_damage(), store.reading(name, listed.name) as reader:
            _check_digest(f"{store.path(name)}/{listed.name}", listed, reader, buffer, pace)
    return marker


def copy_checkpoint(
    source: Store, target: Store, name: str, *, expected_crc32c: str | None = None, pace: Pace | None = None
) -> Copied:
    """Make checkpoint `name` of `source` a checkpoint of `target`, verified there before it is committed.

    What an earlier try has left whole is kept. At most two chunks are in memory.

    Raises:
        Damaged: the source is not what was committed; the target has nothing of it.
        Occupied: the target holds another checkpoint under this name.
        StoreError: source or target failed. What has been copied whole is there for the next try.
    """
    begun = time.monotonic()
    pace = pace or Pace()
    marker, data = read_marker(source, name, expected_crc32c)
    pace.beat()
    if occupied(target, name, data):
        return Copied(bytes=sum(f.size for f in marker.files), moved=0, seconds=time.monotonic() - begun)
    moved = copy_alone(source, target, name, marker, data, marker.files, pace=pace)
    return Copied(bytes=sum(f.size for f in marker.files), moved=moved, seconds=time.monotonic() - begun)


def copy_alone(  # noqa: PLR0917
    source: Store, target: Store, name: str, marker: Marker, data: bytes, files: Sequence[FileDigest], *, pace: Pace
) -> int:
    """Copy these files of a checkpoint where nobody else works at the same copy, and commit it. Returns the bytes moved.

    Raises:
        Damaged: a file is not what was committed; the copy is given up.
        StoreError: source or target failed.
    """
    begin_copy(target, name, marker, pace)
    try:
        moved = copy_files(source, target, name, marker, files, pace=pace)
    except Damaged:
        target.abandon(name)
        raise
    commit_copy(target, name, data, files, pace=pace)
    return moved


def begin_copy(target: Store, name: str, marker: Marker, pace: Pace) -> None:
    """Make ready for a copy, and drop what does not belong into it. Raises StoreError."""
    left = target.begin(name, marker.run_id)
    pace.beat()
    wanted = {contract.OWNER, *(f.name for f in marker.files)}
    target.drop(name, [file for file, size in left.items() if file not in wanted or size < 0])


def copy_files(
    source: Store, target: Store, name: str, marker: Marker, files: Sequence[FileDigest], *, pace: Pace
) -> int:
    """Bring some of a checkpoint's files into a copy of it that was begun, each verified there. Returns the bytes moved.

    Several nodes may do this for the same copy, each with files of its own: whatever goes wrong, what is there of it stays.

    Raises:
        Damaged: one is not what was committed.
        StoreError: source or target failed.
    """
    left = target.begin(name, marker.run_id)
    buffer = bytearray(CHUNK)
    moved = 0
    for listed in files:
        if left.get(listed.name) == listed.size:
            try:
                _read_back(target, name, listed, buffer, pace)
                continue
            except Damaged:
                pass  # written in part, or by something else: once more
        _copy_file(source, target, name, listed, buffer=buffer, pace=pace)
        try:
            _read_back(target, name, listed, buffer, pace)
        except Damaged as error:
            target.drop(name, [listed.name])
            raise StoreError(f"{error}, right after it was written there") from error
        moved += listed.size
    return moved


def commit_copy(
    target: Store, name: str, data: bytes, files: Sequence[FileDigest], *, pace: Pace, patience_s: float = 0.0
) -> None:
    """Commit a copy that has these files. A directory that other nodes write into may show them late: `patience_s`.

    Raises:
        StoreError: one of them is not there, or has another size.
    """
    deadline = time.monotonic() + patience_s
    while True:
        pace.beat()
        there = target.copied_sizes(name)
        if all(there.get(listed.name) == listed.size for listed in files):
            break
        if time.monotonic() >= deadline:
            raise StoreError(f"{target.path(name)}: something else has changed the copy while it was made")
        time.sleep(_LOOK_AGAIN_S)
    target.commit(name, data)


def occupied(target: Store, name: str, data: bytes, *, partial: bool = False) -> bool:
    """Whether the target holds this very checkpoint already. Raises Occupied where it holds another one.

    `partial`: a part of it will do, where each node holds one.
    """
    try:
        there = target.marker(name)
    except (NoSuchFile, Damaged):
        return False
    if there == data:
        try:
            verify(target, name, partial=partial)
        except Damaged:
            return False
        return True
    try:
        other, _ = read_marker(target, name)
    except Damaged:
        return False
    mine = Marker.from_json(data, where=name)
    if other.run_id == mine.run_id:
        return False  # this one: a run gives a step and an attempt once. The bytes of its marker have changed
    raise Occupied(
        f"{target.path(name)} is commit {other.sequence} of run {other.run_id}, and this is commit {mine.sequence} of "
        f"run {mine.run_id}: move it away, or give this run another name"
    )


def _copy_file(source: Store, target: Store, name: str, listed: FileDigest, *, buffer: bytearray, pace: Pace) -> None:
    where = f"{source.path(name)}/{listed.name}"
    crc = size = 0
    with target.writing(name, listed.name) as writer, _missing_is_damage(), source.reading(name, listed.name) as reader:
        for chunk in chunks(reader, buffer):
            crc = crc32c.crc32c(chunk, crc)
            size += len(chunk)
            if size > listed.size:
                break
            writer.write(chunk)
            pace.beat(len(chunk))
        _check_size(where, listed, size)
        _check_crc(where, listed, crc)


def _read_back(target: Store, name: str, listed: FileDigest, buffer: bytearray, pace: Pace) -> None:
    with target.copied(name, listed.name) as reader:
        _check_digest(f"{target.path(name)}/{listed.name}", listed, reader, buffer, pace)


def _check_digest(where: str, listed: FileDigest, reader: Reader, buffer: bytearray, pace: Pace) -> None:
    crc = size = 0
    for chunk in chunks(reader, buffer):
        crc = crc32c.crc32c(chunk, crc)
        size += len(chunk)
        pace.beat(len(chunk))
    _check_size(where, listed, size)
    _check_crc(where, listed, crc)


def _check_size(where: str, listed: FileDigest, size: int | None) -> None:
    if size is None:
        raise Damaged(f"{where} is missing")
    if size < 0:
        raise Damaged(f"{where} is no regular file")
    if size != listed.size:
        raise Damaged(f"{where} has {size} bytes, {listed.size} were committed")


def _check_crc(where: str, listed: FileDigest, crc: int) -> None:
    if f"{crc:08x}" != listed.crc32c:
        raise Damaged(f"{where} has CRC-32C {crc:08x}, {listed.crc32c} was committed: its bytes have changed")


@contextlib.contextmanager
def _missing_is_damage() -> Iterator[None]:
    try:
        yield
    except NoSuchFile as error:
        raise Damaged(str(error)) from error
