"""What if the ledger cannot be written? Training goes on; what happens meanwhile is kept in memory and written later.

What comes in one turn of the daemon's loop is written in one transaction: a disk that takes milliseconds to make an event
durable takes no longer for what two thousand nodes say at once.

What an agent told is acknowledged only once it is in the ledger: the agent keeps it until then, so that a daemon which
is killed in front of a full disk loses nothing but its own notes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ckptd.core import events
from ckptd.errors import LedgerDamaged, LedgerError, LedgerFull
from ckptd.ledger import Ledger

MOST_AT_ONCE = 500
"""Events in one transaction: what fits into the room that is left on a full disk is written."""

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

    @property
    def parts(self) -> tuple[str, str, int]:
        return self.node, self.agent_id, self.seq


class Journal:
    """The ledger as the daemon writes to it: an append never fails, but may be late.

    Args:
        ledger: where to.
        acknowledge: told of the newest event of an agent that is durable now, with all before it.
        tell: a person should know this; may append an event about it.
    """

    def __init__(
        self, ledger: Ledger, *, acknowledge: Callable[[Origin], None], tell: Callable[[Level, str], None]
    ) -> None:
        self._ledger = ledger
        self._acknowledge = acknowledge
        self._tell = tell
        self._waiting: deque[tuple[events.Event, Origin | None]] = deque()
        self._taken: dict[tuple[str, str], int] = {}
        """The highest number taken of each agent, (node, agent's id)."""
        self._durable: dict[tuple[str, str], int] = {}
        """The highest of those that are durable."""
        self._not_before = 0.0
        self._late = False

    @property
    def waiting(self) -> int:
        """Events that are in memory only."""
        return len(self._waiting)

    def acknowledged(self, node: str, agent_id: str) -> int:
        """The highest number among this agent's events that are durable; 0 where that cannot be read."""
        agent = (node, agent_id)
        if agent not in self._durable:
            try:
                self._durable[agent] = self._ledger.acknowledged(node, agent_id)
            except LedgerError:
                return 0
        return self._durable[agent]

    def take(self, event: events.Event, origin: Origin | None = None) -> bool:
        """Have the next `write` add an event. False: it was told by an agent that told it before.

        An agent's numbers come in their order in each connection, so whatever is below the highest was told before.
        """
        if origin is not None:
            agent = (origin.node, origin.agent_id)
            durable = self.acknowledged(*agent)
            if origin.seq <= max(durable, self._taken.get(agent, 0)):
                if origin.seq <= durable:
                    self._acknowledge(origin)
                return False
            self._taken[agent] = origin.seq
        self._waiting.append((event, origin))
        return True

    def append(self, event: events.Event) -> None:
        """Add an event of the daemon's own, and whatever waits."""
        self.take(event)
        self.write()

    def write(self) -> None:
        """Write what is waiting, unless that failed a moment ago."""
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

    def _are_durable(self, origins: Iterable[Origin]) -> None:
        """Tell each agent of its newest event that is: that speaks for those before it."""
        newest = {(origin.node, origin.agent_id): origin for origin in origins}
        for agent, origin in newest.items():
            self._durable[agent] = max(origin.seq, self._durable.get(agent, 0))
            self._acknowledge(origin)

    def _write(self) -> None:
        written = 0
        try:
            while self._waiting:
                batch = list(itertools.islice(self._waiting, MOST_AT_ONCE))
                self._ledger.append_told([(event, None if origin is None else origin.parts) for event, origin in batch])
                for _ in batch:
                    self._waiting.popleft()
                written += len(batch)
                self._are_durable(origin for _, origin in batch if origin is not None)
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
