"""Strangers at the door: whatever they do, an agent that knows the secret works on, and the daemon pays next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket

import pytest
from daemons import PATIENCE_S, hello, living

from ckptd import auth, door, link
from ckptd.core import events as ev
from ckptd.errors import PortTaken
from ckptd.jobspec import load
from ckptd.rundir import RunDir
from ckptd.wire import Channel, LinkError


async def dial(house):
    return Channel(*await asyncio.open_connection("127.0.0.1", house.door.port))


async def agent(house, **changes):
    """An agent that is in."""
    channel = await dial(house)
    await auth.give_proof(channel, house.door.secret, hello(node="n1", address="127.0.0.1", **changes))
    welcome = await asyncio.wait_for(channel.receive(), PATIENCE_S)
    assert welcome["type"] == "welcome", welcome
    return channel


async def heard(channel, mono):
    """The daemon answers a heartbeat."""
    channel.send({"type": "live", "mono": mono, "attempt": None, "ranks": {}})
    async with asyncio.timeout(PATIENCE_S):
        while (message := await channel.receive()) != {"type": "heard", "mono": mono}:
            assert message is not None


async def closed(channel):
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(LinkError):
            while await channel.line() is not None:
                pass


def test_who_knows_the_secret_is_served_and_is_told_that_it_was_heard(tmp_path):
    async def scene():
        async with living(tmp_path, nodes=("n1",)) as house:
            channel = await agent(house)
            await heard(channel, 17.5)
            assert [e.address for e in house.of(ev.AgentConnected)] == ["127.0.0.1"]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("changes", "why"), [({"protocol": 99}, "protocol 99"), ({"run_id": "x"}, "not x"), ({"node": "n9"}, "'n9' is not")]
)
def test_one_that_proved_itself_and_does_not_belong_here_is_told_so(tmp_path, changes, why):
    async def scene():
        async with living(tmp_path, nodes=("n1",)) as house:
            channel = await dial(house)
            await auth.give_proof(channel, house.door.secret, {**hello(node="n1"), **changes})
            answer = await asyncio.wait_for(channel.receive(), PATIENCE_S)
            assert answer["type"] == "refused"
            assert why in answer["why"]
            assert not house.of(ev.AgentConnected)

    asyncio.run(scene())


def test_over_the_network_nobody_asks_for_anything(tmp_path):
    async def scene():
        async with living(tmp_path, nodes=("n1",)) as house:
            channel = await dial(house)
            await auth.give_proof(channel, house.door.secret, {"type": "request", "what": "stop_now"})
            answer = await asyncio.wait_for(channel.receive(), PATIENCE_S)
            assert answer["type"] == "refused"
            assert not house.of(ev.Requested)

    asyncio.run(scene())


def test_a_thousand_half_open_connections_and_the_agent_works_on(tmp_path, monkeypatch, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(link, "PROOF_PATIENCE_S", 1.0)
    most = 0

    async def scene():
        nonlocal most
        async with living(tmp_path, nodes=("n1",)) as house:
            channel = await agent(house)
            strangers = []
            try:
                for i in range(1000):
                    stranger = socket.socket()
                    stranger.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        stranger.connect(("127.0.0.1", house.door.port))
                    strangers.append(stranger)
                    if i % 50 == 0:
                        await heard(channel, float(i))
                        most = max(most, accepted(house))
                late = await agent(house, agent_id="a2")  # one that comes in between is let in
                await heard(late, 1e6)
                # Their time is over, though they never hang up.
                await house.until(lambda: accepted(house) <= 2)
            finally:
                for stranger in strangers:
                    stranger.close()

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        asyncio.run(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert most <= 3 * link.MAX_STRANGERS, "what was pushed out takes a moment to be gone, and no more"
    assert sum("was closed" in record.message for record in caplog.records) <= 1


def accepted(house):
    """Connections that the daemon holds at its door."""
    port, found = house.door.port, 0
    with open("/proc/net/tcp", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            fields = line.split()
            found += int(fields[1].partition(":")[2], 16) == port and fields[3] == "01" and fields[9] != "0"
    return found


@pytest.mark.parametrize("rubbish", ["slow", "huge", "wrong secret", "replayed"])
def test_rubbish_is_closed_and_costs_a_line_in_the_log(tmp_path, monkeypatch, caplog, rubbish):
    monkeypatch.setattr(link, "PROOF_PATIENCE_S", 0.5 if rubbish == "slow" else 10.0)
    overheard = []

    async def stranger(house):
        channel = await dial(house)
        if rubbish == "slow":  # a byte now and then, for ever

            async def drip():
                while True:
                    channel._writer.write(b"0")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            await closed(channel)
            dripping.cancel()
        elif rubbish == "huge":
            channel._writer.write(b"0" * (auth.MAX_UNPROVED_LINE + 200_000))
            await closed(channel)
        elif rubbish == "wrong secret":
            await auth.give_proof(channel, b"x" * 32, hello(node="n1"))
            await closed(channel)
        else:
            await channel.line()
            channel.send_line(overheard[0])
            await closed(channel)
        channel.abort()

    async def scene():
        async with living(tmp_path, nodes=("n1",)) as house:
            first = await dial(house)
            send = first.send_line
            first.send_line = lambda line: (overheard.append(line), send(line))
            await auth.give_proof(first, house.door.secret, hello(node="n1"))
            await asyncio.wait_for(first.receive(), PATIENCE_S)
            for _ in range(5):
                await stranger(house)
            await heard(first, 1.0)
            assert len(house.of(ev.AgentConnected)) == 1

    asyncio.run(scene())
    complaints = [record.message for record in caplog.records if "was closed" in record.message]
    assert len(complaints) == 1, complaints
    assert "127.0.0.1" in complaints[0]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_line_put_in_between_ends_the_connection_and_changes_nothing(tmp_path):
    async def scene():
        async with living(tmp_path, nodes=("n1",)) as house:
            channel = await agent(house)
            planted = {"type": "event", "seq": 1, "kind": "noted", "attempt": None, "rank": None, "age_s": 0.0,
                       "data": {"what": "planted"}}  # fmt: skip
            channel.send_line(b"0" * 32 + b" " + json.dumps(planted).encode())
            await closed(channel)
            assert not house.of(ev.Noted)
            await house.until(lambda: not house.daemon.agents.sessions())

    asyncio.run(scene())


# --- where it is --------------------------------------------------------------------------------------------------------


def job(directory, **cluster):
    path = directory / "job.yaml"
    tier = {"name": "d", "path": "c", "shared": True}
    path.write_text(json.dumps({
        "version": 1, "name": "r", "command": ["t.py"], "checkpoint": {"tiers": [tier]},
        "cluster": {"launcher": "ssh", "hosts": ["127.0.0.1", "127.0.0.2"], **cluster},
    }))  # fmt: skip
    run_dir = RunDir(directory / "run")
    run_dir.create()
    return load(path), run_dir


def test_it_is_where_the_hosts_reach_it_and_the_next_daemon_has_the_same_port(tmp_path):
    spec, run_dir = job(tmp_path)
    first = door.open_door(spec, run_dir, epoch=1)
    assert first.addresses == {"127.0.0.1": "127.0.0.1", "127.0.0.2": "127.0.0.1"}
    assert first.sock.getsockname()[0] == "127.0.0.1", "and nowhere else"
    port, secret = first.port, first.secret
    first.sock.close()
    second = door.open_door(spec, run_dir, epoch=0)
    assert (second.port, second.secret) == (port, secret)
    assert second.epoch == 1, "it never goes back"
    third = door.open_door(spec, run_dir, epoch=0)  # while the port is taken
    assert third.port != second.port
    for found in (second, third):
        found.sock.close()


def test_a_given_address_is_taken_or_said_to_be_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec, run_dir = job(tmp_path, listen=f"127.0.0.1:{port}")
        with pytest.raises(PortTaken, match=f"cluster.listen: 127.0.0.1:{port} cannot be listened on: Address already"):
            door.open_door(spec, run_dir, epoch=0)


def test_hosts_that_no_address_reaches_are_named(tmp_path):
    spec, run_dir = job(tmp_path, hosts=["nowhere.invalid"])
    with pytest.raises(PortTaken, match=r"known to reach nowhere\.invalid: name one as cluster\.listen"):
        door.open_door(spec, run_dir, epoch=0)


def test_a_node_that_is_this_machine_dials_the_address_that_other_nodes_reach(monkeypatch):
    known = {"here": "127.0.0.1", "there": "10.9.9.9", "nowhere": "host.invalid"}
    towards = {"127.0.0.1": "127.0.0.1", "10.9.9.9": "10.9.9.1"}
    monkeypatch.setattr(door, "_address_towards", towards.get)  # no route of this machine is to matter
    assert door._addresses(list(known), known) == {"here": "10.9.9.1", "there": "10.9.9.1"}
    assert door._addresses(["here"], known) == {"here": "127.0.0.1"}
