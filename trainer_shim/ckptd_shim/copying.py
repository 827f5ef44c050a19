"""How is a state copied while the next forward and backward run, so that only the optimizer's step has to wait?

Parameters and the optimizer's state stand still from one optimizer step to the next. A background thread copies them
piece by piece; the thread that trains copies along when it comes to the step before that is done. That they did stand
still is not taken for granted: torch counts the changes of every tensor, and the first and last bytes of each are kept
to compare with, which shows most of what `tensor.data` hides from the count.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from typing import Any, Final

import torch

_PIECE: Final = 4 << 20
"""Bytes that are copied in one go: how long the optimizer may have to wait for a piece that another thread has begun."""
_RUN: Final = 16
"""Pieces that the thread which training waits for takes at once: each copy with several threads has its own start and end."""
_PROBE: Final = 64


class Copying:
    """Copies of tensors that nobody changes before `finish`.

    Args:
        pairs: key to (target on the CPU, live tensor), of one shape and dtype; contiguous where the tensor is on the CPU.
    """

    def __init__(self, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self._versions = [source._version for _, source in pairs.values()]
        self._probes: list[tuple[bytes, bytes] | None] = [
            _probe(source) if source.is_cpu else None for _, source in pairs.values()
        ]
        self._pieces: deque[tuple[torch.Tensor, torch.Tensor, int, int]] = deque()
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._verified = False
        self._changed: str | None = None
        self._waits_since: float | None = None
        self.stalled_s = 0.0
        """Seconds that training waited in `release` for the copy; known with `result`."""
        self._events: list[tuple[torch.device, Any]] = []
        for target, source in pairs.values():
            if source.is_cpu:
                step = max(1, _PIECE // max(1, source.itemsize))
                count = source.numel()
                self._pieces.extend((target, source, at, min(at + step, count)) for at in range(0, count, step))
        self._left = len(self._pieces)
        if not self._left:
            self._copied.set()
        self._begin_on_gpus()

    def _begin_on_gpus(self) -> None:
        """A stream of its own copies, beside what the training's stream computes. Not tested: no GPU at hand."""
        devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in self._pairs.values():
            if not source.is_cpu:
                devices.setdefault(source.device, []).append((target, source))
        for device, pairs in devices.items():
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
            self._events.append((device, event))

    def work(self) -> None:
        """Copy until nothing is left to begin, and wait for what others have begun."""
        with contextlib.suppress(IndexError):
            while True:
                self._copy(*self._pieces.popleft(), count=1)
        self._copied.wait()

    def _hasten(self) -> None:
        """The same from the other end, in larger parts."""
        while True:
            try:
                target, source, begin, end = self._pieces.pop()
            except IndexError:
                break
            count, least = 1, max(0, end - _RUN * (end - begin))
            while begin > least:
                try:
                    piece = self._pieces.pop()
                except IndexError:
                    break
                if piece[1] is not source or piece[3] != begin:
                    self._pieces.append(piece)
                    break
                begin, count = piece[2], count + 1
            self._copy(target, source, begin, end, count=count)
        self._copied.wait()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, begin: int, end: int, *, count: int) -> None:
        if end - begin == source.numel():
            target.copy_(source)
        else:
            target.reshape(-1)[begin:end].copy_(source.reshape(-1)[begin:end])
        with self._lock:
            self._left -= count
            if not self._left:
                self._copied.set()

    def release(self) -> float:
        """Let the live tensors be changed from here on. Returns the seconds that this took.

        A GPU is not waited for: what is put on its current stream from here on comes after the copy.
        """
        if self._verified and not self._events:
            return 0.0
        begun = time.monotonic()
        with self._lock:
            self._waits_since = begun
        self._hasten()
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        self._verify()
        self._events.clear()
        return time.monotonic() - begun

    def result(self) -> str | None:
        """Copy to the end. Returns what has changed meanwhile, None: nothing, and the copy is the state at the save."""
        self.work()
        for _, event in list(self._events):
            event.synchronize()
        self._verify()
        return self._changed

    def _verify(self) -> None:
        with self._lock:
            if self._verified:
                return
            self._verified = True
            if self._waits_since is not None:
                self.stalled_s = time.monotonic() - self._waits_since
            pairs = zip(self._pairs.items(), self._versions, self._probes, strict=True)
            for (key, (target, source)), version, probe in pairs:
                if source._version != version or (probe is not None and _probe(target) != probe):
                    self._changed = key
                    break
            self._pairs = {}  # nothing here keeps a tensor alive that training has dropped


def _probe(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """The first and the last bytes of a contiguous tensor on the CPU."""
    size = tensor.nbytes
    if not size:
        return b"", b""
    start, count = tensor.data_ptr(), min(size, _PROBE)
    return ctypes.string_at(start, count), ctypes.string_at(start + size - count, count)
