"""A run on several nodes that are all this machine: `ssh` is a script that runs the command here, unless it is told not to.

The nodes are addresses of the loopback interface. They share the run directory, as nodes whose home is on a network file
system do, and nothing else: each has its own agent, which dials the daemon over TCP and has to prove the secret.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ckptd.core import events as ev
from ckptd.node import processes
from ckptd.node.attempt import node_file
from ckptd.node.processes import Process
from system.harness import Job

HOSTS = ("127.0.0.1", "127.0.0.2")

SSH = """#!/bin/sh
# What the tests call ssh. A file cut-<host> beside it: no network leads there.
here=$(dirname "$0")
if [ "$1" = -G ]; then echo "hostname $3"; exit; fi
while [ "$1" != -- ]; do shift; done
host=$2; shift 2
echo "$host" >> "$here/calls"
if [ -e "$here/cut-$host" ]; then echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; fi
echo "Welcome to $host!"
exec sh -c "$*"
"""


class NodesJob(Job):
    """What can be seen of a run on several nodes that share the run directory."""

    def agent(self, host: str) -> Process:
        record = json.loads((self.run_dir / node_file("agent", host, "json")).read_text())
        return Process(record["pid"], record["start_time"])

    def workers_on(self, host: str, attempt: int) -> dict[int, int]:
        """rank -> pid."""
        started = [e for e in self.of(ev.WorkersStarted) if e.attempt == attempt and e.node == host]
        return {int(rank): worker["pid"] for e in started for rank, worker in e.workers.items()}

    def alive_on(self, host: str, attempt: int) -> list[int]:
        """Pids of an attempt's workers on a node that live."""
        started = [e for e in self.of(ev.WorkersStarted) if e.attempt == attempt and e.node == host]
        workers = [Process(w["pid"], w["start_time"]) for e in started for w in e.workers.values()]
        return [w.pid for w in workers if processes.alive(w)]


class Nodes(NodesJob):
    """One run on `hosts`, with one device each where nothing else is said."""

    def __init__(self, directory: Path, *args: str, hosts: tuple[Any, ...] = HOSTS, **sections: Any) -> None:
        cluster = {
            "launcher": "ssh", "hosts": list(hosts), "devices_per_node": 1, "heartbeat_timeout": "13s",
            "fence_timeout": "8s", **sections.pop("cluster", {}),
        }  # fmt: skip
        super().__init__(directory, *args, cluster=cluster, **sections)
        self.spec["checkpoint"]["tiers"][0]["shared"] = True
        self._write()
        self.bin = directory / "bin"
        self.bin.mkdir()
        script = self.bin / "ssh"
        script.write_text(SSH)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def start(self, *options: str, env: dict[str, str] | None = None) -> Any:
        return super().start(*options, env={"PATH": f"{self.bin}:{os.environ['PATH']}", **(env or {})})

    def cut(self, host: str) -> None:
        """No ssh to this host from now on."""
        (self.bin / f"cut-{host}").touch()

    def mend(self, host: str) -> None:
        (self.bin / f"cut-{host}").unlink()
