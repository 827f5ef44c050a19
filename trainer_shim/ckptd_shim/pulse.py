"""How does a rank show that it is alive, and tell what it has done?

Two channels, neither of which may slow a step down or end one. The heartbeat page holds the present only: a page of
memory that a reader maps or reads whenever it likes. The report file holds what must not be missed, a line an event.
Standard library only: the daemon's side imports this module too.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ckptd_shim import contract

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEQ: Final = struct.Struct("<Q")
_SEQ_AT: Final = slice(8, 16)
_BODY: Final = struct.Struct("<IIQQQdd")
_BODY_AT: Final = slice(16, contract.PULSE_STRUCT.size)
_TORN_READS: Final = 100

assert _BODY_AT.start + _BODY.size == contract.PULSE_STRUCT.size


class PulseWriter:
    """The writing end of a heartbeat page; with a path of None, of none at all.

    A page that this process has already begun is taken over as it stands: the launcher opens it, the shim goes on.
    Methods may be called from any thread, not from a signal handler.

    Raises:
        OSError: the page cannot be made: a full disk says so here and not by a SIGBUS in the middle of a step.
    """

    def __init__(self, path: str | None) -> None:
        self._lock = threading.Lock()
        self._page: mmap.mmap | None = None
        self._phase = contract.Phase.IMPORT
        self._step = self._samples = self._seq = 0
        self._loss = self._step_s = math.nan
        self._pid = os.getpid()
        if path is None:
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, contract.PULSE_SIZE)
            self._page = mmap.mmap(fd, contract.PULSE_SIZE)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
        finally:
            os.close(fd)
        self._take_over(self._page)
        self._update()

    def _take_over(self, page: mmap.mmap) -> None:
        last = contract.read_pulse(page[: contract.PULSE_STRUCT.size])
        # A writer that was killed inside an update left an odd number: ours begin at the even one above it.
        self._seq = (_SEQ.unpack(page[_SEQ_AT])[0] + 1) // 2 * 2
        if last is not None and last.pid == self._pid:
            self._phase, self._step, self._samples = last.phase, last.step, last.samples
            self._loss = math.nan if last.loss is None else last.loss
            self._step_s = math.nan if last.step_s is None else last.step_s

    def beat(self, step: int, samples: int, loss: float | None = None, step_s: float | None = None) -> None:
        """Say that `step` optimizer steps and `samples` global samples are done; costs a few microseconds.

        `loss` is the last known one and `step_s` the seconds of the last step; None: not known.
        """
        if self._page is None:
            return
        with self._lock:
            self._step, self._samples = step, samples
            self._loss = math.nan if loss is None else loss
            self._step_s = math.nan if step_s is None else step_s
            self._update()

    def phase(self, p: contract.Phase) -> None:
        """Say what this rank does from now on; a beat, too, that repeats the counters of the last one."""
        if self._page is None:
            return
        with self._lock:
            self._phase = p
            self._update()

    def _update(self) -> None:
        page = self._page
        if page is None:
            return
        # Slices of bytes, not pack_into: that one zeroes its target first, and a zero is an even number.
        page[_SEQ_AT] = _SEQ.pack(self._seq + 1)
        page[_BODY_AT] = _BODY.pack(
            self._pid,
            self._phase,
            self._step,
            self._samples,
            time.monotonic_ns(),
            self._loss,
            self._step_s,
        )
        page[: _SEQ_AT.start] = contract.PULSE_MAGIC
        self._seq += 2
        page[_SEQ_AT] = _SEQ.pack(self._seq)

    def close(self) -> None:
        """Let go of the page; its last reading stays in the file. Later calls do nothing."""
        with self._lock:
            page, self._page = self._page, None
            if page is not None:
                page.close()


def read_pulse_file(path: str | os.PathLike[str]) -> contract.Pulse | None:
    """The present reading of a heartbeat page; None while there is none, or when its writer died inside an update."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(_TORN_READS):
            before = os.pread(fd, _SEQ.size, _SEQ_AT.start)
            page = os.pread(fd, contract.PULSE_STRUCT.size, 0)
            after = os.pread(fd, _SEQ.size, _SEQ_AT.start)
            if len(page) < contract.PULSE_STRUCT.size:
                return None
            if before == page[_SEQ_AT] == after and _SEQ.unpack(after)[0] % 2 == 0:
                return contract.read_pulse(page)
            os.sched_yield()
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


class ReportWriter:
    """Appends lines to a report file; with a path of None, to none. It never raises into training."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._fd: int | None = None
        self._warned = False
        self._unfinished = False
        self._lock = threading.Lock()
        with self._lock, self._no_error_gets_out():
            self._open()

    def write(self, kind: contract.Report, **fields: Any) -> None:
        """Append one event with the time of now; a number that JSON cannot hold (NaN, infinity) becomes null."""
        if self._path is None:
            return
        line = {"kind": str(kind), "mono": time.monotonic(), **fields}
        with self._lock, self._no_error_gets_out():
            text = json.dumps(_finite(line), separators=(",", ":"), allow_nan=False, default=str)
            # A full disk can take half of a line: the next one starts on a line of its own.
            data = (b"\n" if self._unfinished else b"") + text.encode() + b"\n"
            fd = self._open()
            if fd is not None:
                written = os.write(fd, data)
                self._unfinished = (written < len(data)) and (written > 0 or self._unfinished)
                if written < len(data):
                    raise OSError(f"only {written} of {len(data)} bytes were written")

    def _open(self) -> int | None:
        if self._fd is None and self._path is not None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._fd

    @contextlib.contextmanager
    def _no_error_gets_out(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if not self._warned:
                self._warned = True
                with contextlib.suppress(Exception):
                    print(
                        f"ckptd: cannot write the report file {self._path}: {error}; training goes on unreported",
                        file=sys.stderr,
                        flush=True,
                    )

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        with self._lock:
            fd, self._fd, self._path = self._fd, None, None
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
