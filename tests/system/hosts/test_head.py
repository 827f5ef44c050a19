"""The head node goes away while others train, and who dials it over the network without the secret gets nowhere."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from ckptd.core import events as ev
from ckptd.errors import ExitStatus
from system.checks import assert_told_once
from system.hosts.checks import (
    STEPS,
    TRAINING,
    assert_losses_so_far,
    assert_resumed_right,
    assert_told_truly,
    steps_pass,
    stop,
)  # fmt: skip

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

STRANGER = """
import asyncio, json, socket, sys
from ckptd.link import AgentLink

host, port, run_id = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def says(data):
    with socket.create_connection((host, port), timeout=20) as sock:
        assert json.loads(sock.makefile("rb").readline())["type"] == "challenge"
        try:
            sock.sendall(data)
            return sock.recv(1000)
        except (ConnectionResetError, BrokenPipeError):
            return b""

for data in (b"GET / HTTP/1.1\\r\\n", b"x" * (80 << 20), b'{"type": "request", "what": "stop"}\\n'):
    assert says(data) == b"", data[:40]

idle = [socket.create_connection((host, port), timeout=20) for _ in range(200)]

async def with_another_secret():
    async def on_order(order):
        raise AssertionError(f"an order for a stranger: {order}")
    hello = lambda: {"node": "h2", "agent_id": "stranger", "run_id": run_id, "devices": []}
    link = AgentLink((host, port), hello=hello, on_order=on_order, secret=bytes(32))
    try:
        await asyncio.wait_for(link.run(), 3)
    except TimeoutError:
        assert not link.connected
asyncio.run(with_another_secret())
print("nothing")
"""


def test_strangers_on_the_network(make_run, cluster, reference):
    """Noise, a line of 80 MB, two hundred idle connections, an agent with another secret: training takes no notice."""
    job = make_run(*TRAINING, hosts=("h1", "h2"))
    job.start()
    job.training(1, on={"h1", "h2"})
    address = json.loads((job.run_dir / "listen.json").read_text())
    stranger = cluster["h3"].run(
        sys.executable, "-c", STRANGER, cluster["h1"].address, str(address["port"]), str(job.run_id)
    )
    assert stranger.stdout == "nothing\n"
    assert_told_truly(job, attempt=1, world=2)
    stop(job)
    assert len(job.of(ev.AgentConnected)) == 2, job.story()
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))
    assert "Traceback" not in job.output()


def test_the_head_node_is_cut_off_and_another_takes_over(make_run, cluster, reference):
    """Two hosts train on without it and lose not a step; when it is back, its daemon is turned away."""
    job = make_run(*TRAINING, hosts=("h2", "h3"))
    job.start()
    job.training(1, on={"h2", "h3"})
    old = job.process
    cluster["h1"].cut()
    steps_pass(job, 10)
    job.head = cluster["h2"]
    copied = job.on_disk(job.head)
    for path in job.run_dir.iterdir():  # onto the run directory that the node has
        if path.is_file():
            shutil.copy2(path, copied / path.name)
    job.run_dir = copied
    job.start("--take-over")
    job.wait_for(ev.AgentConnected, lambda e: e.running == 1 and e.node == "h3" and e.t > job.of(ev.DaemonStarted)[1].t)
    steps_pass(job, 10)
    assert_told_truly(job, attempt=1, world=2)

    cluster["h1"].heal()
    assert old.wait(90) == ExitStatus.USAGE
    stop(job)
    assert len(job.of(ev.AttemptLaunched)) == 1
    assert not job.of(ev.Interrupted)
    assert_resumed_right(job)
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))


def test_the_head_node_trains_too_and_loses_its_power(make_run, cluster, reference):
    """Its daemon, its agent and rank 0 are gone at once; the other host ends its worker by itself; `ckptd run` goes on."""
    # An agent may take long to start on a busy machine: until then h1 is not to count as lost.
    job = make_run(*TRAINING, hosts=("h1", "h2"), cluster={"heartbeat_timeout": "40s"})
    job.start()
    job.training(1, on={"h1", "h2"})
    cluster["h1"].power_off()
    job.process.wait()
    job.wait_until(lambda: not job.watcher.workers(), "h2 ends its worker")
    cluster["h1"].power_on()
    job.start()
    job.training(2, on={"h1", "h2"})
    assert_told_truly(job, attempt=2, world=2)
    stop(job)
    (lost,) = job.of(ev.Interrupted)
    assert (lost.severity, lost.node) == ("node", "h1"), "h2 did nothing wrong"
    assert_resumed_right(job)
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))
