"""Checkpoints in directories: memory (tmpfs), a local disk, a shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Final

from ckptd.tiers.base import (
    COPY_PREFIX,
    DOOMED_PREFIX,
    Damaged,
    NoSuchFile,
    Reader,
    StoreError,
    Writer,
    explained,
    telling,
)
from ckptd_shim import contract

_MARKER_LIMIT: Final = 64 << 20
"""No marker is near this size; something else under its name is not read into memory."""


class PosixStore:
    """A directory `<tier path>/<run name>`."""

    renames = True

    def __init__(self, location: str) -> None:
        self.location = location

    def names(self) -> list[str]:
        try:
            found = os.listdir(self.location)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explained(error, self.location) from error
        return [name for name in found if contract.parse_checkpoint_dirname(name)]

    def path(self, name: str) -> str:
        return os.path.join(self.location, name)

    def created(self, name: str) -> float:
        with telling(self.path(name)):
            return os.stat(self.path(name)).st_mtime

    def marker(self, name: str) -> bytes:
        path = os.path.join(self.path(name), contract.COMMITTED)
        try:
            with telling(path), open(path, "rb", opener=_opened) as file:
                return file.read(_MARKER_LIMIT)
        except StoreError as error:
            if error.errno == errno.ENOTDIR and os.path.isdir(self.location):
                raise Damaged(f"{self.path(name)} is no directory", error.errno) from error
            raise

    def sizes(self, name: str) -> dict[str, int]:
        return _sizes(self.path(name))

    @contextlib.contextmanager
    def reading(self, name: str, file: str) -> Iterator[Reader]:
        with self._open(os.path.join(self.path(name), file)) as opened:
            yield opened

    def free_bytes(self) -> int | None:
        place = self.location
        while not os.path.isdir(place) and place != os.path.dirname(place):
            place = os.path.dirname(place)
        with telling(place):
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize

    def owner(self, name: str) -> str | None:
        return _owner(self.path(name))

    def bury(self, name: str) -> None:
        grave = self._grave(name)
        with telling(self.path(name)):
            if os.path.lexists(grave):
                _remove(grave)
            os.rename(self.path(name), grave)

    def delete(self, name: str) -> None:
        with contextlib.suppress(NoSuchFile):  # buried already
            self.bury(name)
        _remove(self._grave(name))

    def _grave(self, name: str) -> str:
        return os.path.join(self.location, DOOMED_PREFIX + name)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self.location):
                if name.startswith(DOOMED_PREFIX):
                    _remove(os.path.join(self.location, name))

    # --- a copy ---

    def _copy(self, name: str) -> str:
        return os.path.join(self.location, COPY_PREFIX + name)

    def begin(self, name: str, run_id: str) -> dict[str, int]:
        copy = self._copy(name)
        with telling(copy):
            os.makedirs(self.location, exist_ok=True)
            for other in os.listdir(self.location):
                if other.startswith(COPY_PREFIX) and other != os.path.basename(copy):
                    _remove(os.path.join(self.location, other))
            os.makedirs(copy, exist_ok=True)
            if _owner(copy) != run_id:
                contract.write_atomically(os.path.join(copy, contract.OWNER), run_id.encode())
        return _sizes(copy)

    @contextlib.contextmanager
    def writing(self, name: str, file: str) -> Iterator[Writer]:
        path = os.path.join(self._copy(name), file)
        with telling(path):
            # Never into a file that is there: a thread that was left behind may still have it open.
            contract.unlink_quietly(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            yield _Writing(fd, path)
            with telling(path):
                os.fsync(fd)
            # What is read back to be verified should come from where it was written to, not from memory.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def copied(self, name: str, file: str) -> Iterator[Reader]:
        with self._open(os.path.join(self._copy(name), file)) as opened:
            yield opened

    def copied_sizes(self, name: str) -> dict[str, int]:
        return _sizes(self._copy(name))

    def drop(self, name: str, files: list[str]) -> None:
        for file in files:
            path = os.path.join(self._copy(name), file)
            with telling(path):
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def commit(self, name: str, marker: bytes) -> None:
        copy = self._copy(name)
        with telling(copy):
            contract.write_atomically(os.path.join(copy, contract.COMMITTED), marker, durable=True)
            if os.path.lexists(self.path(name)):
                self.delete(name)
            os.rename(copy, self.path(name))
            contract.fsync_directory(self.location)

    def abandon(self, name: str) -> None:
        _remove(self._copy(name))

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[Reader]:
        with telling(path):
            fd = _opened(path)
        try:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield _Reading(fd, path)
        finally:
            os.close(fd)


class _Reading:
    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    def readinto(self, buffer: memoryview, /) -> int:
        with telling(self._path):
            return os.readv(self._fd, [buffer])


class _Writing:
    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    def write(self, data: memoryview, /) -> int:
        done = 0
        with telling(self._path):
            while done < len(data):  # a raw write may take a part only
                done += os.write(self._fd, data[done:])
        return done


def _opened(path: str, _flags: int = 0) -> int:
    """A descriptor to read a regular file with. Raises Damaged where something else has its name."""
    # O_NONBLOCK: something else under this name, a pipe say, must not hold us up.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Damaged(f"{path} is no regular file")
    return fd


def _remove(path: str) -> None:
    """A directory with all that is in it, or whatever else has the name; as far as it can be done."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        contract.unlink_quietly(path)


def _owner(directory: str) -> str | None:
    try:
        with open(os.path.join(directory, contract.OWNER), encoding="utf-8", opener=_opened) as file:
            return file.read(200).strip() or None
    except (OSError, ValueError):
        return None


def _sizes(directory: str) -> dict[str, int]:
    with telling(directory), os.scandir(directory) as entries:
        return {e.name: (e.stat(follow_symlinks=False).st_size if e.is_file(follow_symlinks=False) else -1) for e in entries}  # fmt: skip
