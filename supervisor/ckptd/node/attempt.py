"""One attempt on this node, watched from the agent's event loop: who died first, what is left, what is the evidence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import kernel_log
from ckptd.node import logs, processes
from ckptd.node.evidence import KernelLog, OomCounter
from ckptd.node.processes import Process
from ckptd.node.reports import EVENT_OF_REPORT, ReportTail, live_picture, read_error, read_pulses, tail_of
from ckptd_shim import contract
from ckptd_shim.contract import Phase, Report
from ckptd_shim.launch import STACKS_SIGNAL

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.05
LEAST_STACKS, MOST_STACKS, STACKS_OF_ALL = 4096, 16_384, 16 * 1024 * 1024
"""Bytes of a rank's stacks that are told: so many in all where there are many ranks, and enough for one thread of each."""
STACKS_PATIENCE_S = 3.0
STILL_STEPS = 3.0
"""Times the usual step time that may pass without a step before an attempt counts as one that does not move."""
EARLY_EXIT_PATIENCE_S = 5.0
"""How long the others may live on after a rank left with status 0 in the middle of training."""

Emit = Callable[..., None]


@dataclass(kw_only=True)
class Exit:
    """How one worker ended."""

    exitcode: int
    mono: float
    order: int
    killed_by_us: bool
    phase: Phase | None


@dataclass(kw_only=True)
class Attempt:
    """The workers of one attempt on this node.

    Lives on the event loop. `emit` sends an event to the daemon; `release` lets elastic's loop reap and return.
    """

    run_id: str
    number: int
    node: str
    directory: str
    ranks: list[int]
    emit: Emit
    release: Callable[[], None]
    spare: Callable[[], Collection[int]] = tuple
    """Tells the pids of the agent's own children, which are no part of any attempt."""
    stop_grace_s: float = 3.0
    oom: OomCounter = field(default_factory=OomCounter)
    kernel: KernelLog | None = None
    nodes: int = 1
    """On how many nodes the attempt has workers."""
    buses: Mapping[int, str] = field(default_factory=dict)
    """rank -> PCI address of its GPU, where that is known."""
    workers: dict[int, Process] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    pulses: dict[int, contract.Pulse] = field(default_factory=dict)
    finished_report: dict[str, Any] | None = None
    unkillable: list[Process] = field(default_factory=list)
    """What survived SIGKILL, once the attempt has ended."""
    moved_at: float = field(default_factory=time.monotonic)
    """When a rank of this node was last seen to have come further."""
    _failed: bool = False
    _wants_stacks: bool = False
    _stopping: bool = False
    _claimed: bool = False
    _begun: bool = False
    _grace: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tail: ReportTail | None = None
    _killing: set[int] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if 0 in self.ranks:  # where nodes share the directory, others must not tell what rank 0 has written
            self._tail = ReportTail(os.path.join(self.directory, contract.REPORT_FILE))

    # --- beginning ---

    def claim(self) -> bool:
        """From the launching thread: whether to launch. Then `started` or `launch_failed` follows, stop or no stop."""
        with self._lock:
            self._claimed = not self._stopping
            return self._claimed

    def started(self, pids: dict[int, int], pidfds: dict[int, int], mono: float, warm: bool = False) -> None:
        """The workers exist: rank -> pid, and an open pidfd for each, which this object closes."""
        for rank, pid in pids.items():
            # A worker that is dead already is a zombie until elastic reaps it, so its start time can be read.
            self.workers[rank] = processes.identify(pid) or Process(pid, 0)
        document = {str(r): {"pid": p.pid, "start_time": p.start_time} for r, p in self.workers.items()}
        with contextlib.suppress(OSError):  # a full disk: the mark in the environment still finds them
            contract.write_atomically(_workers_path(self.directory, self.node), json.dumps(document).encode())
        self.emit("workers_started", attempt=self.number, mono=mono, workers=document, warm=warm)
        loop = asyncio.get_running_loop()
        for rank, fd in pidfds.items():
            loop.add_reader(fd, self._on_exit, rank, fd)
        self._spawn(self._watch())
        self._begun = True
        if self._stopping:  # the stop came while they were being launched
            self._spawn(self._end(grace=self._grace))

    def launch_failed(self, why: str) -> None:
        """No worker came to be, or not all of them: clean up what did."""
        if self._begun:
            return  # all were started, and are watched
        self._begun = True
        self._failed = True
        now = time.monotonic()
        self.emit("failure_detected", attempt=self.number, mono=now, detected_age_s=0.0, launch=True, detail=why)
        self._spawn(self._end(grace=0.0))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("watching attempt %d failed", self.number, exc_info=task.exception())

    # --- while it runs ---

    async def _watch(self) -> None:
        while not self.ended.is_set():
            self.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), WATCH_INTERVAL_S)

    def look(self) -> None:
        """Read what the workers have written since the last look."""
        pulses = read_pulses(self.directory, self.ranks)
        if any(_place(pulse) != _place(self.pulses.get(rank)) for rank, pulse in pulses.items()):
            self.moved_at = time.monotonic()
        self.pulses.update(pulses)
        for line in self._tail.read() if self._tail is not None else ():
            self._report(line)

    def _report(self, line: dict[str, Any]) -> None:
        kind, mono = line["kind"], line["mono"]
        data = {key: value for key, value in line.items() if key not in ("kind", "mono")}
        if kind in EVENT_OF_REPORT:
            self.emit(EVENT_OF_REPORT[kind], attempt=self.number, mono=mono, **{"rank": 0, **data})
        elif kind == Report.CONTROL_IGNORED:
            what = f"the control file was ignored: {line.get('why')}"
            self.emit("noted", attempt=self.number, mono=mono, level="warning", what=what)
        elif kind == Report.FINISHED:
            self.finished_report = data

    @property
    def step(self) -> int:
        """The last step that any rank of this node completed."""
        return max((pulse.step for pulse in self.pulses.values()), default=0)

    def live(self) -> dict[str, Any]:
        """A message for the daemon: where training is."""
        return {"attempt": self.number, "ranks": live_picture(self.pulses)}

    def fenced(self, alone_s: float, fence_s: float) -> bool:
        """Whether nobody may rely on this attempt any more, `alone_s` seconds after the daemon last heard from here.

        An attempt on this node alone may be replaced by another elsewhere. One over several nodes cannot be as long as
        it moves: all of them would have been stopped first. So it is merely the daemon that is gone.
        """
        if alone_s < fence_s:
            return False
        usual = max((pulse.step_s or 0.0 for pulse in self.pulses.values()), default=0.0)
        moves = time.monotonic() - self.moved_at < max(fence_s, STILL_STEPS * usual)
        return self.nodes == 1 or not moves

    # --- ending ---

    def fence(self, why: str) -> None:
        """End the workers at once, since another attempt may begin elsewhere."""
        if self._stopping:
            return
        self._failed = True
        now = time.monotonic()
        self.emit("failure_detected", attempt=self.number, mono=now, detected_age_s=0.0, lost="node", detail=why,
                  step=self.step)  # fmt: skip
        self.stop(grace=False)

    def _on_exit(self, rank: int, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        mono = time.monotonic()
        try:
            status = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            status = None
        finally:
            os.close(fd)
        if status is None:
            exitcode = -signal.SIGKILL  # reaped by somebody else, which only happens once all were killed
        elif status.si_code == os.CLD_EXITED:
            exitcode = status.si_status
        else:
            exitcode = -status.si_status
        self.look()
        pulse = self.pulses.get(rank)
        self.exits[rank] = Exit(
            exitcode=exitcode,
            mono=mono,
            order=len(self.exits),
            # Nobody else sends the signal that asks for stacks; it ends an interpreter that ends by itself just then.
            killed_by_us=(rank in self._killing and exitcode in (-signal.SIGKILL, -signal.SIGTERM))
            or (self._wants_stacks and exitcode == -STACKS_SIGNAL),
            phase=pulse.phase if pulse is not None else None,
        )
        if self._stopping:
            return
        if exitcode != 0:
            self._fail(rank)
        elif len(self.exits) == len(self.workers):
            self._stopping = True
            self._spawn(self._end(grace=0.0))
        elif self._left_early(rank):
            self._spawn(self._suspect(rank))

    def _left_early(self, rank: int) -> bool:
        """Whether a rank that ended with 0 was still training: it has a shim, and did not come to its end."""
        phase = self.exits[rank].phase
        return phase is not None and phase not in (Phase.IMPORT, Phase.END)

    async def _suspect(self, rank: int) -> None:
        await asyncio.sleep(EARLY_EXIT_PATIENCE_S)
        if not self._stopping and len(self.exits) < len(self.workers):
            self._fail(rank)

    def _fail(self, rank: int) -> None:
        """The first failure: tell, and end the others. After a crash nobody will save, so nobody is given time."""
        early = [r for r, e in self.exits.items() if e.exitcode == 0 and self._left_early(r)]
        first = min([rank, *early], key=lambda r: self.exits[r].order)
        self._failed = True
        self._stopping = True
        died = self.exits[first]
        self.emit(
            "failure_detected", attempt=self.number, rank=first, mono=died.mono, exitcode=died.exitcode, step=self.step,
            detected_age_s=max(0.0, time.monotonic() - died.mono), detail=_how(first, died.exitcode),
        )  # fmt: skip
        self._spawn(self._end(grace=0.0))

    def stop(self, *, grace: bool, stacks: bool = False) -> None:
        """End all workers: SIGTERM first when they are to be given `stop_grace_s`. Idempotent.

        `stacks`: before that, every rank writes its Python stacks into `rank<k>.stacks`.
        """
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._wants_stacks = stacks
            self._grace = self.stop_grace_s if grace else 0.0
            being_launched = self._claimed and not self._begun
        if not being_launched:
            self._spawn(self._end(grace=self._grace))

    async def _dump_stacks(self) -> None:
        """Have every rank that can write its Python stacks, and wait until they have, or will not."""
        before = {}
        for rank, worker in self.workers.items():
            if rank in self.exits or rank not in self.pulses:
                continue  # before its heartbeat page is there, the signal would end it
            stat = processes.read_stat(worker.pid)
            if stat is None or stat.state in "TtDZX":
                continue  # stopped, or inside of the kernel: it will not answer
            if not processes.catches(worker, STACKS_SIGNAL):
                continue  # its interpreter has ended, as far as that: the signal would end it
            before[self._stacks_path(rank)] = _size(self._stacks_path(rank))
            processes.send(worker, STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_PATIENCE_S
        sizes: dict[str, int] = {}
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            now = {path: _size(path) for path in before}
            if now == sizes and all(now[path] > before[path] for path in before):
                return
            sizes = now

    def _stacks_path(self, rank: int) -> str:
        return os.path.join(self.directory, contract.stacks_name(rank))

    async def _end(self, *, grace: float) -> None:
        """Leave nothing alive, verify that, gather the evidence, and say that the attempt has ended here."""
        self._stopping = True
        if self._wants_stacks:
            await self._dump_stacks()
        # One that is dying already was not ended by us: a peer may notice its death before we do.
        self._killing |= {r for r, w in self.workers.items() if r not in self.exits and not processes.dying(w)}
        if grace > 0:
            for rank in self._killing:
                self._signal_session(self.workers[rank], signal.SIGTERM)
            await asyncio.to_thread(processes.wait_gone, [self.workers[r] for r in self._killing], grace)
        swept = await asyncio.to_thread(
            processes.sweep, self.run_id, self.number, list(self.workers.values()), spare=self.spare, node=self.node
        )
        deadline = time.monotonic() + 2.0
        while len(self.exits) < len(self.workers) and time.monotonic() < deadline and not swept.unkillable:
            await asyncio.sleep(0.002)  # the loop still has to hear of the last deaths
        self.unkillable = swept.unkillable
        self.release()
        self.look()
        ranks = {worker.pid: rank for rank, worker in self.workers.items()}
        leftovers = [p for p in swept.killed if p.pid not in ranks]
        stopping = bool((self.finished_report or {}).get("stopping"))
        all_ended = bool(self.workers) and len(self.exits) == len(self.workers)
        if not self._failed and all_ended and all(map(self._ended_well, self.exits)):
            self.emit(
                "workers_finished", attempt=self.number, step=self.step, stopping=stopping,
                closed=self.finished_report is not None, total_steps=(self.finished_report or {}).get("total_steps"),
            )  # fmt: skip
        self.emit(
            "attempt_ended",
            attempt=self.number,
            step=self.step,
            exits=self.evidence(),
            leftovers=[
                {"pid": p.pid, "name": swept.names.get(p.pid, "?"), "seconds": swept.seconds} for p in leftovers
            ],
            unkillable=[
                {"pid": p.pid, "name": swept.names.get(p.pid, "?"), "rank": rank_of(p, ranks)} for p in swept.unkillable
            ],
        )
        self.ended.set()

    def _ended_well(self, rank: int) -> bool:
        """With status 0, or ended by us after it was through with `close` and would not go."""
        exit_ = self.exits[rank]
        closed = self.finished_report is not None or 0 not in self.ranks
        return exit_.exitcode == 0 or (exit_.killed_by_us and exit_.phase is Phase.END and closed)

    def _signal_session(self, worker: Process, number: signal.Signals) -> None:
        if processes.alive(worker):
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, number)

    def _is_of(self, rank: int, bus: str) -> bool:
        """Whether a rank's GPU has this address: a neighbour's fault, or another job's, is not its own."""
        own = self.buses.get(rank)
        return own is None or kernel_log.same_bus(own, bus)

    def evidence(self) -> list[dict[str, Any]]:
        """What is known of each worker's end, in the form that the diagnosis reads; `t` is relative to now."""
        now = time.monotonic()
        oom = self.oom.rose()
        kernel = self.kernel.news() if self.kernel is not None else kernel_log.Findings()
        found = []
        for rank in sorted(self.workers):
            exit_ = self.exits.get(rank)
            pulse = self.pulses.get(rank)
            found.append(
                {
                    "rank": rank,
                    "node": self.node,
                    "exitcode": exit_.exitcode if exit_ is not None else None,
                    "order": exit_.order if exit_ is not None else len(self.workers),
                    "t": exit_.mono - now if exit_ is not None else 0.0,
                    "killed_by_us": exit_.killed_by_us if exit_ is not None else True,
                    "left_early": exit_ is not None and exit_.exitcode == 0 and self._left_early(rank),
                    "oom_killed": oom or (bool(kernel.oom_killed) and self.workers[rank].pid in kernel.oom_killed),
                    "xids": [
                        f"Xid {x.number} on {x.bus}: {x.text}"
                        for x in kernel.xids
                        if x.blames_device and self._is_of(rank, x.bus)
                    ],
                    "gpu_lost": kernel.lost,
                    "stacks": tail_of(self._stacks_path(rank), self._stacks_size()) if self._wants_stacks else "",
                    "error": read_error(os.path.join(self.directory, contract.error_name(rank))),
                    "stderr_tail": ""
                    if exit_ is not None and self._is_one_of_many(exit_)
                    else logs.tail(os.path.join(self.directory, contract.stderr_name(rank))),
                    "step": pulse.step if pulse is not None else 0,
                }
            )
        return found

    def _is_one_of_many(self, exit_: Exit) -> bool:
        """Whether a worker that we ended says no more than that: of thousands of nodes, the logs of all would be sent."""
        return self.nodes > 1 and exit_.killed_by_us

    def _stacks_size(self) -> int:
        """How much is told of where a rank of a hung attempt stands, bytes. All of it stays in its file."""
        return max(LEAST_STACKS, min(MOST_STACKS, STACKS_OF_ALL // max(1, self.nodes * len(self.ranks))))


def rank_of(process: Process, ranks: Mapping[int, int]) -> int | None:
    """The rank that a process belongs to, a worker itself or one in its session; `ranks`: pid of a worker -> its rank."""
    if process.pid in ranks:
        return ranks[process.pid]
    stat = processes.read_stat(process.pid)
    return None if stat is None else ranks.get(stat.session)


def _how(rank: int, exitcode: int) -> str:
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"rank {rank} was killed by {signal.Signals(-exitcode).name}"
        return f"rank {rank} was killed by signal {-exitcode}"
    if exitcode == 0:
        return f"rank {rank} ended early with status 0"
    return f"rank {rank} ended with status {exitcode}"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _place(pulse: contract.Pulse | None) -> tuple[int, Phase] | None:
    return None if pulse is None else (pulse.step, pulse.phase)


def _workers_path(attempt_dir: str, node: str) -> str:
    return os.path.join(attempt_dir, node_file("workers", node, "json"))


def node_file(what: str, node: str, suffix: str) -> str:
    """Name of a file that each node has for itself, also where several share the directory: `workers-h1.json`."""
    return f"{what}-{re.sub(r'[^A-Za-z0-9._-]', '_', node)}.{suffix}"


def newest_attempt(run_dir: str) -> int | None:
    """Number of the newest attempt that this node had a part in; None: it had none."""
    try:
        return max(contract.attempt_dirs(os.path.join(run_dir, "attempts")), default=None)
    except OSError:
        return None


def recorded_workers(attempt_dir: str, node: str) -> dict[int, Process]:
    """The workers that an earlier agent of this node launched for an attempt, by rank, as it wrote them down."""
    try:
        with open(_workers_path(attempt_dir, node), "rb") as file:
            document = json.load(file)
        return {int(rank): Process(int(w["pid"]), int(w["start_time"])) for rank, w in document.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
