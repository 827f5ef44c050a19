"""The agent's end of the forkserver: keeps one ready, forks workers from it, and says why when it cannot."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.node.processes import BIRTHS, FORKSERVER_MARK
from ckptd_shim import contract

READY_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Cold(Exception):
    """Workers cannot be forked now: why. They are started afresh instead."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a forkserver is made of; another recipe needs another server."""

    python: str
    env: tuple[tuple[str, str], ...]
    """Variables that must stand before torch is imported, on top of the agent's own."""
    cwd: str
    path: str | None
    """Directory that preloaded modules may be found in: the script's."""
    preload: tuple[str, ...]

    @classmethod
    def from_message(cls, data: dict[str, Any]) -> Recipe:
        """As the daemon sends it."""
        env, preload = tuple(sorted(environment(data["defaults"], data["env"]).items())), tuple(data["preload"])
        return cls(python=data["python"], env=env, cwd=data["cwd"], path=data["path"], preload=preload)


def environment(defaults: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Variables of every worker, on top of this process's own: `settings` over these over `defaults`."""
    return {key: value for key, value in defaults.items() if key not in os.environ} | dict(settings)


def become_subreaper() -> None:
    """Have orphans below this process become its children instead of init's: forked workers, and what they leave."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ForkServer:
    """One forkserver process. `start` returns at once; `fork` waits until it is ready."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = threading.Event()
        self._why_not: str | None = None
        self._refused = False
        self._sources: list[list[Any]] = []
        self._lines: Any = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """It is importing, or ready to fork."""
        return self._process is not None and self._process.poll() is None and self._why_not is None

    @property
    def refused(self) -> bool:
        """It said itself that it must not fork: another one of the same recipe would say the same."""
        return self._refused

    def start(self) -> None:
        """Start importing, in the background."""
        ours, theirs = socket.socketpair()
        with theirs, BIRTHS:
            try:
                self._process = subprocess.Popen(
                    [self.recipe.python, "-u", "-m", "ckptd_shim.forkserver", str(theirs.fileno())],
                    cwd=self.recipe.cwd,
                    env={**os.environ, **dict(self.recipe.env), contract.ENV_ATTEMPT: FORKSERVER_MARK},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._why_not = f"the forkserver cannot be started: {error}"
                self._ready.set()
                return
        self._socket = ours
        self._lines = ours.makefile("rb")
        threading.Thread(target=self._await_ready, name="forkserver", daemon=True).start()

    def _await_ready(self) -> None:
        assert self._socket is not None
        try:
            self._send({"preload": list(self.recipe.preload), "path": self.recipe.path})
            answer = json.loads(self._lines.readline() or b"{}")
        except (OSError, ValueError) as error:
            answer = {"why": str(error)}
        if answer.get("type") == "ready":
            self._sources = answer["sources"]
        else:
            self._refused = answer.get("type") == "refused"
            self._sources = answer.get("sources", [])
            self._why_not = str(answer.get("why") or "the forkserver died while it imported torch; see the agent's log")
        self._ready.set()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def outdated(self) -> bool:
        """Whether the code of a preloaded module has changed since it was imported."""
        for path, mtime_ns, size in self._sources:
            try:
                stat = os.stat(path)
            except OSError:
                return True
            if (stat.st_mtime_ns, stat.st_size) != (mtime_ns, size):
                return True
        return False

    @property
    def settled(self) -> bool:
        """It is ready, or will never be."""
        return self._ready.is_set()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises Cold when this server will not fork, or is not ready in time."""
        if not self._ready.wait(timeout_s):
            raise Cold(f"the forkserver was not ready within {timeout_s:.0f} s")
        if self._why_not is not None:
            raise Cold(self._why_not)

    def fork(self, orders: list[dict[str, Any]], *, patience_s: float = READY_TIMEOUT_S) -> list[int]:
        """Fork a worker for each order ({argv, env, cwd, stdout, stderr}); returns their pids, children of this process.

        Raises:
            Cold: the server is not ready, died or refused. It is ended, and what it forked is the caller's to end.
        """
        self.wait_ready(patience_s)
        assert self._socket is not None
        pids: list[int] = []
        self._socket.settimeout(FORK_TIMEOUT_S)
        try:
            for order in orders:
                self._send(order)
            for _ in orders:
                answer = json.loads(self._lines.readline() or b"{}")
                if answer.get("type") != "forked" or not answer["pid"]:
                    raise Cold(str(answer.get("why") or "the forkserver died"))
                pids.append(int(answer["pid"]))
        except (OSError, ValueError) as error:
            self._why_not = f"the forkserver does not answer: {error}"
            self.close()  # else it may yet carry out an order that it has read
            raise Cold(self._why_not) from None
        except Cold as error:
            self._why_not = str(error)
            self.close()
            raise
        return pids

    def close(self) -> None:
        """End it; workers that it forked live on."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)


class Warmth:
    """Keeps a forkserver of the right recipe at hand. Used from two threads: one launches, one looks after it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._late = False
        """A server was not ready in time: its successors are not waited for."""
        self.why_cold = ""

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    def kindle(self) -> None:
        """Have a server importing or ready. One that refused is not asked again before its modules change."""
        with self._lock:
            self._kindle()

    def _kindle(self) -> ForkServer:
        server = self._server
        if server is not None and not server.outdated() and (server.alive or server.refused):
            return server
        if server is not None:
            server.close()
        self._server = server = ForkServer(self.recipe)  # known before it is there, see BIRTHS
        server.start()
        return server

    def fork(self, orders: list[dict[str, Any]]) -> list[int]:
        """Fork workers; raises Cold when they must be started afresh, once those that came to be are ended."""
        with self._lock:
            server = self._kindle()
            try:
                pids = server.fork(orders, patience_s=0.0 if self._late else READY_TIMEOUT_S)
            except Cold as error:
                self._late = self._late or not server.settled
                self.why_cold = str(error)
                raise
        self.why_cold, self._late = "", False
        return pids

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
