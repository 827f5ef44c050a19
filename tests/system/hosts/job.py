"""A run on hosts of a cluster: the daemon on one of them, agents and workers on the others, watched from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from ckptd.core import events as ev
from ckptd.node.attempt import node_file
from system.harness import Job
from system.hosts.cluster import Cluster, Host, environment
from system.hosts.watcher import Watcher


class HostsJob(Job):
    """`ckptd run` on the host `head`. Run directory: on each host's own disk. Tier: on the directory that all share."""

    def __init__(
        self, machines: Cluster, name: str, *args: str, hosts: tuple[Any, ...], head: str = "h1", **sections: Any
    ) -> None:
        self.cluster = machines
        self.head = machines[head]
        settings = {
            "launcher": "ssh", "hosts": list(hosts), "devices_per_node": 1, "heartbeat_timeout": "10s",
            "fence_timeout": "3s", **sections.pop("cluster", {}),
        }  # fmt: skip
        self.inside = f"/tmp/shared/{name}"
        super().__init__(machines.shared / name, *args, cluster=settings, **sections)
        self.run_dir_inside = f"/tmp/runs/{name}"
        self.run_dir = self.on_disk(self.head)
        self.spec["checkpoint"]["tiers"][0].setdefault("shared", True)
        # What it is called there.
        self.spec = json.loads(json.dumps(self.spec).replace(str(self.directory), self.inside))
        self.spec["run_dir"] = self.run_dir_inside
        self.path.write_text(yaml.safe_dump(self.spec))
        self.watcher = Watcher(lambda: [(host.name, p) for host in machines.hosts for p, _ in host.processes()])

    def on_disk(self, host: Host) -> Path:
        """The run directory on a host."""
        return host.tmp / self.run_dir_inside.removeprefix("/tmp/")

    # --- the command line, on the head node ---

    def start(self, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        command = self.head.inside(sys.executable, "-m", "ckptd", "run", *options, f"{self.inside}/job.yaml")
        with open(self.output_path, "ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**environment(), **(env or {})},
            )  # fmt: skip
        return self.process

    def ckptd(self, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        inside = [self.run_dir_inside if arg == str(self.run_dir) else arg for arg in args]
        return self.head.run(sys.executable, "-m", "ckptd", *inside, check=False, timeout=timeout)

    def kill_daemon(self) -> None:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        self.process.wait()

    # --- what runs where ---

    def kill_agent(self, host: Host) -> None:
        record = json.loads((self.on_disk(host) / node_file("agent", host.name, "json")).read_text())
        os.kill(host.outer_pid(record["pid"]), signal.SIGKILL)

    def kill_worker(self, host: Host) -> None:
        """One of the newest attempt's."""
        living = self.watcher.workers()
        pid = next(process.pid for name, process in living[max(living)] if name == host.name)
        os.kill(pid, signal.SIGKILL)

    def training(self, attempt: int, *, on: set[str], after: int = 0) -> ev.SaveCommitted:
        """Wait until that attempt has committed a step beyond `after`, with workers on exactly these hosts."""
        saved: ev.SaveCommitted = self.wait_for(ev.SaveCommitted, lambda e: e.attempt == attempt and e.step > after)
        launched = self.launched(attempt)
        assert set(launched.placement) == on, self.story()
        self.wait_until(lambda: self.watcher.seen.get(attempt) == on, f"attempt {attempt} is seen on {on}")
        return saved

    def launched(self, attempt: int) -> ev.AttemptLaunched:
        found: ev.AttemptLaunched = self.wait_for(ev.AttemptLaunched, lambda e: e.attempt == attempt)
        return found

    def story(self) -> str:
        """What happened between hosts: without the saves, of which there are many."""
        lines = super().story().splitlines()
        return "\n".join(line for line in lines if not re.search(r" (save_staged|checkpoint_deleted|progress) ", line))

    def left_on(self, host: Host) -> list[str]:
        """What lives on a host although the run is over."""
        return [f"{host.name}: {process.pid} {command}" for process, command in host.processes()]

    def left_over(self) -> list[str]:
        return [line for host in self.cluster.hosts for line in self.left_on(host)]

    def close(self) -> None:
        self.watcher.close()
        for line in self.left_over():
            os.kill(int(line.split()[1]), signal.SIGKILL)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()
