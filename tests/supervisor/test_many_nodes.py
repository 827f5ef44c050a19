"""Many nodes at once, over TCP: nobody is turned away, nothing is done once for each of them that could be done once."""

from __future__ import annotations

import asyncio
import contextlib

from daemons import RUN_ID, RemoteBystander, specification

from ckptd import door, link
from ckptd.core import events as ev
from ckptd.core.state import Status
from ckptd.daemon import Daemon
from ckptd.door import open_door
from ckptd.ledger import Ledger
from ckptd.link import AgentLink
from ckptd.rundir import RunDir

PATIENCE_S = 60.0


class PaperNode:
    """The agent of a node, as far as it talks."""

    def __init__(self, name, address, secret):
        self.name, self.orders = name, []
        self.link = AgentLink(address, hello=self._hello, on_order=self._on_order, secret=secret)

    def _hello(self):
        return {"node": self.name, "agent_id": self.name, "run_id": RUN_ID, "pid": 7, "running": None,
                "devices": [{"index": 0, "id": f"GPU-{self.name}"}, {"index": 1, "id": f"GPU-{self.name}-1"}]}  # fmt: skip

    async def _on_order(self, order):
        self.orders.append(order)
        if order["type"] == "ask" and order["what"] == "health":
            self.link.event("health_reported")
        elif order["type"] == "ask":
            self.link.event("inventory_reported")
        elif order["type"] == "store":
            self.link.event("store_opened", attempt=order["attempt"], host="127.0.0.1", port=1)
        elif order["type"] == "launch":
            self.link.event("workers_started", attempt=order["context"]["attempt"])


@contextlib.asynccontextmanager
async def fleet(directory, size):
    """A daemon in this process, and `size` nodes that dial it at the same moment."""
    names = [f"n{i:03d}" for i in range(size)]
    tier = {"name": "disk", "path": str(directory / "ckpt"), "shared": True}
    spec = specification(
        directory, cluster={"launcher": "ssh", "hosts": names, "devices_per_node": 2, "listen": "127.0.0.1:0"},
        checkpoint={"interval": {"steps": 10}, "tiers": [tier]},
    )  # fmt: skip
    run_dir = RunDir(spec.run_dir_path)
    run_dir.create()
    with Ledger.open(run_dir.ledger_path) as ledger:
        opened = open_door(spec, run_dir, epoch=0)
        daemon = Daemon(
            spec=spec, run_dir=run_dir, run_id=RUN_ID, ledger=ledger, launcher=RemoteBystander(*names), door=opened,
            socket_path=run_dir.socket_path(),
        )  # fmt: skip
        nodes = [PaperNode(name, ("127.0.0.1", opened.port), opened.secret) for name in names]
        tasks = [asyncio.create_task(daemon.run()), *(asyncio.create_task(node.link.run()) for node in nodes)]
        try:
            yield daemon, ledger, nodes
        finally:
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_hundred_and_fifty_nodes_that_dial_at_once_are_launched_on_together(tmp_path):
    size = 150
    assert size > 2 * link.MAX_STRANGERS
    commits = []

    async def scene():
        async with fleet(tmp_path, size) as (daemon, ledger, nodes):
            ledger._db.conn.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
            async with asyncio.timeout(PATIENCE_S):
                while daemon.picture.run.status is not Status.INITIALISING:
                    await asyncio.sleep(0.01)
                while any(node.link.unacknowledged for node in nodes):
                    await asyncio.sleep(0.01)
            return [event for _, event in ledger.events()], nodes

    events, nodes = asyncio.run(scene())
    for kind in (ev.AgentConnected, ev.HealthReported, ev.WorkersStarted):
        assert sum(isinstance(event, kind) for event in events) == size, kind
    assert len(commits) < len(events) / 3, "what comes at once is written at once"
    launches = [[o for o in node.orders if o["type"] == "launch"] for node in nodes]
    assert all(len(told) == 1 for told in launches)
    assert [told[0]["ranks"] for told in launches] == [[2 * i, 2 * i + 1] for i in range(size)]
    assert {told[0]["world_size"] for told in launches} == {2 * size}


def test_every_node_gets_a_descriptor_if_the_system_allows(monkeypatch):
    asked = []
    monkeypatch.setattr(door.resource, "getrlimit", lambda _: (1024, 8192))
    monkeypatch.setattr(door.resource, "setrlimit", lambda _, limits: asked.append(limits))
    door._make_room(100)
    assert asked == []
    door._make_room(2048)
    door._make_room(10_000)
    assert asked == [(2 * 2048 + door.OTHER_FILES, 8192), (8192, 8192)]
