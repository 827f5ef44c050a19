"""How is work done beside training without being felt, and fast when training waits for it?

On Linux niceness belongs to a thread, and a thread that has taken it on may not drop it again. So there are two: one as
important as any carries the work out, and has each heavy piece of it done by one that gives way, as long as nobody waits.
Both have one intra-op thread: a second team of OpenMP threads would spin on the cores that training's own team needs.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NICENESS: Final = 13
"""The share of a core that it leaves to the thread is 5 % beside one busy thread of training, and all of it beside none."""

T = TypeVar("T")


def start(work: Callable[[], None], *, name: str, niceness: int = 0) -> threading.Thread:
    """Run `work` in a daemon thread with one intra-op thread. Returns when that is set up.

    Call it from the thread that trains: torch's number of threads is each thread's own, but what the last one to set it
    asked for is what threads begin with that start later, so it is set again here.
    """
    ready = threading.Event()
    threads = torch.get_num_threads()

    def run() -> None:
        try:
            with contextlib.suppress(OSError):
                if niceness:
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            torch.get_num_threads()  # a thread's first call takes over what is usual; the next one changes it
            torch.set_num_threads(1)
        finally:
            ready.set()
        work()

    # A daemon thread: a script that dies of an exception must not wait for ranks that are dead too.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    ready.wait()
    torch.set_num_threads(threads)
    return thread


class Gently:
    """Does pieces of work, a few milliseconds each, in a thread that gives way; called from one other thread.

    `gently(piece)` returns what `piece()` returns, or raises what it raises.
    """

    def __init__(self, *, name: str) -> None:
        self._pieces: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._hurry = False
        self._thread = start(self._work, name=name, niceness=NICENESS)

    def __call__(self, piece: Callable[[], T]) -> T:
        if self._hurry:
            return piece()
        self._pieces.put(piece)
        result: T
        result, error = self._replies.get()
        if error is not None:
            raise error
        return result

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits: meanwhile pieces are done at once, by the thread that wants them done."""
        self._hurry = True
        try:
            yield
        finally:
            self._hurry = False

    def close(self) -> None:
        """End the thread."""
        self._pieces.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                reply = piece(), None
            except BaseException as error:
                self._replies.put((None, error))
            else:
                self._replies.put(reply)
            del piece


def at_once(piece: Callable[[], T]) -> T:
    """In place of a `Gently`, where nobody trains."""
    return piece()
