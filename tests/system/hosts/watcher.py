"""Do workers of two attempts live at the same time, on whichever hosts? Looked at from outside of all of them, all the time.

A worker is known by its standard output, which goes to `attempts/<number>/` of a run directory. (Its environment says
nothing: one that was forked from a warm process shows that one's.)
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable

from ckptd.node import processes
from ckptd.node.processes import Process

LOOK_S = 0.05
_OUTPUT = re.compile(r"/attempts/(\d+)/[^/]+$")


class Watcher:
    """Watches processes that `living` names, in a thread, until it is closed."""

    def __init__(self, living: Callable[[], list[tuple[str, Process]]]) -> None:
        self.seen: dict[int, set[str]] = {}
        """attempt -> hosts on which workers of it were alive."""
        self.overlaps: list[str] = []
        self.looks = 0
        self._living = living
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def workers(self) -> dict[int, list[tuple[str, Process]]]:
        """attempt -> the workers of it that live now, and the host of each."""
        found: dict[int, list[tuple[str, Process]]] = {}
        for host, process in self._living():
            with contextlib.suppress(OSError):
                match = _OUTPUT.search(os.readlink(f"/proc/{process.pid}/fd/1"))
                if match:
                    found.setdefault(int(match[1]), []).append((host, process))
        return found

    def _watch(self) -> None:
        try:
            self._watch_on()
        except Exception as error:
            self.overlaps.append(f"nobody watches any more: {error!r}")
            raise

    def _watch_on(self) -> None:
        while not self._over.wait(LOOK_S):
            found = self.workers()
            self.looks += 1
            for attempt, workers in found.items():
                self.seen.setdefault(attempt, set()).update(host for host, _ in workers)
            newest = max(found, default=0)
            # An older one that was alive when the look began and is not any more had its turn before.
            late = [(n, host, p.pid) for n in found if n < newest for host, p in found[n] if processes.alive(p)]
            if late:
                self.overlaps.append(f"attempt {newest} lives on {found[newest]}, and so do {late}")

    def close(self) -> None:
        self._over.set()
        self._thread.join()
