"""The protocol, with real sockets at both ends: what cannot be read harms nobody, what was said arrives once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
import time

import pytest
from daemons import RUN_ID, event, hello, living

from ckptd import daemon as daemon_module
from ckptd import link
from ckptd.core import events as ev
from ckptd.errors import DaemonUnreachable
from ckptd.link import AgentLink, LinkError, ask_daemon


def connections(path):
    """How many descriptors of this process are connections accepted at `path`."""
    with open("/proc/net/unix", encoding="utf-8") as file:
        inodes = {line.split()[6] for line in file if line.split()[-1] == path}
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            found += target.startswith("socket:[") and target[8:-1] in inodes
    return found


class TestMessages:
    @pytest.mark.parametrize("line", [b"", b"nonsense", b"[1]", b"{}", b'{"type": 3}', b"\xff\xfe", b'{"type"'])
    def test_what_is_no_message_is_an_error(self, line):
        with pytest.raises(LinkError):
            link.decode(line)

    def test_one_line_each(self):
        message = {"type": "event", "data": {"text": "two\nlines", "ü": [1, None]}}
        line = link.encode(message)
        assert line.count(b"\n") == 1
        assert link.decode(line) == message


class TestTheDaemonsEnd:
    @pytest.mark.parametrize(
        "junk",
        [b"GET / HTTP/1.1\r\n", b"\x00\xff\xfe\n", b"[]\n", b'{"type": 7}\n', b"x" * (link.MAX_LINE + 10) + b"\n"],
        ids=["http", "binary", "list", "type", "huge"],
    )
    def test_rubbish_ends_its_own_connection_only(self, tmp_path, junk, caplog):
        async def scene():
            async with living(tmp_path) as house:
                wire = await house.dial()
                wire.send(junk)
                await wire.closed()
                assert (await house.ask("ping"))["type"] == "pong"

        asyncio.run(scene())
        assert not [record for record in caplog.records if record.exc_info or record.name == "asyncio"]
        assert any("connection was closed" in record.message for record in caplog.records)

    @pytest.mark.parametrize(
        ("first", "why"),
        [
            ({"type": "launch"}, "does not begin with 'launch'"),
            ({"type": "request", "what": "dance"}, "unknown request 'dance'"),
            (hello(protocol=99), "protocol 99"),
            (hello(run_id="another"), "not another"),
            (hello(node="elsewhere"), "'elsewhere' is not part of this run"),
            ({"type": "hello"}, "protocol None"),
        ],
    )
    def test_a_wrong_beginning_is_refused_in_words(self, tmp_path, first, why):
        async def scene():
            async with living(tmp_path) as house:
                wire = await house.dial()
                wire.send(first)
                answer = await wire.receive()
                assert answer["type"] == "refused"
                assert why in answer["why"]
                assert await wire.receive() is None
                assert not house.of(ev.AgentConnected)
                assert house.daemon.agents.sessions() == []

        asyncio.run(scene())

    def test_who_says_nothing_is_closed_and_leaves_no_descriptor(self, tmp_path, monkeypatch, caplog):
        assert daemon_module.HELLO_PATIENCE_S == 10.0
        monkeypatch.setattr(daemon_module, "HELLO_PATIENCE_S", 0.2)

        async def scene():
            async with living(tmp_path) as house:
                assert connections(house.path) == 1  # the one that listens
                silent = [await house.dial() for _ in range(20)]
                silent[0].send(b'{"type": "hel')  # half a line is nothing
                await house.until(lambda: connections(house.path) == 21)
                for wire in silent:
                    await wire.closed()
                await house.until(lambda: connections(house.path) == 1)

        asyncio.run(scene())
        assert not [record for record in caplog.records if record.exc_info]

    def test_the_daemon_ends_while_somebody_is_about_to_speak(self, tmp_path, caplog):
        async def scene():
            async with living(tmp_path) as house:
                await house.dial()
                await house.ask("ping")

        caplog.set_level(logging.WARNING)
        asyncio.run(scene())
        assert not [record for record in caplog.records if record.exc_info or record.name == "asyncio"]

    def test_an_event_that_cannot_be_read_is_passed_and_those_after_it_count(self, tmp_path):
        async def scene():
            async with living(tmp_path) as house:
                wire = await house.dial()
                wire.send(hello())
                await wire.wait_for("welcome")
                wire.send(event(1, "of_the_future"))
                wire.send(event(2, "noted", data="no object"))
                wire.send(event(3, "noted", data={"level": "info", "what": "read"}))
                while (await wire.wait_for("ack"))["seq"] != 3:
                    pass
                assert [e.what for e in house.of(ev.Noted)] == ["read"]

        asyncio.run(scene())

    def test_an_event_without_a_number_ends_the_connection(self, tmp_path):
        async def scene():
            async with living(tmp_path) as house:
                wire = await house.dial()
                wire.send(hello())
                await wire.wait_for("welcome")
                wire.send({"type": "event", "kind": "noted", "data": {}})
                await wire.closed()
                await house.until(lambda: not house.daemon.agents.sessions())

        asyncio.run(scene())

    def test_a_newer_connection_takes_the_place_of_one_that_takes_nothing_any_more(self, tmp_path):
        """The older end does not read: closing it politely would wait for ever."""

        async def scene():
            async with living(tmp_path) as house:
                stuck = socket.socket(socket.AF_UNIX)
                with stuck:
                    stuck.setblocking(False)
                    stuck.connect(house.path)
                    stuck.sendall(link.encode(hello()))
                    await house.until(house.daemon.agents.sessions)
                    session = house.daemon.agents.sessions()[0]
                    for _ in range(40):
                        session.channel.send({"type": "filler", "text": "x" * 100_000})
                    wire = await house.dial()
                    wire.send(hello(agent_id="a2"))
                    assert (await wire.wait_for("welcome"))["acknowledged"] == 0
                    assert [s.agent_id for s in house.daemon.agents.sessions()] == ["a2"]

        asyncio.run(scene())

    def test_an_event_told_again_after_a_redial_happens_once(self, tmp_path):
        async def scene():
            async with living(tmp_path) as house:
                for welcome in (0, 2, 2):
                    wire = await house.dial()
                    wire.send(hello())
                    assert (await wire.wait_for("welcome"))["acknowledged"] == welcome
                    for seq in (1, 2):
                        wire.send(event(seq, "noted", data={"level": "info", "what": f"number {seq}"}))
                        while (await wire.wait_for("ack"))["seq"] < seq:
                            pass
                    wire.writer.close()
                assert [e.what for e in house.of(ev.Noted)] == ["number 1", "number 2"]

        asyncio.run(scene())


class TestTheAgentsEnd:
    def test_what_was_told_without_a_daemon_arrives_once_when_there_is_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(link, "REDIAL_S", 0.02)
        monkeypatch.setattr(link, "MAX_REDIAL_S", 0.05)

        async def scene():
            orders = []

            async def on_order(order):
                orders.append(order["type"])

            async with living(tmp_path) as house:
                said = hello()
                end = AgentLink(house.path, hello=lambda: {**said, "run_id": RUN_ID}, on_order=on_order)
                end.event("noted", level="info", what="before the first dial")
                dialling = asyncio.create_task(end.run())
                try:
                    await house.until(lambda: end.connected and not end.unacknowledged)
                    for drop in range(3):
                        session = house.daemon.agents.sessions()[0]
                        end.event("noted", level="info", what=f"just before drop {drop}")
                        session.channel._writer.transport.abort()  # the cable is cut
                        end.event("noted", level="info", what=f"just after drop {drop}")
                        await house.until(lambda: not end.connected)
                        end.event("noted", level="info", what=f"while nobody listens {drop}")
                        await house.until(lambda: end.connected and not end.unacknowledged)
                finally:
                    dialling.cancel()
                    await asyncio.gather(dialling, return_exceptions=True)
                expected = ["before the first dial"]
                for drop in range(3):
                    expected += [
                        f"just before drop {drop}", f"just after drop {drop}", f"while nobody listens {drop}",
                    ]  # fmt: skip
                assert [e.what for e in house.of(ev.Noted)] == expected
                assert "welcome" in orders

        asyncio.run(scene())

    def test_ages_travel_not_times(self, tmp_path):
        async def scene():
            async with living(tmp_path) as house:

                async def on_order(order):
                    pass

                end = AgentLink(house.path, hello=hello, on_order=on_order)
                loop = asyncio.get_running_loop()
                end.event("noted", mono=loop.time() - 3.0, level="info", what="three seconds ago")
                dialling = asyncio.create_task(end.run())
                await house.until(lambda: house.of(ev.Noted))
                now = house.daemon.clock.now()
                assert house.of(ev.Noted)[0].t == pytest.approx(now - 3.0, abs=0.5)
                dialling.cancel()
                await asyncio.gather(dialling, return_exceptions=True)

        asyncio.run(scene())

    def test_who_is_refused_dials_ever_more_seldom(self, tmp_path, monkeypatch):
        monkeypatch.setattr(link, "REDIAL_S", 0.01)
        monkeypatch.setattr(link, "MAX_REDIAL_S", 0.5)
        dials = []

        async def scene():
            async def refuse(channel):
                dials.append(asyncio.get_running_loop().time())
                await channel.receive()
                channel.send({"type": "refused", "why": "not you"})

            server = await link.listen(str(tmp_path / "s"), refuse)
            end = AgentLink(str(tmp_path / "s"), hello=hello, on_order=None)
            dialling = asyncio.create_task(end.run())
            async with asyncio.timeout(20):
                while len(dials) < 9:
                    await asyncio.sleep(0.01)
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
            server.close()
            return end.connected

        assert not asyncio.run(scene())
        gaps = [b - a for a, b in itertools.pairwise(dials)]
        assert gaps[-1] > 5 * min(gaps)


class TestTheCommandLinesEnd:
    def test_nobody_listens(self, tmp_path):
        with pytest.raises(DaemonUnreachable, match="no ckptd daemon answers at") as caught:
            ask_daemon(str(tmp_path / "ckptd.sock"), {"what": "ping"})
        assert not caught.value.connected

    def test_a_stale_socket_is_nobody(self, tmp_path):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(tmp_path / "s"))
        with pytest.raises(DaemonUnreachable):
            ask_daemon(str(tmp_path / "s"), {"what": "ping"})

    @pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"[]\n", None])
    def test_an_answer_that_is_none(self, tmp_path, answer):
        """None: no answer at all, for longer than one waits."""
        path = str(tmp_path / "s")
        done = threading.Event()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()

            def serve():
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    if answer is None:
                        done.wait(10)
                    else:
                        connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                with pytest.raises(DaemonUnreachable) as caught:
                    ask_daemon(path, {"what": "ping"}, timeout=0.2)
                assert caught.value.connected
            finally:
                done.set()
                thread.join()

    def test_a_stale_socket_file_is_replaced(self, tmp_path):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(tmp_path / "s"))

        async def scene():
            async def serve(channel):
                channel.send(await channel.receive())
                await channel.flush()

            async with await link.listen(str(tmp_path / "s"), serve):
                return await asyncio.to_thread(ask_daemon, str(tmp_path / "s"), {"what": "echo"})

        assert asyncio.run(scene()) == {"what": "echo", "type": "request"}


def test_an_agent_is_alone_only_since_its_connection_broke_however_long_nothing_was_said(tmp_path):
    async def nothing(_order):
        pass

    async def scene():
        async def serve(channel):
            await channel.receive()
            channel.send({"type": "welcome", "acknowledged": 0})
            await leave.wait()

        leave = asyncio.Event()
        path = str(tmp_path / "sock")
        server = await link.listen(path, serve)
        end = AgentLink(path, hello=dict, on_order=nothing)
        dialling = asyncio.create_task(end.run())
        try:
            async with asyncio.timeout(20):
                while not end.connected:
                    await asyncio.sleep(0.005)
                end.last_contact -= 7200.0  # hours in which there was nothing to say
                server.close()
                leave.set()
                while end.connected:
                    await asyncio.sleep(0.005)
            assert time.monotonic() - end.last_contact < 60.0
        finally:
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)

    asyncio.run(scene())
