"""What can be asked of a place that holds checkpoints, whatever kind of place it is?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

CHUNK: Final = 4 << 20
"""Bytes that are held at a time while a file passes through: digesting releases the GIL far below this size."""
DOOMED_PREFIX: Final = ".doomed-"
"""Marks what is being deleted: under its own name it is gone already."""
COPY_PREFIX: Final = ".copy-"
"""Marks a copy that is not whole yet, where a place can rename."""


class StoreError(OSError):
    """A store did not do what it was asked. The text says what, to which file, and why; `errno` is set where known."""

    def __init__(self, text: str, errno: int | None = None) -> None:
        super().__init__(text)
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])


class NoSuchFile(StoreError, FileNotFoundError):
    """The file or the checkpoint is not there, and the store itself answers."""


class Damaged(StoreError):
    """A committed checkpoint is not what was committed."""


def explained(error: OSError, path: str) -> StoreError:
    """An OSError as one whose text names the file; `path` where the error itself does not."""
    kind = NoSuchFile if isinstance(error, FileNotFoundError) else StoreError
    return kind(f"{error.filename or path}: {error.strerror or error}", error.errno)


@contextlib.contextmanager
def telling(path: str) -> Iterator[None]:
    """Turn an OSError into one whose text names the file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise explained(error, path) from error


class Reader(Protocol):
    """A file that is read from front to back."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill `buffer` as far as there is something; the number of bytes, 0 at the end."""


class Writer(Protocol):
    """A file that is written from front to back."""

    def write(self, data: memoryview, /) -> int | None:
        """Append bytes."""


class Store(Protocol):
    """The checkpoints of one run on one tier. A checkpoint is named by its directory, `step_000001234.a0003`.

    Every method may block and raises StoreError; NoSuchFile where that is what is wrong.
    """

    location: str
    """An absolute path, or a URL without credentials."""
    renames: bool
    """Whether a copy can be made under another name and then appear at once."""

    def names(self) -> list[str]:
        """Names of everything that looks like a checkpoint, committed or not; nothing there yet: none."""

    def path(self, name: str) -> str:
        """What a person calls the checkpoint: its directory or its URL."""

    def created(self, name: str) -> float:
        """When a checkpoint without a marker was last touched, seconds of the store's own clock; 0: unknown."""

    def marker(self, name: str) -> bytes:
        """The bytes of its COMMITTED. Raises NoSuchFile where it is not committed."""

    def sizes(self, name: str) -> dict[str, int]:
        """Size in bytes of every file in it."""

    def reading(self, name: str, file: str) -> AbstractContextManager[Reader]:
        """One of its files, for reading."""

    def free_bytes(self) -> int | None:
        """What can still be written; None: no limit is known."""

    def owner(self, name: str) -> str | None:
        """Id of the run that began a checkpoint which is not committed; None: it does not say."""

    def bury(self, name: str) -> None:
        """Make a checkpoint look deleted, at once; what is in it may still be there. `delete` goes on from that."""

    def delete(self, name: str) -> None:
        """Delete a checkpoint, in such an order that one which is half deleted does not look committed."""

    def clear(self) -> None:
        """Finish deletions that were cut short."""

    # A copy into the store: begin, writing and keep for each file, commit.

    def begin(self, name: str, run_id: str) -> dict[str, int]:
        """Make ready for a copy of checkpoint `name` of a run, and drop half-done copies of others.

        Returns what an earlier try has left of it: size by file name.
        """

    def writing(self, name: str, file: str) -> AbstractContextManager[Writer]:
        """A file of the copy, for writing; after the block it is durable. What an exception leaves is not whole."""

    def copied(self, name: str, file: str) -> AbstractContextManager[Reader]:
        """A file of the copy, for reading back what the store really holds."""

    def copied_sizes(self, name: str) -> dict[str, int]:
        """Size in bytes of every file of the copy."""

    def drop(self, name: str, files: list[str]) -> None:
        """Remove files of the copy that do not belong into it."""

    def commit(self, name: str, marker: bytes) -> None:
        """Make the copy the checkpoint `name`: its marker is the last thing that appears.

        Whatever had this name before and was no commit to be kept is replaced.
        """

    def abandon(self, name: str) -> None:
        """Remove a half-done copy, to give its room back."""


def chunks(reader: Reader, buffer: bytearray) -> Iterator[memoryview]:
    """What a reader gives, in pieces that are valid until the next one."""
    view = memoryview(buffer)
    while count := reader.readinto(view):
        yield view[:count]
