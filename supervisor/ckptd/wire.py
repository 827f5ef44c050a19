"""How does a message travel? One JSON object a line, bounded in length, and sealed where the peer had to prove itself.

plain     {"type": ...}                        over the UNIX socket
sealed    <mac, 32 hex digits> {"type": ...}   over TCP, once both ends have proved the run's secret (see `auth`)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Protocol

PROTOCOL = 1
MAX_LINE = 4 * 1024 * 1024
"""A longer line ends the connection: nothing that we send is near it."""
CLOSE_PATIENCE_S = 2.0
_CHUNK = 64 * 1024

Message = dict[str, Any]


class LinkError(Exception):
    """The other end sent what is no message of this protocol; the connection is useless."""


class Sealing(Protocol):
    """Proves of each line that the other end of this connection sent it, once, and next."""

    def seal(self, data: bytes) -> bytes: ...

    def open(self, line: bytes) -> bytes: ...


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """A message out of one line. Raises LinkError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise LinkError("not an object with a type")
    return message


class Channel:
    """One connection that carries messages, either end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limit: int = MAX_LINE) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        self._searched = 0
        self.limit = limit
        """The longest line that is taken, bytes."""
        self.seal: Sealing | None = None
        self.remote = False
        """The other end is on another machine, as far as is known."""
        self._unread: Message | None = None

    def local_address(self) -> str:
        """This end's address, without the port; empty for a UNIX socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    def peer(self) -> str:
        """The other end's address, for people."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else "this machine"

    async def line(self) -> bytes | None:
        """The next line without its end, None when the other end is gone. Raises LinkError."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self.limit:
                raise LinkError(f"a line of more than {self.limit} bytes")
            try:
                data = await self._reader.read(_CHUNK)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
        if end > self.limit:
            raise LinkError(f"a line of more than {self.limit} bytes")
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    async def receive(self) -> Message | None:
        """The next message, None when the other end is gone. Raises LinkError."""
        if self._unread is not None:
            message, self._unread = self._unread, None
            return message
        line = await self.line()
        if line is None:
            return None
        return decode(line if self.seal is None else self.seal.open(line))

    def unread(self, message: Message) -> None:
        """Have `receive` give this message next."""
        self._unread = message

    def send(self, message: Message) -> None:
        """Queue a message; a dead connection swallows it, `receive` will say so."""
        if self._writer.is_closing():
            return
        data = encode(message)
        self._writer.write(data if self.seal is None else self.seal.seal(data[:-1]) + b"\n")

    def send_line(self, line: bytes) -> None:
        """Queue a line that is no message: the proof that comes before the first."""
        if not self._writer.is_closing():
            self._writer.write(line + b"\n")

    async def flush(self) -> None:
        """Wait until the other end has taken what was sent, but not for ever."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), CLOSE_PATIENCE_S)

    def abort(self) -> None:
        """Cut the connection, whatever is still to be sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close, after what was sent has left; an end that takes nothing more is cut off."""
        self._writer.close()
        closed = False
        try:
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_PATIENCE_S)
            closed = True
        except (OSError, TimeoutError):
            pass
        finally:
            if not closed:  # asyncio stumbles over the abort of some transports that are closed
                self._writer.transport.abort()
