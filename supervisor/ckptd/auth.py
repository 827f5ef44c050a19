"""Do both ends of a TCP connection know the run's secret? Challenge, proof, and a seal on every line after it.

    daemon -> agent   {"type": "challenge", "protocol": 1, "nonce": <64 hex digits>}
    agent -> daemon   <its own nonce, 64 hex digits> <proof, 64 hex digits> {"type": "hello", ...}
    daemon -> agent   its first sealed line: `welcome`, or `refused` with the reason

The proof is HMAC-SHA256(secret, role, both nonces, the bytes of the hello): a hello that was overheard is of no use under
another challenge. Both nonces give a key for each direction, and each line carries a code over its number and its bytes,
so that nothing can be put in, left out, repeated or reordered. The daemon's first line is sealed like all others, which
proves the secret to the agent before it obeys anything.

Nothing is encrypted: who can listen on the network reads what is sent, and can change none of it.
"""

from __future__ import annotations

import hmac
import os
import stat
from typing import Literal

from ckptd.errors import UsageError
from ckptd.wire import PROTOCOL, Channel, LinkError, Message, decode, encode

SECRET_BYTES = 32
NONCE_BYTES = 32
MAX_UNPROVED_LINE = 64 * 1024
"""What a stranger may send in one line."""
CODE_BYTES = 16
"""Length of the code of a line or a piece."""

Role = Literal["daemon", "agent"]


def run_secret(path: str) -> bytes:
    """The secret of a run: read from its file (0600), which is made where there is none.

    Raises:
        UsageError: the file is not ours alone, or holds something else.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(os.urandom(SECRET_BYTES).hex() + "\n")
            file.flush()
            os.fsync(fd)
    with open(path, encoding="ascii", errors="replace") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        text = file.read(4096).strip()
    if mode & 0o077:
        raise UsageError(f"{path} can be read by others (mode {mode:o}): remove it, and the agents get another secret")
    return parse_secret(text, where=path)


def parse_secret(text: str, *, where: str) -> bytes:
    """A secret out of its hex digits. Raises UsageError, which does not show them."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"{where} does not hold a secret of {SECRET_BYTES} bytes in hexadecimal")
    return secret


def _code(key: bytes, label: bytes, *parts: bytes) -> bytes:
    # Every part but the last has a fixed length, so no two lists of parts look the same.
    return hmac.digest(key, b"ckptd " + label + b"\0" + b"".join(parts), "sha256")


class Seal:
    """Seals the lines of one end of one connection, and opens those of the other end."""

    def __init__(self, secret: bytes, *, daemon_nonce: bytes, agent_nonce: bytes, role: Role) -> None:
        keys = {name: _code(secret, b"lines of " + name, daemon_nonce, agent_nonce) for name in (b"daemon", b"agent")}
        self._out_key = keys[role.encode()]
        self._in_key = keys[b"agent" if role == "daemon" else b"daemon"]
        self._sent = 0
        self._opened = 0

    def seal(self, data: bytes) -> bytes:
        """The next line to send (without its end)."""
        code = self._mac(self._out_key, self._sent, data)
        self._sent += 1
        return code.hex().encode() + b" " + data

    def open(self, line: bytes) -> bytes:
        """The data of the next line that came. Raises LinkError for any other line."""
        code, _, data = line.partition(b" ")
        expected = self._mac(self._in_key, self._opened, data).hex().encode()
        if not hmac.compare_digest(code, expected):
            raise LinkError(f"line {self._opened} is not the one that the other end sent")
        self._opened += 1
        return data

    def code(self, data: bytes | memoryview) -> bytes:
        """The code of the next piece of raw data to send: goes before it."""
        code = self._mac(self._out_key, self._sent, data)
        self._sent += 1
        return code

    def check(self, code: bytes, data: bytes | memoryview) -> None:
        """Raise LinkError unless `data` is the next piece that the other end sent."""
        if not hmac.compare_digest(code, self._mac(self._in_key, self._opened, data)):
            raise LinkError(f"piece {self._opened} is not the one that the other end sent")
        self._opened += 1

    @staticmethod
    def _mac(key: bytes, number: int, data: bytes | memoryview) -> bytes:
        return hmac.digest(key, number.to_bytes(8) + data, "sha256")[:CODE_BYTES]


async def demand_proof(channel: Channel, secret: bytes) -> Message:
    """The daemon's end: challenge whoever dialled, and return the hello of one that knows the secret.

    Nothing of what a stranger sends is read as JSON, and no more than a line of it is kept. From here on the channel is
    sealed. The caller bounds the time.

    Raises:
        LinkError: no proof came, or a wrong one.
    """
    channel.limit = MAX_UNPROVED_LINE
    nonce, challenge = new_challenge()
    channel.send(challenge)
    message, channel.seal = check_proof(await channel.line(), nonce, secret)
    channel.unread(message)
    return message


def new_challenge() -> tuple[bytes, Message]:
    """(nonce, what to send to whoever dialled)."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce, {"type": "challenge", "protocol": PROTOCOL, "nonce": nonce.hex()}


def check_proof(line: bytes | None, nonce: bytes, secret: bytes) -> tuple[Message, Seal]:
    """(the hello in the answer to a challenge, the seal of all that follows). Raises LinkError."""
    if line is None:
        raise LinkError("left without a word")
    its_nonce, its_proof, hello = _parts(line)
    expected = _code(secret, b"hello of agent", nonce, its_nonce, hello)
    if not hmac.compare_digest(its_proof, expected):
        raise LinkError("does not know this run's secret")
    return decode(hello), Seal(secret, daemon_nonce=nonce, agent_nonce=its_nonce, role="daemon")


def _parts(line: bytes) -> tuple[bytes, bytes, bytes]:
    """(nonce, proof, hello) of an agent's first line. Raises LinkError."""
    words = line.split(b" ", 2)
    try:
        nonce, proof = (bytes.fromhex(word.decode("ascii")) for word in words[:2])
    except ValueError:
        nonce = proof = b""
    if len(words) != 3 or len(nonce) != NONCE_BYTES or len(proof) != 32:
        raise LinkError("sent no proof")
    return nonce, proof, words[2]


async def give_proof(channel: Channel, secret: bytes, hello: Message) -> None:
    """The agent's end: answer the challenge with a hello. The next line that `channel` receives proves the daemon.

    Raises:
        LinkError: what listens there is no daemon of this version of ckptd.
    """
    line, seal = make_proof(await channel.line(), secret, hello)
    channel.send_line(line)
    channel.seal = seal


def make_proof(first: bytes | None, secret: bytes, hello: Message) -> tuple[bytes, Seal]:
    """(the line that answers a challenge, the seal of all that follows). Raises LinkError."""
    if first is None:
        raise LinkError("it closed the connection at once")
    challenge = decode(first)
    if challenge["type"] != "challenge" or challenge.get("protocol") != PROTOCOL:
        raise LinkError(f"it speaks protocol {challenge.get('protocol')}, this agent {PROTOCOL}: install one version")
    try:
        nonce = bytes.fromhex(str(challenge.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise LinkError("its challenge makes no sense")
    own = os.urandom(NONCE_BYTES)
    data = encode(hello)[:-1]
    proof = _code(secret, b"hello of agent", nonce, own, data)
    line = b" ".join((own.hex().encode(), proof.hex().encode(), data))
    return line, Seal(secret, daemon_nonce=nonce, agent_nonce=own, role="agent")
