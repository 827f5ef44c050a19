"""How far is what takes long? A bar on standard error, where that is a terminal; else nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import click

LOOK_INTERVAL_S = 0.5


@contextlib.contextmanager
def bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yields what to call with each number of units that are done, of `length` in all."""
    if not sys.stderr.isatty() or length <= 0:
        yield lambda _done: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr, show_pos=False) as shown:
        yield shown.update


@contextlib.contextmanager
def watched(length: int, label: str, done: Callable[[], int]) -> Iterator[None]:
    """A bar that looks by itself, in a thread, how much of `length` is done by now."""
    over = threading.Event()
    with bar(length, label) as advance:

        def look() -> None:
            before = 0
            while not over.wait(LOOK_INTERVAL_S):
                now = min(length, done())
                advance(max(0, now - before))
                before = max(before, now)

        thread = threading.Thread(target=look, name="progress", daemon=True)
        if sys.stderr.isatty():
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.is_alive():
                thread.join()
