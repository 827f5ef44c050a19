"""What does the page show at this moment? The overview of a run, kept up to date from its ledger in the web's threads.

The ledger is read with a connection of its own, only what is new each time, and the document is kept for `FRESH_S`:
however many look on, the daemon's loop is asked for one status document in that time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ckptd.core.overview import Overview
from ckptd.errors import LedgerError
from ckptd.ledger import Ledger

FRESH_S: Final = 2.0
_BREATH: Final = 500
"""Events between two moments at which other threads are let in: the first look at a long run folds all of it."""


class LiveOverview:
    """The overview as JSON. May be asked by several threads at once.

    Args:
        ledger_path: the run's ledger; it need not exist yet.
        status: gives the status document of this moment.
    """

    def __init__(self, ledger_path: str | os.PathLike[str], status: Callable[[], dict[str, Any]]) -> None:
        self._path = ledger_path
        self._status = status
        self._lock = threading.Lock()
        self._overview = Overview()
        self._last_id = 0
        self._body = b""
        self._built = -FRESH_S

    def body(self) -> bytes:
        """The document, at most `FRESH_S` old.

        Raises:
            LedgerError: the ledger cannot be read; nothing is lost by asking again.
        """
        with self._lock:
            if time.monotonic() - self._built >= FRESH_S:
                self._read()
                document = self._overview.document(self._status())
                document["asked_at"] = time.time()
                self._body = json.dumps(document, separators=(",", ":")).encode()
                self._built = time.monotonic()
            return self._body

    def _read(self) -> None:
        with Ledger.open(self._path, readonly=True) as ledger:
            for event_id, event in ledger.events(self._last_id):
                self._last_id = event_id
                self._overview.apply(event)
                if event_id % _BREATH == 0:
                    time.sleep(0.001)


def empty(error: LedgerError) -> bytes:
    """What is answered instead where the ledger cannot be read."""
    return json.dumps({"error": str(error)}).encode()
