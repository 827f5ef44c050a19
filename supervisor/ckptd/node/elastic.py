"""One attempt as a `LocalElasticAgent`: a fresh store, no restarts, and files where the run directory wants them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ckptd_shim import contract

STORE_TIMEOUT = timedelta(minutes=5)
MONITOR_INTERVAL_S = 0.05


def open_store(host: str) -> TCPStore:
    """A store that listens on `host` alone, on a port of the kernel's choosing.

    The listening socket is handed over, so the port is never picked, released and hoped for.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=4096) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )


class FixedRendezvous(RendezvousHandler):
    """A rendezvous without a meeting: the daemon has decided who takes part, the store is new for each attempt."""

    def __init__(self, *, run_id: str, store: TCPStore, host: str, node_rank: int, nodes: int) -> None:
        self._run_id = run_id
        self._store = store
        self._host = host
        self._node_rank = node_rank
        self._nodes = nodes

    def get_backend(self) -> str:
        return "ckptd"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(
            PrefixStore("elastic", self._store),
            self._node_rank,
            self._nodes,
            RendezvousStoreInfo(self._host, self._store.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class AttemptLogs(LogsSpecs):
    """`rank<k>.out`, `.err` and `.error.json` in the attempt's directory, and each worker's own environment."""

    def __init__(self, directory: str, environments: dict[int, dict[str, str]]) -> None:
        super().__init__(log_dir=directory)
        self._directory = directory
        self._environments = environments

    @property
    def root_log_dir(self) -> str:
        return self._directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def files(name: Callable[[int], str]) -> dict[int, str]:
            return {local: os.path.join(self._directory, name(int(env["RANK"]))) for local, env in envs.items()}

        errors = files(contract.error_name)
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
            env.update(self._environments.get(local, {}))
        return LogsDest(files(contract.stdout_name), files(contract.stderr_name), {}, {}, errors)


class AttemptAgent(LocalElasticAgent):
    """A LocalElasticAgent whose stopping is ours.

    Elastic stops survivors with SIGTERM and a fixed grace of 30 s as soon as it sees a death. Here it sees one only
    after `release` is set: by then whoever watches the workers has ended all of them, and elastic merely reaps.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, *, on_started: Callable[[dict[int, int]], None]) -> None:
        super().__init__(spec, logs, start_method="spawn", exit_barrier_timeout=0)
        self._on_started = on_started
        self.release = threading.Event()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Elastic installs handlers that raise in the main thread; the node agent's own handlers come back at once.
        kept = {
            number: signal.getsignal(number)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        }
        started: dict[int, Any] = super()._start_workers(worker_group)
        for number, handler in kept.items():
            signal.signal(number, handler)
        self._on_started({worker_group.workers[local].global_rank: pid for local, pid in started.items()})
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.release.is_set():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        # Everything is dead or has been reported as unkillable; elastic need not wait for it again.
        super()._shutdown(signal.SIGKILL, timeout=1)

    def _exit_barrier(self) -> None:
        """Nobody waits for other nodes here: the daemon knows when all of them have finished."""


def make_agent(
    *,
    run_id: str,
    attempt: int,
    host: str,
    store: TCPStore,
    node_rank: int,
    nodes: int,
    argv: list[str],
    environments: dict[int, dict[str, str]],
    directory: str,
    on_started: Callable[[dict[int, int]], None],
) -> AttemptAgent:
    """Build the agent of one attempt on this node; `environments` has one entry for each local rank."""
    spec = WorkerSpec(
        role="trainer",
        local_world_size=len(environments),
        entrypoint=argv[0],
        args=tuple(argv[1:]),
        rdzv_handler=FixedRendezvous(
            run_id=f"{run_id}-a{attempt:04d}", store=store, host=host, node_rank=node_rank, nodes=nodes
        ),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        master_addr=host,
        master_port=store.port,
    )
    return AttemptAgent(spec, AttemptLogs(directory, environments), on_started=on_started)


def warm_up() -> None:
    """Import, while idle, what torch's logging pulls in when it first logs a failure (a second or two)."""
    begun = time.monotonic()
    import torch._dynamo  # noqa: F401

    _ = time.monotonic() - begun
