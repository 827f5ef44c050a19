"""How does an agent get a file of a checkpoint from another node's agent? It asks, once both have proved the secret.

    dialling agent -> the other   proof and hello as in `auth`, then requests, one after the other
    get {tier, name, file}        -> file {size}, and the bytes in pieces, each after its code; or refused {why}
    further requests              -> what `PeerServer` was given for them

All lines and pieces are sealed. Nothing can be written through a request: an agent fetches, and puts into its own directory.
Threads and not the agent's event loop: what reads and sends megabytes beside training has a lower priority than what beats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from ckptd import auth
from ckptd.tiers import NoSuchFile, Pace, StoreError, watched
from ckptd.tiers.base import Reader
from ckptd.wire import MAX_LINE, LinkError, Message, decode, encode

log = logging.getLogger(__name__)

PIECE: Final = 1 << 20
"""Bytes between two codes, and what is held of a file at a time."""
PROOF_PATIENCE_S: Final = 5.0
SILENCE_S: Final = 120.0
"""How long the other end may say or take nothing in the middle of a request."""
IDLE_S: Final = 600.0
"""How long a connection may stay without a request."""
DIAL_TIMEOUT_S: Final = 10.0
BEAT_S: Final = 1.0
MAX_STRANGERS: Final = 32
"""Connections without a proof; a new one pushes the oldest out."""

Answer = Callable[["Connection", Message], None]
"""Answers one request over its connection. Raises StoreError for what is to be refused."""


class Connection:
    """One end of a connection between two agents. Blocking; a socket that stays silent raises TimeoutError, an OSError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.limit = auth.MAX_UNPROVED_LINE
        self.seal: auth.Seal | None = None
        self.deadline: float | None = None
        """When the next line must be there, however it trickles in; None: each of its parts within `patience`."""

    def line(self) -> bytes | None:
        """The next line, None when the other end is gone. Raises LinkError, OSError."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > self.limit:
                raise LinkError(f"a line of more than {self.limit} bytes")
            if self.deadline is not None:
                self._sock.settimeout(max(0.001, self.deadline - time.monotonic()))
            data = self._sock.recv(64 * 1024)
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def receive(self) -> Message | None:
        """The next message, None when the other end is gone. Raises LinkError, OSError."""
        line = self.line()
        if line is None:
            return None
        assert self.seal is not None
        return decode(self.seal.open(line))

    def send(self, message: Message) -> None:
        """Raises OSError."""
        data = encode(message)
        self._sock.sendall(data if self.seal is None else self.seal.seal(data[:-1]) + b"\n")

    def send_line(self, line: bytes) -> None:
        """What is no message: the proof. Raises OSError."""
        self._sock.sendall(line + b"\n")

    def send_piece(self, data: memoryview) -> None:
        """The next piece of a file. Raises OSError."""
        assert self.seal is not None
        self._sock.sendall(self.seal.code(data))
        self._sock.sendall(data)

    def receive_piece(self, into: memoryview) -> None:
        """Fill `into` with the next piece, which has this length. Raises LinkError, OSError."""
        assert self.seal is not None
        code = bytearray(auth.CODE_BYTES)
        self._fill(memoryview(code))
        self._fill(into)
        self.seal.check(bytes(code), into)

    def _fill(self, into: memoryview) -> None:
        count = min(len(into), len(self._buffer))
        into[:count] = self._buffer[:count]
        del self._buffer[:count]
        while count < len(into):
            got = self._sock.recv_into(into[count:])
            if not got:
                raise LinkError("the connection ended in the middle of a file")
            count += got

    def patience(self, seconds: float) -> None:
        """How long the socket may stay silent from now on."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


# --- the end that is asked --------------------------------------------------------------------------------------------


class PeerServer:
    """Answers other agents of the run, in threads of its own.

    Args:
        host: address to listen on; the port is any free one.
        secret: of the run.
        answers: what to do for each type of request.
    """

    def __init__(self, *, host: str, secret: bytes, answers: dict[str, Answer]) -> None:
        self._secret = secret
        self._answers = answers
        self._sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.host = host
        self.port: int = self._sock.getsockname()[1]
        self._strangers: dict[Connection, None] = {}
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and cut those that there are."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._sock.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.5)  # no descriptors left, say
                continue
            connection = Connection(sock)
            with self._lock:
                while len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.close()
                self._strangers[connection] = None
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection, str(address[0])), name="peer", daemon=True).start()

    def _serve(self, connection: Connection, who: str) -> None:
        try:
            self._admit(connection)
            give_way()
            while (request := connection.receive()) is not None:
                connection.patience(SILENCE_S)
                self._answer(connection, request)
                connection.patience(IDLE_S)
        except LinkError as error:
            log.warning("a connection from %s was closed: it %s", who, error)
        except OSError:
            pass  # gone, or silent: whoever it was dials again
        except Exception:
            log.exception("answering another agent failed")
        finally:
            connection.close()
            with self._lock:
                self._strangers.pop(connection, None)
                self._connections.discard(connection)

    def _admit(self, connection: Connection) -> None:
        connection.deadline = time.monotonic() + PROOF_PATIENCE_S
        connection.patience(PROOF_PATIENCE_S)
        nonce, challenge = auth.new_challenge()
        connection.send(challenge)
        line = connection.line()
        hello, connection.seal = auth.check_proof(line, nonce, self._secret)
        connection.deadline = None
        if hello.get("type") != "peer":
            raise LinkError(f"said {hello.get('type')!r} to an agent")
        connection.limit = MAX_LINE
        connection.patience(IDLE_S)
        with self._lock:
            self._strangers.pop(connection, None)
        connection.send({"type": "welcome"})

    def _answer(self, connection: Connection, request: Message) -> None:
        answer = self._answers.get(request["type"])
        try:
            if answer is None:
                raise StoreError(f"there is no request {request['type']!r}")
            answer(connection, request)
        except (StoreError, KeyError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, StoreError) else f"the request makes no sense: {error!r}"
            connection.send({"type": "refused", "why": why, "missing": isinstance(error, NoSuchFile)})


def give_way() -> None:
    """Have this thread take what training leaves."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), watched.NICE)


class Beating(Pace):
    """The pace of work that another agent waits for: it is told now and then that there is progress."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._told = time.monotonic()
        self._bytes_told = 0

    def beat(self, count: int = 0) -> None:
        super().beat(count)
        if self.last - self._told >= BEAT_S:
            self._connection.send({"type": "beat", "bytes": self.bytes - self._bytes_told})
            self._told, self._bytes_told = self.last, self.bytes


def send_file(connection: Connection, reader: Reader, size: int) -> None:
    """Answer with a file of `size` bytes. Raises StoreError before the first byte, LinkError after it."""
    connection.send({"type": "file", "size": size})
    buffer = memoryview(bytearray(min(PIECE, max(1, size))))
    left = size
    while left:
        count, wanted = 0, min(left, PIECE)
        while count < wanted:
            try:
                got = reader.readinto(buffer[count:wanted])
            except StoreError as error:
                raise LinkError(f"asked for a file that cannot be read: {error}") from error
            if not got:
                raise LinkError("asked for a file that has become shorter")
            count += got
        connection.send_piece(buffer[:wanted])
        left -= wanted


# --- the end that asks ------------------------------------------------------------------------------------------------


class Rate:
    """No more than so many bytes a second, on average; None: no bound."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    def took(self, count: int) -> None:
        """Sleep as long as `count` bytes should have taken."""
        if self._bytes_per_s is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - now))


class Peer:
    """A connection to another agent, to ask for files. Every method may block and raises StoreError."""

    def __init__(self, connection: Connection, node: str) -> None:
        self._connection = connection
        self.node = node

    @classmethod
    def dial(cls, *, node: str, host: str, port: int, secret: bytes, me: str) -> Self:
        """Connect, and prove both ends to each other. `me`: name of this node."""
        try:
            sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT_S)
        except OSError as error:
            raise StoreError(f"node {node} at {host}:{port} cannot be reached: {error}") from error
        connection = Connection(sock)
        try:
            line, connection.seal = auth.make_proof(connection.line(), secret, {"type": "peer", "node": me})
            connection.send_line(line)
            connection.limit = MAX_LINE
            welcome = connection.receive()
            if welcome is None or welcome["type"] != "welcome":
                raise LinkError("it has another secret, or is not this run's")
        except (OSError, LinkError) as error:
            connection.close()
            raise StoreError(f"node {node} at {host}:{port}: {error}") from error
        connection.patience(SILENCE_S)
        return cls(connection, node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, request: Message, pace: Pace | None = None) -> Message:
        """The answer to a request; `beat` messages before it show that it is being worked on.

        Raises:
            NoSuchFile: what was asked for is not there.
        """
        with self._explained():
            self._connection.send(request)
            while (answer := self._connection.receive()) is not None and answer["type"] == "beat":
                if pace is not None:
                    pace.beat(int(answer.get("bytes", 0)))
            if answer is None:
                raise LinkError("it closed the connection")
        if answer["type"] == "refused":
            kind = NoSuchFile if answer.get("missing") else StoreError
            raise kind(f"node {self.node}: {answer.get('why')}")
        return answer

    def get(self, tier: str, name: str, file: str, *, most: int) -> Iterator[memoryview]:
        """The bytes of a file of a checkpoint in pieces, each valid until the next; more than `most` are refused."""
        answer = self.ask({"type": "get", "tier": tier, "name": name, "file": file})
        left = int(answer.get("size", -1))
        if answer["type"] != "file" or not 0 <= left <= most:
            raise StoreError(f"node {self.node}: {name}/{file} has {left} bytes, not {most}")
        buffer = memoryview(bytearray(min(PIECE, max(1, left))))
        while left:
            piece = buffer[: min(left, PIECE)]
            with self._explained():
                self._connection.receive_piece(piece)
            left -= len(piece)
            yield piece

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (OSError, LinkError) as error:
            raise StoreError(f"node {self.node}: {error or type(error).__name__}") from error
