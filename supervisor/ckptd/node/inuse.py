"""Which checkpoints is this agent reading, copying or pinning just now, so that nothing deletes them meanwhile?

A checkpoint is known by the name of its directory, so what is used on one tier is kept on all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from ckptd.core.keeping import name_of


class InUse:
    """Shared by all threads of an agent. Deleting asks under `lock`, so that using and deleting cannot cross."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held for the moment in which a directory is renamed away, or begins to be used or pinned."""
        self.pinned: set[str] = set()
        """Pinned through this agent, which the ledger may not know yet."""
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, path: str) -> Iterator[None]:
        """While inside, the checkpoint at `path` is deleted on no tier. It may have been before: look whether it is there."""
        name = name_of(path)
        with self.lock:
            self._held[name] += 1
        try:
            yield
        finally:
            with self.lock:
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]

    def held(self, path: str) -> bool:
        """Whether it is in use."""
        return name_of(path) in self._held

    def kept(self, path: str) -> bool:
        """Whether it must not be deleted now."""
        return self.held(path) or name_of(path) in self.pinned
