"""A daemon in this process, and both ends of its socket: the test plays the agent, or the stranger who dials."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import yaml

from ckptd import auth, jobspec, link
from ckptd.core import events as ev
from ckptd.daemon import Daemon
from ckptd.door import Door
from ckptd.ledger import Ledger
from ckptd.rundir import RunDir

RUN_ID = "0123456789ab"
PATIENCE_S = 20.0


class Bystander:
    """A launcher that starts nothing: whoever dials in is the agent."""

    def __init__(self):
        self.lives = True
        self.started, self.killed = [], []

    def nodes(self):
        return ["local"]

    def start(self, node):
        self.started.append(node)
        self.lives = True

    def alive(self, node):
        return self.lives

    def kill(self, node):
        self.killed.append(node)
        self.lives = False

    def why_dead(self, node):
        return "it was never there"


class RemoteBystander:
    """The same for agents on other machines: `arrivals` is what reaching for a node comes to."""

    def __init__(self, *nodes):
        self._nodes = nodes
        self.started, self.ended = [], []
        self.arrivals = {}

    def nodes(self):
        return list(self._nodes)

    def python(self, node):
        return None

    def start(self, node, *, replace):
        self.started.append((node, replace))

    def end(self, node):
        self.ended.append(node)

    def busy(self, node):
        return False

    def arrival(self, node):
        return self.arrivals.pop(node, None)

    def close(self, *, over):
        pass


def specification(directory: Path, **sections):
    document = {
        "version": 1, "name": "job", "command": ["train.py"], "run_dir": str(directory / "run"),
        "cluster": {"devices_per_node": 2}, "web": {"listen": None},
        "checkpoint": {"interval": {"steps": 10}, "tiers": [{"name": "disk", "path": str(directory / "ckpt")}]},
        **sections,
    }  # fmt: skip
    (directory / "train.py").write_text("")
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return jobspec.load(path)


class Wire:
    """One raw connection to a socket."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, message):
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        self.writer.write(data)

    async def receive(self):
        """The next message; None when the other end closed."""
        line = await asyncio.wait_for(self.reader.readline(), PATIENCE_S)
        return json.loads(line) if line else None

    async def wait_for(self, kind):
        while (message := await self.receive()) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"closed before any {kind}")

    async def closed(self):
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(self.reader.read(65536), PATIENCE_S):
                pass


def hello(**changes):
    return {
        "type": "hello", "protocol": link.PROTOCOL, "run_id": RUN_ID, "node": "local", "agent_id": "a1", "pid": 1,
        "devices": [{"index": 0, "id": "cpu-slot-0", "name": "cpu"}], "running": None, **changes,
    }  # fmt: skip


def event(seq, kind, **changes):
    return {
        "type": "event",
        "seq": seq,
        "kind": kind,
        "attempt": None,
        "rank": None,
        "age_s": 0.0,
        "data": {},
        **changes,
    }


class House:
    """A running daemon."""

    def __init__(self, daemon, ledger, launcher, path, door=None):
        self.daemon, self.ledger, self.launcher, self.path, self.door = daemon, ledger, launcher, path, door
        self._wires = []

    async def dial(self):
        wire = Wire(*await asyncio.open_unix_connection(self.path))
        self._wires.append(wire)
        return wire

    async def ask(self, what):
        wire = await self.dial()
        wire.send({"type": "request", "what": what})
        return await wire.receive()

    def of(self, kind):
        return [event for _, event in self.ledger.events() if isinstance(event, kind)]

    async def until(self, true):
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def living(directory: Path, *, nodes: tuple[str, ...] = (), **sections):
    """A daemon at work on a run; it is stopped at the end. With `nodes` it listens for agents on those."""
    if nodes:
        sections["cluster"] = {
            "launcher": "ssh", "hosts": list(nodes), "devices_per_node": 1, **sections.get("cluster", {}),
        }  # fmt: skip
        tier = {"name": "disk", "path": str(directory / "ckpt"), "shared": True}
        sections["checkpoint"] = {"interval": {"steps": 10}, "tiers": [tier]}
    spec = specification(directory, **sections)
    run_dir = RunDir(spec.run_dir_path)
    run_dir.create()
    launcher = RemoteBystander(*nodes) if nodes else Bystander()
    door = None
    if nodes:
        sock = socket.create_server(("127.0.0.1", 0))
        door = Door(sock=sock, secret=auth.run_secret(str(run_dir.secret_path)), epoch=0)
    with Ledger.open(run_dir.ledger_path) as ledger:
        path = run_dir.socket_path()
        daemon = Daemon(
            spec=spec, run_dir=run_dir, run_id=RUN_ID, ledger=ledger, launcher=launcher, socket_path=path, door=door
        )
        task = asyncio.create_task(daemon.run())
        house = House(daemon, ledger, launcher, path, door)
        try:
            await house.until(lambda: task.done() or house.of(ev.DaemonStarted))
            yield house
        finally:
            launcher.lives = False
            if not task.done():
                daemon.request("stop_now", source="the test's end")
            _, unfinished = await asyncio.wait([task], timeout=0.5)
            if unfinished:  # it waits for workers that nobody started
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for wire in house._wires:
                wire.writer.close()
            if door is not None:
                door.sock.close()
