"""Agents on the nodes of a Slurm allocation: one `srun` with a task per node, in which each task becomes the agent.

A step ends with its srun, so srun has a session of its own, writes to a file, and is never ended while an agent of it is
wanted: it outlives the daemon, and the agents dial the next one. What agents are told, the run's secret included, goes
through srun's standard input to every task; a task knows its node by SLURMD_NODENAME. An agent that is missing is started by
a further srun for its node, over what the step before still holds there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckptd import slurmcalls
from ckptd.errors import UsageError
from ckptd.launchers.base import Arrival, Job
from ckptd.node.arrival import MARK
from ckptd.node.attempt import node_file
from ckptd.node.reports import tail_of
from ckptd.units import shortened

log = logging.getLogger(__name__)

GATHER_S: Final = 0.05
"""Nodes that are started within so short a time share an srun."""
ANSWER_TIMEOUT_S: Final = 90.0
"""For all of it: making the step, importing, finding devices."""
LOOK_S: Final = 0.1
FAREWELL_S: Final = 10.0
"""How long steps may take to end once their agents have left."""
MOST_AT_ONCE: Final = 16
"""Steps that are being started at once: the controller serves others too."""
OLD_LOGS: Final = 20

_OPTIONS: Final = (
    "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--mem=0", "--cpu-bind=none",
    "--mpi=none", "--export=ALL", "--unbuffered", "--job-name=ckptd",
)  # fmt: skip
"""A lost node or agent ends no other one, whatever the cluster's defaults are; all that the job holds on a node is for it."""
_NOT_INHERITED: Final = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_MEM_PER_",
    "SLURM_DISTRIBUTION", "SLURM_ARBITRARY", "SLURM_HOSTFILE", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_CPU_BIND",
    "SLURM_THREADS_PER_CORE", "SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_STEP",
    "SLURM_THREADS", "SLURM_EXPORT_ENV", "SLURM_HINT", "SLURM_SPREAD_JOB", "SLURM_RELATIVE", "SLURM_IMMEDIATE",
)  # fmt: skip
"""Variables, by how they begin, that sbatch or a user set for another step: srun would take them for options."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The part of a cluster that is ours for now."""

    job_id: str
    nodelist: str
    nodes: list[str]
    addresses: dict[str, str]
    """node -> where Slurm reaches it; nodes of which that is not known are left out."""


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation that this process is in. Blocks while Slurm is asked.

    Raises:
        UsageError: there is none, or Slurm's own tools do not say which nodes it has.
    """
    job_id, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job_id or not nodelist:
        raise UsageError(
            "cluster.launcher is slurm, and this is no allocation of Slurm (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set): "
            "start it by sbatch, with deploy/slurm/ckptd.sbatch for one, or below salloc"
        )
    try:
        nodes = slurmcalls.host_names(nodelist)
    except slurmcalls.SlurmSilent as error:
        raise UsageError(f"which nodes are {shortened(nodelist)}, of SLURM_JOB_NODELIST? {error}") from None
    if not nodes:
        raise UsageError(f"SLURM_JOB_NODELIST names no node: {shortened(nodelist)}")
    try:
        addresses = slurmcalls.addresses(nodelist)
    except slurmcalls.SlurmSilent as error:
        log.warning("nodes are looked up by their names: %s", error)
        addresses = {}
    return Allocation(job_id=job_id, nodelist=nodelist, nodes=nodes, addresses=addresses)


class SlurmLauncher:
    """One agent on each node of an allocation.

    `addresses`: the address of this machine that each node is to dial. `down`: why Slurm starts nothing on a node; None: it
    does.
    """

    def __init__(
        self, *, job: Job, allocation: Allocation, addresses: dict[str, str],
        down: Callable[[str], str | None] = lambda _node: None,
    ) -> None:  # fmt: skip
        self._job = job
        self._allocation = allocation
        self._addresses = addresses
        self._down = down
        self._directory = os.path.join(job.run_dir, "srun")
        self._lock = threading.Lock()
        self._gathered: dict[bool, list[str]] = {}
        self._busy: set[str] = set()
        self._arrivals: dict[str, Arrival] = {}
        self._alone: set[str] = set()
        """Nodes that have failed in company, perhaps because of another one."""
        self._steps: list[_Step] = []
        self._places = threading.Semaphore(MOST_AT_ONCE)
        self._closed = False

    def nodes(self) -> list[str]:
        return list(self._allocation.nodes)

    def python(self, node: str) -> str | None:  # noqa: ARG002  all nodes of an allocation have the same
        return None

    def start(self, node: str, *, replace: bool) -> None:
        why = self._down(node)
        with self._lock:
            if node in self._busy:
                return
            if why is not None:
                self._arrivals[node] = Arrival(ok=False, why=f"node {node} is {why}")
                return
            self._busy.add(node)
            if node not in self._alone:
                waiting = self._gathered.setdefault(replace, [])
                waiting.append(node)
                if len(waiting) == 1:
                    timer = threading.Timer(GATHER_S, self._start_gathered, [replace])
                    timer.daemon = True
                    timer.start()
                return
        self._step([node], "start", replace=replace)

    def end(self, node: str) -> None:
        with self._lock:
            if node in self._busy:
                return
            self._busy.add(node)
        self._step([node], "kill", replace=False)

    def busy(self, node: str) -> bool:
        return node in self._busy

    def arrival(self, node: str) -> Arrival | None:
        with self._lock:
            return self._arrivals.pop(node, None)

    def close(self, *, over: bool) -> None:
        self._closed = True
        with self._lock:
            steps = list(self._steps)
        for step in steps:
            if not step.carries:
                step.kill()
        if not over:
            return
        deadline = time.monotonic() + FAREWELL_S
        for step in steps:
            step.ended.wait(max(0.0, deadline - time.monotonic()))
        for step in steps:
            step.kill()
        for step in steps:
            step.ended.wait(FAREWELL_S)

    def _start_gathered(self, replace: bool) -> None:
        with self._lock:
            nodes = self._gathered.pop(replace)
        self._step(nodes, "start", replace=replace)

    def _step(self, nodes: list[str], what: Literal["start", "kill"], *, replace: bool) -> None:
        hosts = {node: self._addresses[node] for node in nodes}
        common = max(hosts.values(), key=list(hosts.values()).count)
        order = self._job.order(what, node=None, host=common, replace=replace)
        order |= {"stay": True, "hosts": {node: host for node, host in hosts.items() if host != common}}
        step = _Step(
            nodes, command=self._command(nodes), order=json.dumps(order).encode() + b"\n", directory=self._directory,
            run_dir=self._job.run_dir, answered=self._answered,
        )  # fmt: skip
        with self._lock:
            self._steps = [each for each in self._steps if not each.ended.is_set()] + [step]
        # Daemon threads: a controller that is away must not hold the end of this process.
        threading.Thread(target=self._run, args=[step], name="srun", daemon=True).start()

    def _run(self, step: _Step) -> None:
        try:
            with self._places:
                if not self._closed:
                    step.start()
        except Exception as error:
            log.exception("srun")
            step.fail(f"{type(error).__name__}: {error}")
        step.wait()

    def _command(self, nodes: list[str]) -> list[str]:
        count = len(nodes)
        which = [] if count == len(self._allocation.nodes) else [f"--nodelist={','.join(nodes)}"]
        return [
            "srun", f"--jobid={self._allocation.job_id}", f"--nodes={count}", f"--ntasks={count}", *_OPTIONS, *which,
            self._job.python, "-m", "ckptd.node", "--stdin",
        ]  # fmt: skip

    def _answered(self, node: str, arrival: Arrival, *, in_company: bool) -> None:
        with self._lock:
            self._arrivals[node] = arrival
            self._busy.discard(node)
            if arrival.ok:
                self._alone.discard(node)
            elif in_company:
                self._alone.add(node)


class _Step:
    """One srun, from its start to its end."""

    def __init__(
        self, nodes: list[str], *, command: list[str], order: bytes, directory: str, run_dir: str,
        answered: Callable[..., None],
    ) -> None:  # fmt: skip
        self.carries = False
        """An agent of it may be wanted."""
        self.ended = threading.Event()
        self._open = set(nodes)
        self._in_company = len(nodes) > 1
        self._command = command
        self._order = order
        self._directory = directory
        self._run_dir = run_dir
        self._answered = answered
        self._process: subprocess.Popen[bytes] | None = None
        self._log = os.path.join(directory, f"{uuid.uuid4().hex[:12]}.log")
        self._read = 0

    def start(self) -> None:
        """Start it, and hear what its tasks answer. Returns when all have, or none will."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._forget_old_logs()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        try:
            with open(self._log, "ab") as output:
                # Its output is no pipe, which would break with this process.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=inherited,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self.fail(f"srun cannot be started here: {error.strerror}")
            return
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._order)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self._open:
            over = process.poll() is not None
            self._hear()
            if over:
                self.fail(f"srun ended with status {process.returncode}{self._last_words()}")
            elif time.monotonic() > deadline:
                self.fail(f"srun brought no answer within {ANSWER_TIMEOUT_S:.0f} s{self._last_words()}")
                if not self.carries:
                    self.kill()
            else:
                time.sleep(LOOK_S)

    def wait(self) -> None:
        """Until the step is over: its agents have left, or died."""
        if self._process is not None:
            self._process.wait()
            with contextlib.suppress(OSError):
                os.unlink(self._log)
        self.fail("it was given up")
        self.ended.set()

    def kill(self) -> None:
        """End the step with all that is in it."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGTERM)  # srun ends its tasks by itself, and they are sure to be gone then

    def fail(self, why: str) -> None:
        """None of those that have not answered will."""
        for node in sorted(self._open):
            last = tail_of(os.path.join(self._run_dir, node_file("agent", node, "log")), 2000)
            words = f"; the last words in its log: {last.strip().rpartition(chr(10))[2]}" if last.strip() else ""
            self._settle(node, Arrival(ok=False, why=f"node {node}: {why}{words}"))

    def _settle(self, node: str, arrival: Arrival) -> None:
        if node in self._open:
            self._open.discard(node)
            self.carries |= arrival.ok
            self._answered(node, arrival, in_company=self._in_company)

    def _hear(self) -> None:
        with open(self._log, "rb") as file:
            file.seek(self._read)
            *lines, rest = file.read().split(b"\n")
            self._read = file.tell() - len(rest)
        for line in lines:
            _, mark, text = line.decode(errors="replace").partition(MARK)
            if not mark:
                continue
            with contextlib.suppress(ValueError, KeyError):
                answer = json.loads(text)
                ok = bool(answer["ok"])
                why = "" if ok else f"node {answer['node']}: {answer['why']}"
                arrival = Arrival(
                    ok=ok, before=answer["before"] if ok else "none", why=why, superseded=bool(answer.get("superseded"))
                )
                self._settle(str(answer["node"]), arrival)

    def _last_words(self) -> str:
        said = [line for line in tail_of(self._log, 4000).splitlines() if line.strip() and MARK not in line]
        return f" and said: {' / '.join(line.strip()[:200] for line in said[-2:])}" if said else ""

    def _forget_old_logs(self) -> None:
        """Of steps whose end nobody saw, since a daemon died. One that is still written to is no loss."""
        with contextlib.suppress(OSError):
            logs = sorted(os.scandir(self._directory), key=lambda entry: entry.stat().st_mtime)
            for entry in logs[:-OLD_LOGS]:
                os.unlink(entry.path)
