"""The JSON-lines protocol between the daemon, its node agents and the command line, both ends of it.

A connection begins with one line that says who dials: an agent's `hello`, or a `request` of the command line.

    agent -> daemon   hello {node, agent_id, pid, devices, running, ...}
                      event {seq, kind, attempt, rank, age_s, data}     kept until acknowledged, sent again after a redial
                      live  {mono, ranks, ...}                          where training is; never kept
                      answer {token, ok, ...}                           to a `consult`; never kept
    daemon -> agent   welcome {settings, acknowledged} | refused {why}
                      ack {seq}                                         the ledger has every event up to `seq`
                      launch | stop | control | ask | prune | unpin | exit   orders
                      consult {token, what, ...}                        what a command line wants to know or have done
    command line      request {what, ...}  ->  one line of answer

Times travel as ages (`age_s`: how long ago, by the sender's monotonic clock), so clocks need not agree.
Over the UNIX socket in the run directory the file system's permissions say who may dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ckptd.errors import DaemonUnreachable

PROTOCOL = 1
MAX_LINE = 4 * 1024 * 1024
"""A longer line ends the connection: nothing that we send is near it."""
CLOSE_PATIENCE_S = 2.0
REDIAL_S = 0.2
MAX_REDIAL_S = 5.0

Message = dict[str, Any]
log = logging.getLogger(__name__)


class LinkError(Exception):
    """The other end sent what is no message of this protocol; the connection is useless."""


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """A message out of one line. Raises LinkError."""
    try:
        message = json.loads(line)
    except ValueError as error:
        raise LinkError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise LinkError("not an object with a type")
    return message


class Channel:
    """One connection that carries messages, either end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> Message | None:
        """The next message, None when the other end is gone. Raises LinkError."""
        try:
            line = await self._reader.readline()
        except ValueError:
            raise LinkError(f"a line of more than {MAX_LINE} bytes") from None
        except OSError:
            return None
        if not line.endswith(b"\n"):
            return None
        return decode(line)

    def send(self, message: Message) -> None:
        """Queue a message; a dead connection swallows it, `receive` will say so."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def flush(self) -> None:
        """Wait until the other end has taken what was sent, but not for ever."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), CLOSE_PATIENCE_S)

    async def close(self) -> None:
        """Close, after what was sent has left; an end that takes nothing more is cut off."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_PATIENCE_S)
        except (OSError, TimeoutError):
            pass
        finally:
            self._writer.transport.abort()  # does nothing to a transport that is closed


async def listen(path: str, serve: Callable[[Channel], Awaitable[None]]) -> asyncio.Server:
    """Listen on a UNIX socket, replacing a stale one at the same path (the caller holds the run's lock)."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            await serve(channel)
        except LinkError as error:
            log.warning("a connection was closed: %s", error)
        except Exception:
            log.exception("serving a connection failed")
        except asyncio.CancelledError:
            pass  # the daemon ends; asyncio would print a traceback for each connection that is still there
        finally:
            await channel.close()

    return await asyncio.start_unix_server(accept, path, limit=MAX_LINE)


class AgentLink:
    """The agent's end: dials, redials, and keeps every event until the daemon's ledger has it."""

    def __init__(
        self, path: str, *, hello: Callable[[], Message], on_order: Callable[[Message], Awaitable[None]]
    ) -> None:
        self._path = path
        self._hello = hello
        self._on_order = on_order
        self._spool: deque[tuple[int, float, Message]] = deque()
        self._seq = 0
        self._channel: Channel | None = None
        self.last_contact = time.monotonic()

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def unacknowledged(self) -> int:
        return len(self._spool)

    def event(
        self, kind: str, *, attempt: int | None = None, rank: int | None = None, mono: float | None = None, **data: Any
    ) -> None:
        """Tell the daemon that something happened (at `mono` on this host's monotonic clock, default now)."""
        self._seq += 1
        message = {"type": "event", "seq": self._seq, "kind": kind, "attempt": attempt, "rank": rank, "data": data}
        item = (self._seq, time.monotonic() if mono is None else mono, message)
        self._spool.append(item)
        if self._channel is not None:
            self._send_event(self._channel, item)

    def say(self, message: Message) -> None:
        """Send what is of use only now: an answer to somebody who waits for it."""
        if self._channel is not None:
            self._channel.send(message)

    def live(self, message: Message) -> None:
        """Tell where training is, if anybody listens."""
        if self._channel is not None:
            self._channel.send({"type": "live", "mono": time.monotonic(), **message})

    async def run(self) -> None:
        """Dial for ever. Returns only when cancelled."""
        delay = REDIAL_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE)
            except OSError:
                await asyncio.sleep(delay)
                delay = min(MAX_REDIAL_S, delay * 1.5)
                continue
            channel = Channel(reader, writer)
            try:
                if await self._greet(channel):
                    delay = REDIAL_S
                    await self._serve(channel)
            except LinkError as error:
                log.warning("daemon sent what cannot be read: %s", error)
            finally:
                if self._channel is not None:
                    # A daemon that had nothing to say for hours was there all the same.
                    self.last_contact = time.monotonic()
                self._channel = None
                await channel.close()
            await asyncio.sleep(delay)
            delay = min(MAX_REDIAL_S, delay * 1.5)

    async def _greet(self, channel: Channel) -> bool:
        channel.send({"type": "hello", "protocol": PROTOCOL, **self._hello()})
        answer = await channel.receive()
        if answer is None:
            return False
        if answer["type"] != "welcome":
            log.error("refused by the daemon: %s", answer.get("why"))
            return False
        self._acknowledge(int(answer.get("acknowledged", 0)))
        await self._on_order(answer)
        return True

    async def _serve(self, channel: Channel) -> None:
        for item in self._spool:
            self._send_event(channel, item)
        self._channel = channel
        while (message := await channel.receive()) is not None:
            self.last_contact = time.monotonic()
            if message["type"] == "ack":
                self._acknowledge(int(message["seq"]))
            else:
                await self._on_order(message)

    def _acknowledge(self, seq: int) -> None:
        self.last_contact = time.monotonic()
        while self._spool and self._spool[0][0] <= seq:
            self._spool.popleft()

    @staticmethod
    def _send_event(channel: Channel, item: tuple[int, float, Message]) -> None:
        _, mono, message = item
        channel.send({**message, "age_s": max(0.0, time.monotonic() - mono)})


def ask_daemon(path: str, request: Message, *, timeout: float = 10.0) -> Message:
    """Send one request of the command line and return the answer.

    Raises:
        DaemonUnreachable: nobody listens there, or no answer came within `timeout` seconds.
    """
    connected = False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(path)
            connected = True
            sock.sendall(encode({**request, "type": "request"}))
            with sock.makefile("rb") as file:
                line = file.readline(MAX_LINE)
        if not line:
            raise LinkError("the connection was closed without an answer")
        return decode(line)
    except (OSError, LinkError) as error:
        unreachable = DaemonUnreachable(f"no ckptd daemon answers at {path}: {error}")
        unreachable.connected = connected
        raise unreachable from None
