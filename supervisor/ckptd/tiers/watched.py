"""How is something waited for that may never return? In a thread that must show progress, and is left behind if not.

A file system that hangs holds its thread inside of the kernel, where nothing can end it. Such a thread is abandoned: the
next piece of work under the same key is refused until it has come back, so that threads do not pile up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from ckptd.tiers.base import StoreError

T = TypeVar("T")

NICE: Final = 10
"""Of threads that work beside training."""


class Stalled(StoreError):
    """The work made no progress for too long; its thread was left behind."""


class Abandoned(BaseException):
    """Raised inside of work that nobody waits for any more: no `except Exception` is to take it for an error."""


class Pace:
    """How the work shows that it moves."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.bytes = 0
        self._abandoned = False

    def beat(self, count: int = 0) -> None:
        """There was progress, of so many bytes. Raises Abandoned where nobody waits any more."""
        if self._abandoned:
            raise Abandoned
        self.bytes += count
        self.last = time.monotonic()

    def abandon(self) -> None:
        """Have the next `beat` raise."""
        self._abandoned = True


class _Work(Generic[T]):
    def __init__(self, work: Callable[[Pace], T], *, nice: bool) -> None:
        self._work = work
        self._nice = nice
        self.pace = Pace()
        self.done = threading.Event()
        self.since = time.monotonic()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._nice:
                # Linux gives each thread its own; that of its disk accesses follows.
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self.result = self._work(self.pace)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class Crew:
    """Threads for work that may hang, one for each key at a time."""

    def __init__(self) -> None:
        self._left: dict[str, _Work[Any]] = {}
        self._lock = threading.Lock()

    @property
    def stuck(self) -> list[str]:
        """Keys whose thread was left behind and has not come back."""
        with self._lock:
            return sorted(key for key, work in self._left.items() if not work.done.is_set())

    def run(
        self,
        key: str,
        work: Callable[[Pace], T],
        *,
        stall_s: float,
        nice: bool = False,
        stop: threading.Event | None = None,
    ) -> T:
        """What `work` returns or raises. It has to call `beat` at least every `stall_s` seconds. Blocks.

        Raises:
            Stalled: it did not, or an earlier one under this key has not come back yet.
            Abandoned: `stop` was set meanwhile.
        """
        with self._lock:
            left = self._left.get(key)
            if left is not None and not left.done.is_set():
                raise Stalled(f"{key}: no answer for {time.monotonic() - left.pace.last:.0f} s; it is waited for")
            task = self._left[key] = _Work(work, nice=nice)
        threading.Thread(target=task.run, name=f"tier {key}", daemon=True).start()
        while not task.done.wait(min(0.5, stall_s)):
            if stop is not None and stop.is_set():
                task.pace.abandon()
                raise Abandoned
            quiet = time.monotonic() - task.pace.last
            if quiet > stall_s:
                task.pace.abandon()
                raise Stalled(f"{key}: no progress for {quiet:.0f} s")
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[return-value]
