"""Who does not know the secret gets nowhere; who repeats, reorders or invents a line is found out."""

from __future__ import annotations

import asyncio
import itertools
import json
import stat

import pytest

from ckptd import auth
from ckptd.auth import Seal
from ckptd.errors import UsageError
from ckptd.wire import Channel, LinkError

SECRET = bytes(range(32))
NONCES = {"daemon_nonce": b"d" * 32, "agent_nonce": b"a" * 32}


def pair(secret=SECRET, **nonces):
    return (Seal(SECRET, role="daemon", **NONCES), Seal(secret, role="agent", **{**NONCES, **nonces}))


class TestSecret:
    def test_it_is_made_once_and_for_its_owner_alone(self, tmp_path):
        path = tmp_path / "secret"
        made = auth.run_secret(str(path))
        assert len(made) == 32
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert auth.run_secret(str(path)) == made
        assert auth.run_secret(str(tmp_path / "another")) != made

    def test_one_that_others_can_read_is_refused(self, tmp_path):
        path = tmp_path / "secret"
        auth.run_secret(str(path))
        path.chmod(0o640)
        with pytest.raises(UsageError, match="can be read by others"):
            auth.run_secret(str(path))

    @pytest.mark.parametrize("text", ["", "short", "zz" * 32, "00" * 31, "00" * 33])
    def test_what_is_none_is_not_shown(self, tmp_path, text):
        path = tmp_path / "secret"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(UsageError) as caught:
            auth.run_secret(str(path))
        assert not text or text not in str(caught.value)


class TestSeal:
    def test_lines_open_in_their_order_at_the_other_end_only(self):
        daemon, agent = pair()
        lines = [daemon.seal(text) for text in (b"one", b"", b"three and more")]
        with pytest.raises(LinkError):
            daemon.open(lines[0])  # reflected
        assert [agent.open(line) for line in lines] == [b"one", b"", b"three and more"]
        assert daemon.open(agent.seal(b"back")) == b"back"

    @pytest.mark.parametrize("order", [p for p in itertools.product(range(3), repeat=2) if p != (0, 1)])
    def test_no_line_is_repeated_left_out_or_moved(self, order):
        daemon, agent = pair()
        lines = [daemon.seal(b"%d" % i) for i in range(3)]
        with pytest.raises(LinkError):
            for i in order:
                agent.open(lines[i])

    @pytest.mark.parametrize("at", [0, 31, 33, -1])
    def test_no_byte_of_it_can_be_changed(self, at):
        daemon, agent = pair()
        line = bytearray(daemon.seal(b'{"type":"stop"}'))
        line[at] ^= 1
        with pytest.raises(LinkError):
            agent.open(bytes(line))

    @pytest.mark.parametrize("other", [{"secret": b"x" * 32}, {"daemon_nonce": b"x" * 32}, {"agent_nonce": b"x" * 32}])
    def test_secret_and_both_nonces_make_the_key(self, other):
        daemon, agent = pair(**other)
        with pytest.raises(LinkError):
            agent.open(daemon.seal(b"one"))

    @pytest.mark.parametrize("line", [b"", b" ", b"no code", b"\xff\xfe \x00", b"0" * 32 + b" {}"])
    def test_what_is_no_line_at_all(self, line):
        with pytest.raises(LinkError):
            pair()[0].open(line)


async def meet(daemons_end, agents_end):
    """Both ends over a real connection; returns what came of each."""
    done = asyncio.get_running_loop().create_future()

    async def accept(reader, writer):
        channel = Channel(reader, writer)
        try:
            result = await daemons_end(channel)
        except LinkError as error:
            result = error
        done.set_result(result)
        await channel.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        channel = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        try:
            async with asyncio.timeout(20):
                try:
                    mine = await agents_end(channel)
                except LinkError as error:
                    mine = error
                return await done, mine
        finally:
            channel.abort()


class TestHandshake:
    def test_two_that_know_the_secret_understand_each_other(self):
        async def daemons_end(channel):
            await auth.demand_proof(channel, SECRET)
            hello = await channel.receive()
            channel.send({"type": "welcome"})
            return hello, await channel.receive()

        async def agents_end(channel):
            await auth.give_proof(channel, SECRET, {"type": "hello", "node": "n"})
            welcome = await channel.receive()
            channel.send({"type": "live"})
            return welcome

        told, welcome = asyncio.run(meet(daemons_end, agents_end))
        assert told == ({"type": "hello", "node": "n"}, {"type": "live"})
        assert welcome == {"type": "welcome"}

    def test_an_agent_with_another_secret_is_refused(self):
        async def agents_end(channel):
            await auth.give_proof(channel, b"x" * 32, {"type": "hello"})
            return await channel.receive()

        refused, heard = asyncio.run(meet(lambda c: auth.demand_proof(c, SECRET), agents_end))
        assert "does not know this run's secret" in str(refused)
        assert heard is None, "a stranger is told nothing"

    def test_a_daemon_with_another_secret_is_not_obeyed(self):
        async def daemons_end(channel):
            challenge = {"type": "challenge", "protocol": auth.PROTOCOL, "nonce": "00" * 32}
            channel.send(challenge)
            its, _, _ = auth._parts(await channel.line())
            channel.seal = Seal(b"x" * 32, daemon_nonce=bytes(32), agent_nonce=its, role="daemon")
            channel.send({"type": "welcome"})
            await channel.flush()

        async def agents_end(channel):
            await auth.give_proof(channel, SECRET, {"type": "hello"})
            return await channel.receive()

        _, mine = asyncio.run(meet(daemons_end, agents_end))
        assert isinstance(mine, LinkError)

    def test_a_hello_that_was_overheard_is_worth_nothing(self):
        kept = []

        async def listen_in(channel):
            challenge = json.loads(await channel.line())
            assert len(challenge["nonce"]) == 64
            channel.send_line(kept[0])
            return await channel.receive()

        async def record(channel):
            await auth.demand_proof(channel, SECRET)

        async def honest(channel):
            send = channel.send_line
            channel.send_line = lambda line: (kept.append(line), send(line))
            await auth.give_proof(channel, SECRET, {"type": "hello"})

        asyncio.run(meet(record, honest))
        refused, _ = asyncio.run(meet(lambda c: auth.demand_proof(c, SECRET), listen_in))
        assert "does not know" in str(refused)

    @pytest.mark.parametrize(
        "challenge",
        [b'{"type":"challenge","protocol":99,"nonce":"00"}', b'{"type":"welcome"}', b"SSH-2.0-OpenSSH_9.6",
         b'{"type":"challenge","protocol":1,"nonce":"zz"}', b'{"type":"challenge","protocol":1}'],
    )  # fmt: skip
    def test_what_is_no_daemon_of_this_version_gets_no_hello(self, challenge):
        async def daemons_end(channel):
            channel.send_line(challenge)
            return await channel.line()

        async def agents_end(channel):
            try:
                await auth.give_proof(channel, SECRET, {"type": "hello"})
            finally:
                channel.abort()

        heard, mine = asyncio.run(meet(daemons_end, agents_end))
        assert heard is None
        assert isinstance(mine, LinkError)

    @pytest.mark.parametrize(
        "line",
        [
            b"GET / HTTP/1.1\r",
            b"",
            b"aa bb cc",
            b"0" * 64 + b" " + b"0" * 64,
            b"\xff" * 200,
            b"{}",
            bytes(range(11, 110)),
        ],
    )
    def test_a_stranger_s_line_is_not_even_read_as_json(self, line, monkeypatch):
        monkeypatch.setattr(auth, "decode", None)

        async def agents_end(channel):
            await channel.line()
            channel.send_line(line.replace(b"\n", b""))
            return await channel.line()

        refused, heard = asyncio.run(meet(lambda c: auth.demand_proof(c, SECRET), agents_end))
        assert isinstance(refused, LinkError)
        assert heard is None
