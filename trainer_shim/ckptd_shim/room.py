"""Is there room for the next save, and what does a directory's file system have left?

The standard library only: agents and the command line ask the same question.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_BLOCK = 4096
"""What a file takes at least, and is rounded up to, on most file systems."""


@dataclass(frozen=True)
class Room:
    """What is free for this user. A quota is not seen: it shows when it is met."""

    bytes: int
    files: int | None
    """Inodes; None: the file system makes them as it needs them."""


def room_at(directory: str) -> Room:
    """What is free where `directory` is, or will be.

    Raises:
        OSError: that cannot be said.
    """
    path = os.path.abspath(directory)
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    found = os.statvfs(path)
    root = os.geteuid() == 0
    blocks, inodes = (found.f_bfree, found.f_ffree) if root else (found.f_bavail, found.f_favail)
    return Room(blocks * found.f_frsize, inodes if found.f_files else None)


def needed(size: int, files: int) -> int:
    """Bytes that a checkpoint of `size` bytes in so many files takes on disk, its directory included."""
    return size + _BLOCK * (files + 1)


def shortage(directory: str, *, size: int, files: int, what: str) -> str | None:
    """What is lacking for `size` bytes in so many files, in words that begin with what the system would say; None: nothing.

    `what`: what they are for. A file system that does not answer lacks nothing: trying tells more.
    """
    try:
        room = room_at(directory)
    except OSError:
        return None
    if room.bytes < needed(size, files):
        return f"No space left on device: {what} needs {needed(size, files)} bytes, {directory} has {room.bytes} free"
    if room.files is not None and room.files < files + 1:
        return f"No space left on device: {what} needs {files + 1} inodes, {directory} has {room.files} free"
    return None
