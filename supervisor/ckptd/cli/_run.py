"""`ckptd run`: supervise a job from here until it is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
import uuid

import click

from ckptd import jobhost, jobprior, jobspec, rescue, space
from ckptd.allocation import AllocationWatch
from ckptd.cli import _text
from ckptd.core import events
from ckptd.core.policy import Policy
from ckptd.core.state import Status
from ckptd.daemon import NOTHING_LIVES, Daemon
from ckptd.door import Door, open_door
from ckptd.errors import ExitStatus, JobSpecError, PortTaken
from ckptd.launchers import slurm, ssh
from ckptd.launchers.base import Job, Launcher, RemoteLauncher
from ckptd.launchers.local import LocalLauncher
from ckptd.ledger import Ledger
from ckptd.notify import Notifier
from ckptd.rundir import RunDir
from ckptd.web.http import Application, WebServer
from ckptd.web.live import LiveOverview
from ckptd.web.metrics import Tally

REFRESH_S = 0.5
QUIET_REFRESH_S = 30.0
NOTIFY_INTERVAL_S = 5.0
MAX_UNREAD = 1000
CLOSE_PATIENCE_S = 2.0


class Terminal:
    """What the person who typed `ckptd run` sees: a line for each thing that happens, and one that lives.

    A thread writes it: a terminal that is held by Ctrl-S, or a pipe that nobody reads, blocks that thread alone.
    """

    def __init__(self) -> None:
        self.tty = sys.stderr.isatty()
        self._shown = ""
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=MAX_UNREAD)
        # Not through sys.stderr, whose lock a blocked thread would keep until the end of the process, and beyond.
        self._fd = sys.stderr.fileno()
        self._thread = threading.Thread(target=self._write_for_ever, name="terminal", daemon=True)
        self._thread.start()

    def event(self, event: events.Event) -> None:
        """Show one event."""
        line = _text.event_line(event)
        if line is not None:
            self.say(f"{_text.clock(event.at)} {line}")

    def say(self, text: str) -> None:
        """Print above the living line. A terminal that was closed is no reason to stop."""
        above = _text.printable(text)
        self._write(("\r\x1b[K" if self.tty and self._shown else "") + above + "\n" + (self._shown if self.tty else ""))

    def refresh(self, line: str) -> None:
        """Renew the living line; where output is no terminal, print it."""
        if self.tty:
            width = max(20, _columns() - 1)
            self._shown = line[:width]
            self._write("\r\x1b[K" + self._shown)
        else:
            self._write(f"{_text.clock(time.time())} {line}\n")

    def close(self) -> None:
        """Leave the living line, and wait a moment for what is not written yet. Nothing is shown after this."""
        if self.tty and self._shown:
            self._shown = ""
            self._write("\r\x1b[K")
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_PATIENCE_S)

    def _write(self, text: str) -> None:
        with contextlib.suppress(queue.Full):  # nobody reads: what is new is not worth the memory
            self._queue.put_nowait(text)

    def _write_for_ever(self) -> None:
        while (text := self._queue.get()) is not None:
            data = text.encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return  # a terminal that was closed is no reason to stop


def _columns() -> int:
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        columns = 0
    return columns or 120  # a terminal that nobody told its size says 0


@click.command()
@click.argument("job", default="job.yaml", type=click.Path())
@click.option("--take-over", is_flag=True, help="Take the run over from a daemon on another host that is surely gone.")
def run(job: str, take_over: bool) -> int:
    """Run the job described by JOB (default: job.yaml) until it is over; started again, it goes on where it was."""
    notifier = Notifier.from_environment()
    spec = jobspec.load(job)
    allocation = None
    if spec.cluster.launcher == "slurm":
        allocation = slurm.find_allocation(os.environ)
        spec = spec.on_nodes(allocation.nodes)
    run_dir = RunDir(spec.run_dir_path)
    no_prior = None
    try:
        jobprior.resolve(spec)
    except JobSpecError as error:
        if not run_dir.ledger_path.exists():
            raise
        no_prior = error
    run_dir.create()
    with run_dir.acquire_lock(take_over=take_over), rescue.opened(run_dir, spec) as ledger:
        return _supervise(spec, run_dir, ledger, notifier, no_prior, take_over=take_over, allocation=allocation)


def _supervise(
    spec: jobspec.JobSpec, run_dir: RunDir, ledger: Ledger, notifier: Notifier, no_prior: JobSpecError | None,
    *, take_over: bool = False, allocation: slurm.Allocation | None = None,
) -> int:  # fmt: skip
    terminal = Terminal()
    logging.basicConfig(level=logging.WARNING, handlers=[_TerminalLog(terminal)])
    tally = Tally()
    run_id, epoch = "", 0
    policy = None
    for _, event in ledger.events():
        tally.apply(event)
        if isinstance(event, events.DaemonStarted):
            run_id = str(event.policy.get("run_id", "")) or run_id
            epoch = max(epoch, event.epoch)
            policy = Policy.from_dict(event.policy)
    if no_prior is not None:
        if policy is None:
            raise no_prior
        jobprior.keep(spec, policy)
    run_id = run_id or uuid.uuid4().hex[:12]
    run_dir.freeze_job(spec.frozen_text())
    socket_path = run_dir.socket_path()
    watch = None
    if allocation is not None:
        watch = AllocationWatch(allocation, environ=os.environ, stop_grace_s=spec.restart.stop_grace)
    launcher, door = _launcher(
        spec, run_dir, run_id, socket_path, epoch=epoch + 1 if take_over else epoch, allocation=allocation, watch=watch
    )
    daemon = Daemon(
        spec=spec, run_dir=run_dir, run_id=run_id, ledger=ledger, launcher=launcher, socket_path=socket_path, door=door,
        notifier=notifier, allocation=watch,
    )  # fmt: skip
    state = daemon.picture.run
    if state.status is Status.ENDED and state.outcome is not None and state.outcome.outcome == "finished":
        print(
            f"{spec.name}: {state.outcome.detail}; it does not train again. To train afresh give the run another name",
            file=sys.stderr,
        )
        notifier.ready()  # a service that ends before it is ready has failed, in systemd's eyes
        return ExitStatus.FINISHED
    here = spec.cluster.launcher == "local"  # the nodes' tiers need not be mounted on the head node
    fresh = not state.ever_committed
    if here and state.status in NOTHING_LIVES and (problem := jobhost.tier_problem(spec, fresh=fresh)) is not None:
        raise JobSpecError([f"job.yaml: {problem}"])
    web = _web(spec, daemon, tally, terminal)
    daemon.observers += [tally.apply, terminal.event]
    terminal.say(f"{spec.name}: run {run_id} in {run_dir.path}" + (f", http://{web.address}/" if web else ""))
    stale = None if no_prior is None else f"{no_prior}; the run goes on with the prior that it had"
    for warning in (ledger.warning, jobhost.idle_devices(spec), stale, *space.notes(spec)):
        if warning:
            terminal.say(f"warning: {warning}")
    if watch is not None:
        watch.start()
    try:
        status = asyncio.run(_run(daemon, terminal, notifier))
        _farewell(daemon, terminal)
    finally:
        if watch is not None:
            watch.close()
        if web is not None:
            web.close()
        terminal.close()
    return status


def _launcher(
    spec: jobspec.JobSpec, run_dir: RunDir, run_id: str, socket_path: str, *, epoch: int,
    allocation: slurm.Allocation | None, watch: AllocationWatch | None,
) -> tuple[Launcher | RemoteLauncher, Door | None]:  # fmt: skip
    """What starts the agents, and where those on other machines dial."""
    wanted = spec.cluster.devices_per_node
    devices = None if wanted == "auto" else wanted
    if spec.cluster.launcher == "local":
        local = LocalLauncher(
            run_dir=str(run_dir.path), run_id=run_id, socket=socket_path, workdir=str(spec.workdir_path),
            devices=devices,
        )  # fmt: skip
        return local, None
    door = open_door(spec, run_dir, epoch=epoch, known=None if allocation is None else allocation.addresses)
    job = Job(
        run_dir=str(run_dir.path), run_id=run_id, workdir=str(spec.workdir_path), python=spec.python_path,
        devices=devices, secret=door.secret, port=door.port, epoch=door.epoch,
    )  # fmt: skip
    if allocation is not None and watch is not None:
        return slurm.SlurmLauncher(job=job, allocation=allocation, addresses=door.addresses, down=watch.down), door
    return ssh.SshLauncher(job=job, hosts=spec.cluster.hosts, addresses=door.addresses), door


def _web(spec: jobspec.JobSpec, daemon: Daemon, tally: Tally, terminal: Terminal) -> WebServer | None:
    if spec.web.listen is None:
        return None
    try:
        overview = LiveOverview(daemon.run_dir.ledger_path, daemon.status)
        application = Application(tally=tally, status=daemon.status, alive=daemon.alive, overview=overview)
        web = WebServer(spec.web.listen, application)
    except PortTaken as error:
        if daemon.picture.run.status in NOTHING_LIVES:
            raise
        # A run that is under way is supervised blind rather than not at all.
        terminal.say(f"warning: {error}; supervising without it")
        return None
    web.start()
    daemon.web_address = web.address
    return web


async def _run(daemon: Daemon, terminal: Terminal, notifier: Notifier) -> int:
    async def refresh() -> None:
        while True:
            await asyncio.sleep(REFRESH_S if terminal.tty else QUIET_REFRESH_S)
            terminal.refresh(_text.status_line(daemon.status()))

    async def tell() -> None:
        while notifier.active:
            notifier.status(_text.status_line(daemon.status()))
            await asyncio.sleep(NOTIFY_INTERVAL_S)

    showing = [asyncio.create_task(refresh()), asyncio.create_task(tell())]
    try:
        return await daemon.run()
    finally:
        for task in showing:
            task.cancel()


def _farewell(daemon: Daemon, terminal: Terminal) -> None:
    outcome = daemon.picture.run.outcome
    last = daemon.picture.last_interruption
    if outcome is not None and outcome.outcome == "failed" and last is not None and last.message:
        where = daemon.run_dir.attempt_dir(last.attempt or daemon.picture.run.attempt)
        who = "" if last.rank is None else f" rank {last.rank},"
        terminal.say(f"--- the last error,{who} logs in {where} ---\n{last.message.rstrip()}\n---")
    if daemon.picture.run.status is not Status.ENDED:
        terminal.say(f"this daemon leaves, the run goes on; `ckptd run` takes it up again: {daemon.run_dir.path}")
    terminal.say(_text.summary(daemon.status()))


class _TerminalLog(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.say(f"{_text.clock(record.created)} {record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info:
            self._terminal.say(logging.Formatter().formatException(record.exc_info))
