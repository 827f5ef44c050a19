"""What if the ledger cannot be written? Training goes on; what happens meanwhile is kept in memory and written later.

What an agent told is acknowledged only once it is in the ledger: the agent keeps it until then, so that a daemon which
is killed in front of a full disk loses nothing but its own notes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckptd.core import events
from ckptd.errors import LedgerDamaged, LedgerError, LedgerFull
from ckptd.ledger import Ledger

Level = Literal["info", "warning", "error"]

log = logging.getLogger(__name__)

RETRY_S = 1.0
RETRY_LOCKED_S = 30.0
"""A ledger that another program holds locked is waited for inside SQLite, which holds the daemon up: ask seldom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Which agent told an event, under which of its numbers."""

    node: str
    agent_id: str
    seq: int


class Journal:
    """The ledger as the daemon writes to it: an append never fails, but may be late.

    Args:
        ledger: where to.
        acknowledge: told of each agent's event that is durable now.
        tell: a person should know this; may append an event about it.
    """

    def __init__(
        self, ledger: Ledger, *, acknowledge: Callable[[Origin], None], tell: Callable[[Level, str], None]
    ) -> None:
        self._ledger = ledger
        self._acknowledge = acknowledge
        self._tell = tell
        self._waiting: deque[tuple[events.Event, Origin | None]] = deque()
        self._not_before = 0.0
        self._late = False

    @property
    def waiting(self) -> int:
        """Events that are in memory only."""
        return len(self._waiting)

    def acknowledged(self, node: str, agent_id: str) -> int:
        """The highest number among this agent's events that are durable; 0 where that cannot be read."""
        try:
            return self._ledger.acknowledged(node, agent_id)
        except LedgerError:
            return 0

    def append(self, event: events.Event) -> None:
        """Add an event of the daemon's own."""
        self._waiting.append((event, None))
        self._write()

    def append_from_agent(self, event: events.Event, origin: Origin) -> bool:
        """Add what an agent told: False when it was told before."""
        if any(origin == other for _, other in self._waiting):
            return False
        if origin.seq <= self.acknowledged(origin.node, origin.agent_id):
            self._acknowledge(origin)
            return False
        self._waiting.append((event, origin))
        self._write()
        return True

    def retry(self) -> None:
        """Try again to write what is waiting, when it is time to."""
        if self._waiting and time.monotonic() >= self._not_before:
            self._write()

    def close(self) -> None:
        """A last try."""
        if self._waiting:
            self._not_before = 0.0
            self._write()
        if self._waiting:
            log.error("%d events could not be written to the ledger and are lost", len(self._waiting))

    def _renew(self, error: LedgerDamaged) -> None:
        try:
            aside = self._ledger.renew()
        except LedgerError as worse:
            if not self._late:
                self._late = True
                self._tell("error", f"{worse}; training goes on, what happens is kept in memory and written later")
            return
        self._not_before = 0.0
        self._tell(
            "error", f"the ledger was damaged ({error.what}): it is now {aside}, a new one has what could be read"
        )

    def _write(self) -> None:
        if time.monotonic() < self._not_before:
            return
        written = 0
        try:
            while self._waiting:
                event, origin = self._waiting[0]
                if origin is None:
                    self._ledger.append(event)
                else:
                    self._ledger.append_from_agent(event, origin.node, origin.agent_id, origin.seq)
                self._waiting.popleft()
                written += 1
                if origin is not None:
                    self._acknowledge(origin)
        except LedgerDamaged as error:
            self._not_before = time.monotonic() + RETRY_LOCKED_S  # should it happen again at once
            self._renew(error)
            return
        except LedgerError as error:
            self._not_before = time.monotonic() + (RETRY_S if isinstance(error, LedgerFull) else RETRY_LOCKED_S)
            if not self._late:
                self._late = True
                self._tell("error", f"{error}; training goes on, what happens is kept in memory and written later")
            return
        if self._late:
            self._late = False
            self._tell("info", f"the ledger is written again; {written} events were late")
