"""Agents on other machines, by the user's own `ssh`: its configuration, keys, agents and ControlMaster.

ssh runs `python -m ckptd.node --stdin` on the host and returns when the agent has detached there, or with the reason why
there is none. What the agent is told, the run's secret included, goes through standard input: no command line shows it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import subprocess
import threading
from typing import Any, Literal

from ckptd import __version__
from ckptd.jobscalars import Host
from ckptd.launchers.base import Arrival, Job
from ckptd.units import shortened

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10
CALL_TIMEOUT_S = 90.0
"""For all of it: logging in, importing, finding devices."""
MOST_AT_ONCE = 64
MARK = "ckptd-node: "
OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=6",
)  # fmt: skip
"""Nobody is there to type a password; and a host that vanishes in the middle is not waited for."""


class SshLauncher:
    """One agent on each of `hosts`. `addresses`: the address of this machine that each of them is to dial."""

    def __init__(self, *, job: Job, hosts: list[Host], addresses: dict[str, str]) -> None:
        self._job = job
        self._hosts = {host.host: host for host in hosts}
        self._addresses = addresses
        self._calls: dict[str, _Call] = {}
        self._places = threading.Semaphore(MOST_AT_ONCE)

    def nodes(self) -> list[str]:
        return list(self._hosts)

    def python(self, node: str) -> str | None:
        return self._hosts[node].python

    def start(self, node: str, *, replace: bool) -> None:
        self._call(node, "start", replace=replace)

    def end(self, node: str) -> None:
        self._call(node, "kill", replace=False)

    def busy(self, node: str) -> bool:
        return node in self._calls and not self._calls[node].done.is_set()

    def arrival(self, node: str) -> Arrival | None:
        call = self._calls.get(node)
        if call is None or call.told or not call.done.is_set():
            return None
        call.told = True
        return call.arrival

    def close(self, *, over: bool) -> None:  # noqa: ARG002  no agent of ours hangs on a call
        for call in self._calls.values():
            call.abandon()

    def _call(self, node: str, what: Literal["start", "kill"], *, replace: bool) -> None:
        if self.busy(node):
            return
        host, job = self._hosts[node], self._job
        wanted = job.order(what, node=node, host=self._addresses[node], devices=host.devices, replace=replace)
        call = _Call(node, host.python or job.python, json.dumps(wanted).encode() + b"\n", self._places)
        self._calls[node] = call
        # Daemon threads: a host that hangs must not hold the end of this process.
        threading.Thread(target=call.run, name=f"ssh {node}", daemon=True).start()


class _Call:
    """One run of ssh, in a thread of its own."""

    def __init__(self, node: str, python: str, wanted: bytes, places: threading.Semaphore) -> None:
        self.node = node
        self.arrival = Arrival(ok=False, why="it was given up")
        self.done = threading.Event()
        self.told = False
        self._python = python
        self._wanted = wanted
        self._places = places
        self._process: subprocess.Popen[bytes] | None = None
        self._abandoned = False

    def run(self) -> None:
        try:
            with self._places:
                if not self._abandoned:
                    self.arrival = self._reach()
        except Exception as error:
            log.exception("ssh to %s", self.node)
            self.arrival = Arrival(ok=False, why=f"{type(error).__name__}: {error}")
        finally:
            self.done.set()

    def _reach(self) -> Arrival:
        command = ["ssh", *OPTIONS, "--", self.node, f"exec {shlex.quote(self._python)} -m ckptd.node --stdin"]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            return Arrival(ok=False, why=f"ssh cannot be started here: {error}")
        self._process = process
        try:
            out, err = process.communicate(self._wanted, timeout=CALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Arrival(ok=False, why=f"ssh {self.node} did not come to an end within {CALL_TIMEOUT_S:.0f} s")
        return understood(
            self.node, self._python, process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def abandon(self) -> None:
        self._abandoned = True
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                process.kill()


def understood(node: str, python: str, status: int, out: str, err: str) -> Arrival:
    """What ssh's exit status and what was printed mean, in words that say what to do."""
    for line in out.splitlines():
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            if answer["ok"]:
                return Arrival(ok=True, before=answer["before"])
            return Arrival(ok=False, why=f"host {node}: {answer['why']}", superseded=bool(answer.get("superseded")))
    said = shortened((err.strip().splitlines() or out.strip().splitlines() or ["nothing"])[-1])
    if status == 255:
        return Arrival(
            ok=False, why=f"host {node} cannot be reached: {said}. Does `ssh {node} true` work without a question?"
        )
    if status in (126, 127):
        return Arrival(
            ok=False, why=f"host {node} has no program {python} ({said}); say `python:` for it in cluster.hosts"
        )
    if "No module named" in err and "ckptd" in err:
        return Arrival(ok=False, why=f"host {node}: {python} has no ckptd; install ckptd {__version__} there with pip")
    return Arrival(ok=False, why=f"host {node}: {python} -m ckptd.node ended with status {status} and said {said}")
