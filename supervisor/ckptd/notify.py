"""What does a service manager hear of the daemon? The datagrams of sd_notify(3): ready, alive, what it does, leaving.

Without `$NOTIFY_SOCKET` nothing is sent. The variables are taken out of the environment, as sd_notify(3) has it: an agent
or a worker that spoke in the daemon's name would keep a daemon alive that hangs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Self

LONGEST_STATUS = 200


class Notifier:
    """Speaks to the service manager, or to nobody. It never blocks and never fails: the run is worth more than the word.

    Args:
        address: of the datagram socket, a path or `@` and an abstract name; None: nobody listens.
        watchdog_s: how long the manager waits for a sign of life before it kills; None: it does not watch.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = None if address is None else f"\0{address[1:]}" if address.startswith("@") else address
        self._fed = -float("inf")
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """The notifier that the service manager asked for. Takes its variables out of `environment`."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if not address.startswith(("/", "@")):
            return cls()
        watched = microseconds.isdecimal() and int(microseconds) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if watched else None)

    @property
    def active(self) -> bool:
        """Whether somebody asked to be told."""
        return self._address is not None

    def ready(self) -> None:
        """The daemon can be asked things, and looks after its run."""
        self._send("READY=1")

    def alive(self) -> None:
        """Feed the watchdog, four times in its patience at most; for the main loop to call at each turn."""
        now = time.monotonic()
        if self.watchdog_s is not None and now - self._fed >= self.watchdog_s / 4:
            self._fed = now
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What `systemctl status` shows of the run: one line."""
        line = " ".join(text.split())[:LONGEST_STATUS]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def stopping(self) -> None:
        """The run is over, and this process about to end."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        # Nobody listens, or more waits to be read than fits: nothing that a run should end for.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(errors="replace"), self._address)
