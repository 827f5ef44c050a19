"""One attempt as a `LocalElasticAgent`: a fresh store, no restarts, and files where the run directory wants them."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ckptd.node.warm import Cold, Warmth
from ckptd_shim import contract

log = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(minutes=5)
MONITOR_INTERVAL_S = 0.02
_ELASTIC_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
    """A rendezvous without a meeting: the daemon has decided who takes part, the store is new for each attempt.

    `store` None: the first node keeps it open at `host` and `port`, where the workers meet.
    """

    def __init__(
        self, *, run_id: str, store: TCPStore | None, host: str, port: int, node_rank: int, nodes: int
    ) -> None:
        self._run_id = run_id
        self._store: Store = HashStore() if store is None else store
        self._host = host
        self._port = port
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
            RendezvousStoreInfo(self._host, self._port),
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


class WarmContext(PContext):
    """Workers that were forked from the forkserver, as elastic wants to see processes: they are our children too."""

    def __init__(self, pids: dict[int, int], **settings: Any) -> None:
        super().__init__(**settings)
        self._pids = pids
        self._exitcodes: dict[int, int] = {}

    def _start(self) -> None:
        """They run already."""

    def pids(self) -> dict[int, int]:
        return self._pids

    def _poll(self) -> RunProcsResult | None:
        for local, pid in self._pids.items():
            if local in self._exitcodes:
                continue
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, signal.SIGKILL  # reaped by a sweep
            if done:
                self._exitcodes[local] = os.waitstatus_to_exitcode(status)
        failures = {
            local: ProcessFailure(local, self._pids[local], code, self.error_files[local])
            for local, code in self._exitcodes.items()
            if code
        }
        if not failures and len(self._exitcodes) < len(self._pids):
            return None
        finished = RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)
        if not failures:
            finished.return_values = dict.fromkeys(self._pids)
        return finished

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:  # noqa: ARG002
        """Reap what is left to reap; whoever released the agent has ended everybody."""
        self._poll()


class AttemptAgent(LocalElasticAgent):
    """A LocalElasticAgent whose starting may be warm, and whose stopping is ours.

    Elastic stops survivors with SIGTERM and a fixed grace of 30 s as soon as it sees a death. Here it sees one only
    after `release` is set: by then whoever watches the workers has ended all of them, and elastic merely reaps.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        *,
        ranks: list[int],
        world_size: int,
        warmth: Warmth | None,
        on_started: Callable[[dict[int, int], bool], None],
        clear: Callable[[], None],
    ) -> None:
        super().__init__(spec, logs, start_method="spawn", exit_barrier_timeout=0)
        self._ranks = ranks
        self._world_size = world_size
        self._warmth = warmth
        self._on_started = on_started
        self._clear = clear
        self.release = threading.Event()

    def _assign_worker_ranks(
        self,
        store: Store,  # noqa: ARG002  elastic's signature
        group_rank: int,  # noqa: ARG002
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,  # noqa: ARG002
    ) -> list[Worker]:
        """The daemon has said which ranks are here: no agent has to wait for those of other nodes to find that out."""
        return [
            Worker(
                local_rank=local, global_rank=rank, role_rank=rank, world_size=self._world_size,
                role_world_size=self._world_size,
            )
            for local, rank in enumerate(self._ranks)
        ]  # fmt: skip

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Elastic installs handlers that raise in the main thread; the node agent's own handlers come back at once.
        kept = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}
        started: dict[int, Any] | None = None
        if self._warmth is not None:
            try:
                started = self._start_warm(worker_group, self._warmth)
            except Cold as error:
                log.warning("cold start: %s", error)
                # Some may have been forked, and more than were told of: no rank may be there twice.
                self._clear()
        warm = started is not None
        if started is None:
            started = super()._start_workers(worker_group)
        for number, handler in kept.items():
            signal.signal(number, handler)
        if not warm:
            self._have_logs_appended()
        self._on_started({worker_group.workers[local].global_rank: pid for local, pid in started.items()}, warm)
        return started

    def _have_logs_appended(self) -> None:
        """Let logs be cut behind their writers (see `logs`): elastic opens them without O_APPEND, and shares its files."""
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            for stream in (handler._stdout, handler._stderr):
                if stream is not None:
                    fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_APPEND)

    def _start_warm(self, worker_group: WorkerGroup, warmth: Warmth) -> dict[int, Any]:
        """As `LocalElasticAgent._start_workers`, with a fork in place of an exec."""
        spec = worker_group.spec
        environments = {
            worker.local_rank: self._elastic_environment(worker_group, worker) for worker in worker_group.workers
        }
        script = list(spec.args)[list(spec.args).index("--") + 1 :]
        context = WarmContext(
            {},
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={local: tuple(script) for local in environments},
            envs=environments,
            logs_specs=self._logs_specs,
        )
        orders = [
            {
                "argv": script,
                "env": {**os.environ, **environments[local]},
                "cwd": os.getcwd(),
                "stdout": context.stdouts[local],
                "stderr": context.stderrs[local],
            }
            for local in sorted(environments)
        ]
        context._pids.update(enumerate(warmth.fork(orders)))
        self._pcontext = context
        context.start()
        return dict(context.pids())

    @staticmethod
    def _elastic_environment(group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """The variables that torchrun gives a worker."""
        spec = group.spec
        return {
            "LOCAL_RANK": str(worker.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.release.is_set():
            return RunResult(state=WorkerState.HEALTHY)
        if self._pcontext is not None and not all(map(_has_ended, self._pcontext.pids().values())):
            # It cannot be killed, which was told: elastic would wait for it, for a minute or for ever.
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        # Everything is dead or has been reported as unkillable; elastic need not wait for it again, nor a launch for that.
        super()._shutdown(signal.SIGKILL, timeout=0)

    def _exit_barrier(self) -> None:
        """Nobody waits for other nodes here: the daemon knows when all of them have finished."""


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # and was collected


def make_agent(
    *,
    run_id: str,
    attempt: int,
    host: str,
    port: int,
    store: TCPStore | None,
    node_rank: int,
    nodes: int,
    ranks: list[int],
    world_size: int,
    argv: list[str],
    environments: dict[int, dict[str, str]],
    directory: str,
    warmth: Warmth | None,
    on_started: Callable[[dict[int, int], bool], None],
    clear: Callable[[], None],
) -> AttemptAgent:
    """Build the agent of one attempt on this node; `environments` has one entry for each local rank.

    `clear` ends what there is of the attempt before its workers are started once more.
    """
    spec = WorkerSpec(
        role="trainer",
        local_world_size=len(environments),
        entrypoint=argv[0],
        args=tuple(argv[1:]),
        rdzv_handler=FixedRendezvous(
            run_id=f"{run_id}-a{attempt:04d}", store=store, host=host, port=port, node_rank=node_rank, nodes=nodes
        ),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        master_addr=host,
        master_port=port,
    )
    return AttemptAgent(
        spec, AttemptLogs(directory, environments), ranks=ranks, world_size=world_size, warmth=warmth,
        on_started=on_started, clear=clear,
    )  # fmt: skip


def warm_up() -> None:
    """Import, while idle, what torch's logging pulls in when it first logs a failure (a second or two)."""
    import torch._dynamo  # noqa: F401
