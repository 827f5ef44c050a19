"""The lives of agents: started, missed, replaced when they hang, given up on when they cannot live."""

from __future__ import annotations

import asyncio
import time

import pytest
from daemons import Bystander, Wire, hello, living

from ckptd import agents as agents_module
from ckptd.agents import Agents
from ckptd.core import events as ev
from ckptd.core.state import Node, RunState, Status


class Office:
    def __init__(self):
        self.launcher = Bystander()
        self.happened = []
        self.agents = Agents(launcher=self.launcher, run_id="r", happened=self.happened.append, now=lambda: 1.0)

    def mind(self, **node):
        self.agents.mind(RunState(status=Status.TRAINING, nodes={"local": Node(**node)} if node else {}))


@pytest.fixture
def office():
    return Office()


def test_one_that_is_not_there_is_started(office):
    office.launcher.lives = False
    office.mind()
    assert (office.launcher.started, office.happened) == (["local"], [])


def test_a_run_that_is_over_needs_none(office):
    office.launcher.lives = False
    office.agents.mind(RunState(status=Status.ENDED))
    assert office.launcher.started == []


def test_one_that_died_is_reported_once_and_replaced(office):
    office.launcher.lives = False
    office.mind(connected=True)
    assert [type(e) for e in office.happened] == [ev.AgentLost]
    assert office.launcher.started == ["local"]


def test_one_that_dies_before_it_speaks_three_times_ends_the_run(office):
    for _ in range(agents_module.MAX_AGENT_STARTS + 1):
        office.launcher.lives = False
        office.mind(lost=True)
    assert [type(e) for e in office.happened] == [ev.RunEnded]
    assert (office.happened[0].outcome, office.happened[0].exit_status) == ("unavailable", 69)
    assert "died 3 times before it dialled in: it was never there" in office.happened[0].detail


def test_one_that_lives_and_does_not_dial_back_is_replaced(office, monkeypatch):
    monkeypatch.setattr(agents_module, "REDIAL_PATIENCE_S", 0.0)
    office.mind()
    time.sleep(0.01)
    office.mind()
    assert office.launcher.killed == ["local"]


def test_one_that_is_connected_and_hangs_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(agents_module, "SILENCE_S", 1.5)

    async def scene():
        async with living(tmp_path) as house:
            wire = await house.dial()
            wire.send(hello())
            await wire.wait_for("welcome")
            speaking = asyncio.create_task(speak(wire))
            await asyncio.sleep(2.5)  # what is waited for is that nothing happens
            assert house.launcher.killed == []
            speaking.cancel()
            await house.until(lambda: house.launcher.killed == ["local"])
            wire.writer.close()
            await house.until(lambda: house.of(ev.AgentLost))
            await house.until(lambda: house.launcher.started == ["local"])

    asyncio.run(scene())


async def speak(wire: Wire):
    while True:
        wire.send({"type": "live", "attempt": None, "ranks": {}})
        await asyncio.sleep(0.2)


def test_a_daemon_that_stood_still_itself_blames_nobody(office, monkeypatch):
    monkeypatch.setattr(agents_module, "SILENCE_S", 10.0)
    office.agents._sessions["local"] = session = agents_module.Session(node="local", agent_id="a", channel=None)
    office.agents._turned -= 3600.0  # an hour in a frozen virtual machine
    office.mind(connected=True)
    assert office.launcher.killed == []
    assert session.silent_s <= agents_module.LONGEST_TURN_S


def stopping(**node):
    return RunState(
        status=Status.STOPPING, attempt=1, placement={"local": (0,)}, nodes={"local": Node(connected=True, **node)}
    )


def test_one_that_does_not_come_to_an_end_with_an_attempt_is_replaced(office, monkeypatch):
    monkeypatch.setattr(agents_module, "LONGEST_TURN_S", 60.0)
    for ended, killed in ((True, []), (False, ["local"])):
        office.agents._sessions["local"] = agents_module.Session(node="local", agent_id="a", channel=None)
        for _ in range(3):
            office.agents._sessions["local"].silent_s = 0.0  # it speaks
            office.agents._turned -= 50.0
            office.agents.mind(stopping(ended=ended))
        assert office.launcher.killed == killed
        office.mind(connected=True)


def test_one_that_cannot_be_killed_ends_the_run(office, monkeypatch):
    monkeypatch.setattr(agents_module, "REDIAL_PATIENCE_S", -1.0)
    office.launcher.kill = office.launcher.killed.append
    for _ in range(agents_module.MAX_AGENT_KILLS + 1):
        assert office.happened == []
        office.mind(connected=True)
    assert [(e.outcome, e.exit_status) for e in office.happened] == [("unavailable", 69)]
    assert len(office.launcher.killed) == agents_module.MAX_AGENT_KILLS
