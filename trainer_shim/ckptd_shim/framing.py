"""How do the bytes of tensors get into a file in torch's format with little of Python's time, and none of it in a row?

torch's distributed checkpoint keeps each tensor as an archive of its own, as `torch.save` writes it. What surrounds the
tensor's bytes in it depends on dtype and shape alone, so it is made once and kept; after that a save is large writes and
large digests, which let other threads run. The CRC-32 that a zip archive has for each member is one of other bytes then;
torch never looks at it, and what guards the file is the CRC-32C of the whole of it in `COMMITTED`.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
from typing import TYPE_CHECKING, Any, Final

import crc32c as _crc32c
import torch

from ckptd_shim.background import at_once
from ckptd_shim.extras import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK: Final = 4 << 20
"""Bytes that are digested, then written, so that the second finds them in the cache."""
_JOINED: Final = 64 << 10
"""Tensors below this size are framed by their contents and written together."""
_TRIES: Final = 4

Frame = tuple[bytes, bytes]
"""What stands before a tensor's bytes in its archive, and what after."""


class DigestedFile:
    """A new file, written from beginning to end, with the CRC-32C of all that was written. Raises OSError.

    Args:
        path: the file, which must not be there yet.
        gently: who does the heavy pieces.
    """

    def __init__(self, path: str, gently: Callable[[Callable[[], None]], None] = at_once) -> None:
        self._gently = gently
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._small: list[bytes] = []
        self._small_size = 0
        self._crc = 0
        self.size = 0

    @property
    def crc32c(self) -> str:
        """Of what was written and flushed, eight hex digits."""
        return f"{self._crc:08x}"

    def put(self, data: bytes | memoryview) -> None:
        """Append."""
        size = len(data)
        self.size += size
        if size < _JOINED:
            self._small.append(bytes(data))
            self._small_size += size
            if self._small_size >= _CHUNK:
                self.flush()
            return
        self.flush()
        self._append(memoryview(data))

    def flush(self) -> None:
        """Hand to the system what `put` still holds."""
        if self._small:
            joined = b"".join(self._small)
            self._small, self._small_size = [], 0
            self._append(memoryview(joined))

    def _append(self, view: memoryview) -> None:
        for at in range(0, len(view), _CHUNK):
            self._gently(functools.partial(self._append_chunk, view[at : at + _CHUNK]))

    def _append_chunk(self, chunk: memoryview) -> None:
        self._crc = _crc32c.crc32c(chunk, self._crc)
        while chunk:
            chunk = chunk[os.write(self._fd, chunk) :]

    def close(self, *, durable: bool = False) -> None:
        """Close, with everything on disk first if `durable`."""
        try:
            self.flush()
            if durable:
                os.fsync(self._fd)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close without writing anything more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Framer:
    """Puts tensors into files as `torch.save` would; remembers what it found out about shapes."""

    def __init__(self) -> None:
        self._frames: dict[tuple[torch.dtype, torch.Size], Frame | None] = {}

    def put(self, file: DigestedFile, tensor: torch.Tensor) -> int:
        """Append a contiguous tensor on the CPU that owns its storage. Returns the length of its archive in bytes."""
        before = file.size
        frame = self._frame(tensor)
        if frame is None:
            torch.save(tensor, _Stream(file))  # type: ignore[arg-type]
        else:
            file.put(frame[0])
            file.put(bytes_of(tensor.reshape(-1)))
            file.put(frame[1])
        return file.size - before

    def learn(self, tensor: torch.Tensor) -> None:
        """Make the frame of a tensor before it is needed; its values do not matter."""
        self._frame(tensor)

    def _frame(self, tensor: torch.Tensor) -> Frame | None:
        key = tensor.dtype, tensor.shape
        if key not in self._frames:
            simple = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_cpu
            self._frames[key] = _find_frame(tensor) if simple else None
        return self._frames[key]


class _Stream:
    """A DigestedFile for `torch.save`."""

    def __init__(self, file: DigestedFile) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.put(view)
        return view.nbytes

    def flush(self) -> None:
        pass


def _find_frame(tensor: torch.Tensor) -> Frame | None:
    """None: it cannot be told which bytes of the archive are the tensor's."""
    if tensor.nbytes >= _JOINED:
        pieces = _Pieces(tensor.nbytes)
        torch.save(tensor, pieces)  # type: ignore[arg-type]
        return pieces.frame()
    if not tensor.nbytes:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getvalue(), b""
    for _ in range(_TRIES):
        stand_in = torch.empty_like(tensor)
        content = os.urandom(tensor.nbytes)
        ctypes.memmove(stand_in.data_ptr(), content, len(content))
        stream = io.BytesIO()
        torch.save(stand_in, stream)
        archive = stream.getvalue()
        if archive.count(content) == 1:
            before, _, after = archive.partition(content)
            return before, after
    return None


class _Pieces:
    """Takes an archive apart as it is written: the one write that is as large as the tensor is the tensor."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[bytes] = [b""]

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes == self._size:
            self._parts.append(b"")
        else:
            self._parts[-1] += bytes(view)
        return view.nbytes

    def flush(self) -> None:
        pass

    def frame(self) -> Frame | None:
        return (self._parts[0], self._parts[1]) if len(self._parts) == 2 else None
