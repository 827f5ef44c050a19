"""How does a thread work beside training without being felt?

On Linux niceness belongs to a thread: one at 19 takes the time that training leaves over, and little of what it wants. And
one intra-op thread: a second team of OpenMP threads would spin on the cores that training's own team needs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NICENESS: Final = 19


def start(work: Callable[[], None], *, name: str) -> threading.Thread:
    """Run `work` in a daemon thread that gives way. Returns when the thread is set up.

    Call it from the thread that trains: torch's number of threads is each thread's own, but what the last one to set it
    asked for is what threads begin with that start later, so it is set again here.
    """
    ready = threading.Event()
    threads = torch.get_num_threads()

    def run() -> None:
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
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
