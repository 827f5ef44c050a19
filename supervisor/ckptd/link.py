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

    daemon -> agent   heard {mono}                        the answer to each `live` of an agent that may be fenced

Times travel as ages (`age_s`: how long ago, by the sender's monotonic clock), so clocks need not agree.
Over the UNIX socket in the run directory the file system's permissions say who may dial. Over TCP both ends prove that
they know the run's secret before anything else is said (see `auth`), and only agents may dial.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from ckptd import auth
from ckptd.errors import DaemonUnreachable
from ckptd.wire import MAX_LINE, PROTOCOL, Channel, LinkError, Message, decode, encode

__all__ = ["MAX_LINE", "PROTOCOL", "AgentLink", "Channel", "LinkError", "Message", "ask_daemon", "decode", "encode"]

REDIAL_S = 0.2
MAX_REDIAL_S = 5.0
DIAL_TIMEOUT_S = 5.0
"""A host that does not answer, or takes the call and says nothing, is given so long: by then the daemon may have moved."""
PROOF_PATIENCE_S = 5.0
"""What a stranger has in all to prove that it knows the secret."""
MAX_STRANGERS = 64
"""Connections without a proof, besides one for each node; a new one pushes the oldest out."""
BACKLOG = 4096
"""Connections that the kernel takes before we do: all nodes of a large cluster at once."""
COMPLAIN_EVERY_S = 60.0

Address = str | tuple[str, int]
"""Path of a UNIX socket, or host and port."""
Serve = Callable[[Channel], Awaitable[None]]

log = logging.getLogger(__name__)


async def listen(path: str, serve: Serve) -> asyncio.Server:
    """Listen on a UNIX socket, replacing a stale one at the same path (the caller holds the run's lock)."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(Channel(reader, writer), serve)

    return await asyncio.start_unix_server(accept, path)


async def listen_tcp(sock: socket.socket, secret: bytes, serve: Serve, *, expected: int = 0) -> asyncio.Server:
    """Listen for agents of other machines on a bound socket; `serve` meets only those that proved the secret.

    `expected`: so many may dial at the same moment, as after a restart of the daemon.
    """
    door = _Door(secret, most=MAX_STRANGERS + expected)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        channel.remote = True
        await _serve(channel, serve, door)

    return await asyncio.start_server(accept, sock=sock, backlog=BACKLOG)


async def _serve(channel: Channel, serve: Serve, door: _Door | None = None) -> None:
    try:
        if door is None or await door.admit(channel):
            await serve(channel)
    except LinkError as error:
        if door is not None:
            door.complain(channel, str(error))
        else:
            log.warning("a connection was closed: %s", error)
    except Exception:
        log.exception("serving a connection failed")
    except asyncio.CancelledError:
        pass  # the daemon ends; asyncio would print a traceback for each connection that is still there
    finally:
        await channel.close()


class _Door:
    """Strangers that dialled and have not proved themselves yet: a bounded number, for a bounded time."""

    def __init__(self, secret: bytes, *, most: int) -> None:
        self._secret = secret
        self._most = most
        self._strangers: dict[Channel, None] = {}
        self._complaints = 0
        self._next_complaint = 0.0

    async def admit(self, channel: Channel) -> bool:
        """Whether the other end proved that it knows the secret. Raises LinkError where that is worth a word."""
        while len(self._strangers) >= self._most:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
        self._strangers[channel] = None
        try:
            async with asyncio.timeout(PROOF_PATIENCE_S):
                await auth.demand_proof(channel, self._secret)
        except TimeoutError:
            raise LinkError(f"did not prove itself within {PROOF_PATIENCE_S:g} s") from None
        finally:
            self._strangers.pop(channel, None)
        channel.limit = MAX_LINE
        return True

    def complain(self, channel: Channel, why: str) -> None:
        """Say why a connection was closed, at most once a minute: whoever knocks must not fill the log."""
        self._complaints += 1
        now = time.monotonic()
        if now < self._next_complaint:
            return
        self._next_complaint = now + COMPLAIN_EVERY_S
        others = f" ({self._complaints} in the last minute)" if self._complaints > 1 else ""
        self._complaints = 0
        log.warning("a connection from %s was closed: it %s%s", channel.peer(), why, others)


class AgentLink:
    """The agent's end: dials, redials, and keeps every event until the daemon's ledger has it."""

    def __init__(
        self, where: Address | Callable[[], Address], *, hello: Callable[[], Message],
        on_order: Callable[[Message], Awaitable[None]], secret: bytes | None = None,
    ) -> None:  # fmt: skip
        self._where = where
        self._hello = hello
        self._on_order = on_order
        self._secret = secret
        self._spool: deque[tuple[int, float, Message]] = deque()
        self._seq = 0
        self._channel: Channel | None = None
        self.last_contact = time.monotonic()
        self.heard_at = time.monotonic()
        """The newest moment, by this clock, of which it is known that the daemon heard from here after it."""
        self.epoch = 0
        """How often the run was taken over, as far as is known here: a daemon of an earlier epoch is not obeyed."""
        self.address = ""
        """This end's address in the connection to the daemon, empty over a UNIX socket."""

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

    def hang_up(self) -> None:
        """End the connection there is, to dial where the daemon is said to be now."""
        if self._channel is not None:
            self._channel.abort()

    async def run(self) -> None:
        """Dial for ever. Returns only when cancelled."""
        delay = REDIAL_S
        while True:
            try:
                channel = await self._dial()
            except (OSError, TimeoutError):
                await asyncio.sleep(_spread(delay))
                delay = min(MAX_REDIAL_S, delay * 1.5)
                continue
            try:
                if await self._greet(channel):
                    delay = REDIAL_S
                    await self._serve(channel)
            except LinkError as error:
                log.warning("what answered cannot be understood: %s", error)
            except TimeoutError:
                log.warning("the daemon took the call and said nothing")
            finally:
                if self._channel is not None:
                    # A daemon that had nothing to say for hours was there all the same.
                    self.last_contact = time.monotonic()
                self._channel = None
                await channel.close()
            await asyncio.sleep(_spread(delay))
            delay = min(MAX_REDIAL_S, delay * 1.5)

    async def _dial(self) -> Channel:
        where = self._where() if callable(self._where) else self._where
        if isinstance(where, str):
            reader, writer = await asyncio.open_unix_connection(where)
        else:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*where)
        return Channel(reader, writer)

    async def _greet(self, channel: Channel) -> bool:
        begun = time.monotonic()
        address = channel.local_address()
        hello = {"type": "hello", "protocol": PROTOCOL, "address": address, **self._hello()}
        if self._secret is None:
            channel.send(hello)
            answer = await channel.receive()
        else:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await auth.give_proof(channel, self._secret, hello)
                answer = await channel.receive()
        if answer is None:
            if self._secret is not None:
                log.error("the daemon closed the connection: it has another secret, or is not this run's")
            return False
        if answer["type"] != "welcome":
            log.error("refused by the daemon: %s", answer.get("why"))
            return False
        epoch = int(answer.get("epoch", 0))
        if epoch < self.epoch:
            log.error("the run was taken over from the daemon that answers (epoch %d, not %d)", epoch, self.epoch)
            return False
        self.epoch, self.address, self.heard_at = epoch, address, begun
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
            elif message["type"] == "heard":
                self.heard_at = max(self.heard_at, float(message["mono"]))
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


def _spread(delay: float) -> float:
    """A pause of about this length: nodes that lost the daemon at the same moment do not all dial at the same moment."""
    return delay * random.uniform(0.75, 1.25)


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
