"""Is this checkpoint, byte for byte, the one that was committed?

CRC-32C (Castagnoli) of whole files, as eight hex digits, against the list in `COMMITTED`. Neither torch nor anything
of the training script is needed, so the agent of a node verifies with the same code as the shim.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

import crc32c as _crc32c

from ckptd_shim.contract import COMMITTED, FORMAT, ContractError, Marker, parse_checkpoint_dirname
from ckptd_shim.errors import CheckpointError

_BLOCK: Final = 4 << 20
"""Bytes in one read: far above the 32 KiB from which on the crc32c package releases the GIL."""


def crc32c_bytes(data: bytes | bytearray | memoryview) -> str:
    """CRC-32C of a buffer, eight hex digits."""
    return f"{_crc32c.crc32c(data):08x}"


def crc32c_file(path: str | os.PathLike[str], progress: Callable[[int], object] | None = None) -> tuple[int, str]:
    """(size in bytes, CRC-32C in eight hex digits) of a file. Raises OSError.

    `progress` is called with the bytes of each block that was read.
    """
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    crc = size = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = _crc32c.crc32c(view[:count], crc)
            size += count
            if progress is not None:
                progress(count)
    return size, f"{crc:08x}"


def read_marker(path: str | os.PathLike[str], expected_crc32c: str | None = None) -> Marker:
    """Read `COMMITTED` of the checkpoint directory `path`.

    Args:
        path: the checkpoint directory.
        expected_crc32c: refuse the marker unless its bytes have this CRC-32C.

    Raises:
        CheckpointError: there is no marker, it cannot be read, or it is another one than was expected.
    """
    name = os.path.join(path, COMMITTED)
    try:
        with open(name, "rb", opener=_without_waiting) as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    actual = crc32c_bytes(data)
    if expected_crc32c is not None and actual != expected_crc32c:
        raise CheckpointError(
            f"{name} has CRC-32C {actual}, {expected_crc32c} was expected: this is not the checkpoint that was chosen",
        )
    try:
        marker = Marker.from_json(data, where=name)
    except ContractError as error:
        raise CheckpointError(str(error)) from error
    if marker.format != FORMAT:
        raise CheckpointError(
            f"{name} has format {marker.format}; this version reads {FORMAT}: use the one that wrote it"
        )
    for listed in marker.files:
        if not listed.name or listed.name != os.path.basename(listed.name) or listed.name in (".", ".."):
            raise CheckpointError(f"{name} lists {listed.name!r}, which is no name of a file in its directory")
    return marker


def _without_waiting(path: str, flags: int) -> int:
    """What a pipe under this name would make us do for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def check_sizes(path: str | os.PathLike[str], marker: Marker, *, partial: bool = False) -> None:
    """Raise CheckpointError for the first file of `marker` that is missing, no file, or has another size.

    `partial`: one may be missing.
    """
    for listed in marker.files:
        name = os.path.join(path, listed.name)
        try:
            found = os.stat(name)
        except FileNotFoundError:
            if partial:
                continue
            raise CheckpointError(f"{name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        if found.st_size != listed.size:
            raise CheckpointError(f"{name} has {found.st_size} bytes, {listed.size} were committed")


def verify_checkpoint(
    path: str | os.PathLike[str],
    expected_marker_crc32c: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Marker:
    """Read every byte of a committed checkpoint and compare it with its marker, which is returned.

    `progress` is called with the bytes of each block that was read.

    Raises:
        CheckpointError: says which file is wrong, and how: missing, size, digest, or a marker that cannot be read.
    """
    marker = read_marker(path, expected_marker_crc32c)
    check_sizes(path, marker)
    for listed in marker.files:
        name = os.path.join(path, listed.name)
        try:
            _, actual = crc32c_file(name, progress)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        if actual != listed.crc32c:
            raise CheckpointError(f"{name} has CRC-32C {actual}, {listed.crc32c} was committed: its bytes have changed")
    return marker


def committed_paths(directory: str | os.PathLike[str]) -> list[str]:
    """Paths of the checkpoint directories below `directory` that hold a marker, whole or not, in no order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    paths = [os.path.join(directory, name) for name in names if parse_checkpoint_dirname(name)]
    return [path for path in paths if os.path.lexists(os.path.join(path, COMMITTED))]
