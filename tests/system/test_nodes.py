"""Two nodes, one job: whatever is killed, silenced or cut off, there is one attempt, from the newest commit."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from ckptd.core import events as ev
from ckptd.node import processes
from system.checks import assert_same_losses, newest_on_disk
from system.nodes import HOSTS, Nodes

pytestmark = pytest.mark.system


@pytest.fixture
def make_nodes(tmp_path):
    made = []

    def make(*args, **options):
        made.append(Nodes(tmp_path / f"nodes{len(made)}", *args, **options))
        return made[-1]

    yield make
    over = [job for job in made if job.process is None or job.process.poll() is not None]
    deadline = time.monotonic() + 20
    # An agent that was told to leave does so a moment after the daemon.
    while (left := [line for job in over for line in job.left_over()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for job in made:
        job.close()
    assert not left, f"left over: {left}"


@pytest.mark.timeout(300)
def test_a_worker_an_agent_and_the_daemon_are_killed_one_after_the_other(make_nodes, reference):
    """One run, so that each fault meets what the one before it left."""
    first, second = HOSTS
    job = make_nodes("--steps", "260", "--pause", "0.1")
    job.start()
    job.wait_for(ev.SaveCommitted)
    os.kill(job.workers_on(second, 1)[1], signal.SIGKILL)
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    assert not job.alive_on(first, 1)
    assert not job.alive_on(second, 1), "all end before any starts"

    workers = [*job.workers_on(first, 2).values(), *job.workers_on(second, 2).values()]
    processes.send(job.agent(second), signal.SIGKILL)
    job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 3)
    assert not any(map(job.alive_on, HOSTS, (2, 2))), f"orphans of {workers} live"
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 3)

    agents = [job.agent(host) for host in HOSTS]
    job.process.kill()
    job.process.wait()
    trained = max(job.losses())
    job.wait_until(lambda: max(job.losses()) > trained + 5, "training goes on without a daemon")
    port = json.loads((job.run_dir / "listen.json").read_text())["port"]
    job.start()
    for host in HOSTS:
        job.wait_for(ev.AgentConnected, lambda e, host=host: e.node == host and e.running == 3)
    assert [job.agent(host) for host in HOSTS] == agents
    assert json.loads((job.run_dir / "listen.json").read_text())["port"] == port
    assert job.wait() == 0, job.output() + job.story()

    told = [(e.attempt, e.cause, e.severity, e.node, e.rank) for e in job.of(ev.Interrupted)]
    assert told == [(1, "signal", "process", second, 1), (2, "agent_lost", "node", second, None)], job.story()
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1, 2, 3]
    saves = [e.sequence for e in job.of(ev.SaveCommitted)]
    assert saves == sorted(set(saves)), "each save is told once, by the node of rank 0 alone"
    assert {e.node for e in job.of(ev.SaveCommitted)} == {first}
    assert_same_losses(job, reference(260))


def test_a_node_out_of_reach_is_done_without_and_taken_up_again(make_nodes):
    first, second = HOSTS
    job = make_nodes("--steps", "100000", "--pause", "0.03")
    job.start()
    job.wait_for(ev.SaveCommitted)
    agent = job.agent(second)
    job.cut(second)
    processes.send(agent, signal.SIGSTOP)
    try:
        lost = job.wait_for(ev.NodeLost)
        launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
        assert lost.node == second
        assert launched.placement == {first: [0]}
        assert not job.alive_on(first, 1)
        newest = newest_on_disk(job, before=2)
        assert (launched.resume["sequence"], launched.resume["step"]) == (newest.sequence, newest.step)
        job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    finally:
        processes.send(agent, signal.SIGCONT)
    # The very agent comes back, and has ended what it carried: its node is used again after a commit.
    grown = job.wait_for(ev.AttemptLaunched, lambda e: e.world_size == 2 and e.attempt > 2)
    assert not job.alive_on(second, 1)
    assert not job.alive_on(first, 2)
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == grown.attempt)
    assert job.agent(second) == agent
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    first_loss = job.of(ev.Interrupted)[0]
    assert (first_loss.cause, first_loss.severity, first_loss.node) == ("node_lost", "node", second)


def test_the_run_is_taken_over_on_another_port_and_then_a_whole_node_dies(make_nodes):
    """As on another machine: the lock names a host that is not this one, and agents know an address that leads nowhere."""
    first, second = HOSTS
    job = make_nodes("--steps", "100000", "--pause", "0.03")
    job.start()
    job.wait_for(ev.SaveCommitted)
    job.process.kill()
    job.process.wait()
    lock = job.run_dir / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "elsewhere", "boot_id": "another"}))
    refused = job.ckptd("run", str(job.path))
    assert refused.returncode == 64
    assert "pass --take-over" in refused.stderr
    port = json.loads((job.run_dir / "listen.json").read_text())["port"]
    with socket.create_server(("127.0.0.1", port)):  # it takes calls, and says nothing
        job.start("--take-over")
        for host in HOSTS:
            job.wait_for(ev.AgentConnected, lambda e, host=host: e.node == host and e.running == 1)
        told = json.loads((job.run_dir / "listen.json").read_text())
        assert told["port"] != port
        assert told["epoch"] == 1
    trained = max(job.losses())
    job.wait_until(lambda: max(job.losses()) > trained + 5, "the same attempt trains on")
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1]

    victims = [job.agent(second), *map(processes.identify, job.workers_on(second, 1).values())]
    for victim in victims:
        processes.send(victim, signal.SIGKILL)
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert not any(map(processes.alive, victims))
    assert not job.alive_on(first, 1)
    assert launched.world_size == 2
    newest = newest_on_disk(job, before=2)
    assert (launched.resume["sequence"], launched.resume["step"]) == (newest.sequence, newest.step)
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    (lost,) = job.of(ev.Interrupted)
    assert (lost.cause, lost.severity, lost.node) == ("agent_lost", "node", second), job.story()
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
