"""Which processes belong to an attempt, and that none of them is left: always by pid and start time, never by name."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ckptd_shim import contract


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks since boot (field 22 of /proc/<pid>/stat)."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The parts of /proc/<pid>/stat that we need."""

    name: str
    state: str
    parent: int
    session: int
    flags: int
    threads: int
    start_time: int

    @property
    def dead(self) -> bool:
        """Nothing of it runs any more. A zombie with threads is none: its main thread ended, another one is stuck."""
        return self.state == "X" or (self.state == "Z" and self.threads <= 1)


def read_stat(pid: int) -> Stat | None:
    """State of a process, None when there is none of that pid."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Stat(
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def identify(pid: int) -> Process | None:
    """The process that has this pid now."""
    stat = read_stat(pid)
    return None if stat is None else Process(pid, stat.start_time)


def alive(process: Process) -> bool:
    """Whether exactly this process still runs. A zombie is dead."""
    stat = read_stat(process.pid)
    return stat is not None and stat.start_time == process.start_time and not stat.dead


FORKSERVER_MARK = "forkserver"
"""Value of `CKPTD_ATTEMPT` in a forkserver's environment, which is what /proc shows of everything forked from it."""
HELPER_MARK = ("CKPTD_ROLE", "helper")
"""In the environment of children that the agent runs for itself."""


BIRTHS = threading.Lock()
"""Held while this process starts a child that `spare` will name: a look at the processes must not come in between."""

_PF_EXITING = 0x4


def dying(process: Process) -> bool:
    """Whether a process has begun to end: its connections may be closed already though its death is not known yet."""
    stat = read_stat(process.pid)
    return stat is None or stat.start_time != process.start_time or stat.state in "ZX" or bool(stat.flags & _PF_EXITING)


def members(
    run_id: str, attempt: int, workers: Iterable[Process], *, spare: Callable[[], Collection[int]] | None = None,
    node: str | None = None,
) -> list[Process]:  # fmt: skip
    """Every living process of an attempt: the workers, their sessions, what carries its mark, and orphans of those.

    A child that made its own session is found by `CKPTD_RUN_ID` and `CKPTD_ATTEMPT` in the environment it began with,
    or because it became a child of this process (a subreaper) when its parent died. `spare` tells the pids of this
    process's own children, to leave alone; None: this process is no subreaper, none of its children are looked at.
    `node`: what carries the mark of another node is none of ours.
    """
    marks = {f"{contract.ENV_RUN_ID}={run_id}".encode()}
    if node is not None:
        marks.add(f"{contract.ENV_NODE}={node}".encode())
    attempt_marks = {f"{contract.ENV_ATTEMPT}={name}".encode() for name in (attempt, FORKSERVER_MARK)}
    helper_mark = "=".join(HELPER_MARK).encode()
    leaders = {worker.pid: worker.start_time for worker in workers}
    me = os.getpid()
    with BIRTHS:
        own, entries = set(spare() if spare is not None else ()), os.listdir("/proc")
    found: list[Process] = []
    for entry in entries:
        if not entry.isdecimal() or (pid := int(entry)) == me or pid in own:
            continue
        stat = read_stat(pid)
        if stat is None or stat.dead:
            continue
        ours = leaders.get(pid) == stat.start_time
        # A pid is not given out again while a session of that number lives: the session is the worker's own unless
        # its leader is somebody else by now.
        in_session = stat.session in leaders and _leads(stat.session, leaders[stat.session])
        if not ours and not in_session:
            environment = _environment(pid)
            marked = marks <= environment and bool(attempt_marks & environment)
            adopted = spare is not None and stat.parent == me and helper_mark not in environment and not _unborn(pid)
            if not marked and not adopted:
                continue
        found.append(Process(pid, stat.start_time))
    return found


def _unborn(pid: int) -> bool:
    """Whether a child of this process is still this program: between its fork and its exec."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as its, open("/proc/self/cmdline", "rb") as ours:
            return its.read() == ours.read()
    except OSError:
        return False


def _leads(session: int, start_time: int) -> bool:
    """Whether the session `session` is still the one that a worker with this start time founded."""
    leader = read_stat(session)
    return leader is None or leader.start_time == start_time


def _environment(pid: int) -> set[bytes]:
    """The variables that a process began with; empty where they may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def catches(process: Process, number: int) -> bool:
    """Whether a process has a handler for a signal now."""
    try:
        with open(f"/proc/{process.pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def send(process: Process, number: int) -> None:
    """Signal exactly this process; nothing happens when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        # The descriptor pins the process: if the start time is right now, the signal cannot hit another one.
        stat = read_stat(process.pid)
        if stat is not None and stat.start_time == process.start_time:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def wait_gone(processes: Iterable[Process], timeout: float) -> list[Process]:
    """Wait until all are dead (zombies count as dead); returns those that are not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    waiting = {p for p in processes if alive(p)}
    while waiting:
        poller = select.poll()
        fds: dict[int, Process] = {}
        for process in waiting:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(process.pid)
                fds[fd] = process
                poller.register(fd, select.POLLIN)
        left = deadline - time.monotonic()
        if fds and left > 0:
            poller.poll(left * 1000)
        for fd in fds:
            os.close(fd)
        waiting = {p for p in waiting if alive(p)}
        if time.monotonic() >= deadline:
            break
    return sorted(waiting, key=lambda p: p.pid)


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and what it could not end."""

    killed: list[Process]
    names: dict[int, str]
    unkillable: list[Process]
    seconds: float


def sweep(
    run_id: str,
    attempt: int,
    workers: Iterable[Process],
    *,
    spare: Callable[[], Collection[int]] | None = None,
    timeout: float = 10.0,
    node: str | None = None,
) -> Swept:
    """SIGKILL everything that is left of an attempt and verify that it is gone.

    Repeats until a look finds nothing, since a process may have forked while it was being killed; gives up on what
    is still there after `timeout` seconds (uninterruptible sleep) and names it.
    """
    workers = list(workers)
    begun = time.monotonic()
    killed: dict[int, Process] = {}
    names: dict[int, str] = {}
    left: list[Process] = []
    while True:
        found = members(run_id, attempt, workers, spare=spare, node=node)
        if not found:
            left = []
            break
        for process in found:
            stat = read_stat(process.pid)
            names[process.pid] = stat.name if stat is not None else "?"
            killed[process.pid] = process
            send(process, signal.SIGKILL)
        left = wait_gone(found, max(0.0, timeout - (time.monotonic() - begun)))
        if time.monotonic() - begun >= timeout:
            break
    _reap(pid for pid in killed if pid not in {worker.pid for worker in workers})
    return Swept(list(killed.values()), names, left, time.monotonic() - begun)


def dead_children() -> set[Process]:
    """Zombies that are this process's to collect."""
    children: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            children.update(map(int, file.read().split()))
    stats = {pid: stat for pid in children if (stat := read_stat(pid)) is not None}
    return {Process(pid, stat.start_time) for pid, stat in stats.items() if stat.dead}


def reap(orphans: Iterable[Process]) -> None:
    """Collect zombies."""
    _reap(process.pid for process in orphans)


def _reap(pids: Iterable[int]) -> None:
    """Collect the zombies of adopted orphans; workers are their launcher's to collect."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
