"""A file system that takes a read and never answers: who reads from it sleeps where no signal reaches."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from pathlib import Path

_IN = struct.Struct("<IIQQIIII")
"""length, opcode, unique, node, uid, gid, pid, padding: the head of a request of FUSE."""
_LOOKUP, _GETATTR, _OPEN, _READ, _INIT = 1, 3, 14, 15, 26
_MNT_DETACH = 2
_ROOT, _FILE = 1, 2


def _attributes(node: int) -> bytes:
    mode, links = (0o040755, 2) if node == _ROOT else (0o100644, 1)
    return struct.pack("<6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


class StuckMount:
    """Mounted at `directory`; reading from any file in it does not return before `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError where this may not be done: it takes root, /dev/fuse and the right to mount."""
        self.directory = directory
        self.reading = threading.Event()
        """Somebody reads, and waits."""
        self._waiting: list[int] = []
        self._closed = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other".encode()
        if self._libc.mount(b"stuck", os.fsencode(directory), b"fuse", 0, options):
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # ENODEV: unmounted
            while request := os.read(self._fd, 1 << 18):
                _, opcode, unique, node, *_ = _IN.unpack_from(request)
                if opcode != _READ:
                    answer = self._answer(opcode, node)
                    self._say(unique, 0 if answer else -errno.ENOSYS, answer)
                    continue
                self._waiting.append(unique)
                self.reading.set()
                if self._closed:
                    self._give_up()

    def _say(self, unique: int, error: int, answer: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

    def _give_up(self) -> None:
        while self._waiting:
            self._say(self._waiting.pop(), -errno.EIO)

    @staticmethod
    def _answer(opcode: int, node: int) -> bytes:
        if opcode == _INIT:
            return struct.pack("<IIIIHHII", 7, 31, 0, 0, 12, 9, 4096, 1) + bytes(32)
        if opcode == _LOOKUP:
            return struct.pack("<4Q2I", _FILE, 0, 0, 0, 0, 0) + _attributes(_FILE)
        if opcode == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attributes(node)
        if opcode == _OPEN:
            return struct.pack("<QII", 0, 0, 0)
        return b""

    def close(self) -> None:
        """Fail every read, so that who waited can die, and unmount. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._give_up()
        self._libc.umount2(os.fsencode(self.directory), _MNT_DETACH)
        self._thread.join(10)
        os.close(self._fd)
