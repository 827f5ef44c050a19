"""The agent as a child in its own session on this machine: no terminal, no signal of ours reaches it by accident."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from ckptd.errors import LaunchError
from ckptd.node import processes
from ckptd.node.processes import Process
from ckptd.node.reports import tail_of
from ckptd_shim import contract

NODE = "local"


class LocalLauncher:
    """One node, this one."""

    def __init__(self, *, run_dir: str, run_id: str, socket: str, workdir: str, devices: int | None) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._socket = socket
        self._workdir = workdir
        self._devices = devices
        self._record = os.path.join(run_dir, f"agent-{NODE}.json")
        self._log = os.path.join(run_dir, f"agent-{NODE}.log")
        self._child: subprocess.Popen[bytes] | None = None

    def nodes(self) -> list[str]:
        return [NODE]

    def start(self, node: str) -> None:
        options = {
            "run_dir": self._run_dir,
            "run_id": self._run_id,
            "node": node,
            "socket": self._socket,
            "devices_wanted": self._devices,
        }
        # ckptd may itself run inside a worker of another run, whose marks must not be taken for this one's.
        inherited = {k: v for k, v in os.environ.items() if k not in (contract.ENV_ATTEMPT, contract.ENV_LAUNCH)}
        try:
            with open(self._log, "ab") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "ckptd.node", json.dumps(options)],
                    cwd=self._workdir,
                    env={**inherited, contract.ENV_RUN_ID: self._run_id, contract.ENV_NODE: node},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"the node agent cannot be started: {error}") from None
        agent = processes.identify(self._child.pid)
        if agent is not None:
            document = json.dumps({"pid": agent.pid, "start_time": agent.start_time})
            contract.write_atomically(self._record, document.encode())

    def alive(self, node: str) -> bool:  # noqa: ARG002  there is only one
        if self._child is not None:
            return self._child.poll() is None
        agent = self._recorded()
        return agent is not None and processes.alive(agent)

    def kill(self, node: str) -> None:  # noqa: ARG002
        agent = processes.identify(self._child.pid) if self._child is not None else self._recorded()
        if agent is not None:
            processes.send(agent, signal.SIGKILL)

    def _recorded(self) -> Process | None:
        """The agent that a daemon before this one started."""
        try:
            with open(self._record, "rb") as file:
                record = json.load(file)
            return Process(int(record["pid"]), int(record["start_time"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def why_dead(self, node: str) -> str:  # noqa: ARG002
        if self._child is None:  # the log's last words need not be its own, and its status was another's to hear
            return f"the agent that an earlier ckptd started is gone; its log is {self._log}"
        status = self._child.returncode
        last = tail_of(self._log, 2000).strip().rpartition("\n")[2]
        return f"agent ended with status {status}; its last words in {self._log}: {last}"
