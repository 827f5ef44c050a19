"""What the agent's two threads hand to each other, and what it collects: scenes with a real agent and no daemon."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys

import pytest

from ckptd.node import agent as agent_module
from ckptd.node import processes
from ckptd.node.agent import Agent
from ckptd.node.warm import become_subreaper

SETTINGS = {
    "tiers": [], "health_command": None, "health_interval_s": 30.0, "stop_grace_s": 1.0, "orphan_timeout_s": 60.0,
    "warm": None,
}  # fmt: skip


@pytest.fixture
def subreaper():
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def make(directory):
    made = Agent(run_dir=str(directory), run_id="r", node="local", socket=str(directory / "sock"), devices_wanted=1)
    made._loop.close()
    made._loop = asyncio.get_running_loop()
    made.settings = agent_module.Settings.from_message(SETTINGS)
    return made


def order(directory, number):
    return {
        "type": "launch", "ranks": [0], "devices": [0], "defaults": {}, "env": {}, "argv": [], "host": "127.0.0.1",
        "nodes": 1, "node_rank": 0, "world_size": 1,
        "context": {"attempt": number, "attempt_dir": str(directory / str(number))},
    }  # fmt: skip


def test_an_order_that_waited_while_its_attempt_ended_launches_no_other(tmp_path):
    async def scene():
        agent = make(tmp_path)
        await agent._on_order(order(tmp_path, 1))
        await agent._on_order({"type": "stop", "attempt": 1, "grace": False})
        first = agent.attempt
        await asyncio.wait_for(first.ended.wait(), 20)
        while agent.attempt is not None:
            await asyncio.sleep(0)
        await agent._on_order(order(tmp_path, 2))
        second = agent.attempt
        # Now the launching thread comes back from an attempt before, and takes up what has waited for it.
        agent._carry(*agent._orders.get(timeout=5))
        assert not os.path.exists(tmp_path / "1"), "launched after its end"  # noqa: ASYNC240
        assert not second._begun
        assert second.claim(), "the second was given away"

    asyncio.run(scene())


def test_an_attempt_that_ended_while_no_daemon_listened_is_not_launched_once_more(tmp_path):
    async def scene():
        agent = make(tmp_path)
        await agent._on_order(order(tmp_path, 1))
        await agent._on_order({"type": "stop", "attempt": 1, "grace": False})
        await asyncio.wait_for(agent.attempt.ended.wait(), 20)
        while agent.attempt is not None:
            await asyncio.sleep(0)
        agent._orders.get(timeout=5)
        # A daemon that has only just begun to hear of the attempt asks for it again.
        await agent._on_order(order(tmp_path, 1))
        assert agent.attempt is None
        assert agent._orders.empty()
        await agent._on_order(order(tmp_path, 2))
        assert agent.attempt.number == 2

    asyncio.run(scene())


def test_orphans_that_end_by_themselves_are_collected_and_children_are_left_to_who_waits_for_them(
    tmp_path, subreaper, monkeypatch
):
    monkeypatch.setattr(agent_module, "REAP_INTERVAL_S", 0.05)
    double_fork = "import os, sys\nif os.fork(): os._exit(0)\nif os.fork(): os._exit(0)\nos._exit(0)\n"

    async def scene():
        agent = make(tmp_path)
        task = asyncio.create_task(agent._reap_orphans())
        try:
            for _ in range(3):
                child = await asyncio.create_subprocess_exec(sys.executable, "-c", double_fork)
                assert await child.wait() == 0
            async with asyncio.timeout(20):
                while processes.dead_children():
                    await asyncio.sleep(0.01)
            # A worker is elastic's to collect for as long as its attempt lives.
            with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as worker:  # noqa: ASYNC220
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
                await agent._on_order(order(tmp_path, 1))
                agent.attempt.workers[0] = processes.identify(worker.pid)
                await asyncio.sleep(0.5)
                assert worker.wait() == 7
        finally:
            task.cancel()

    asyncio.run(scene())
