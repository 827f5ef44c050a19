"""The daemon: the asyncio shell round the pure core. It appends, folds, decides, and does what was decided.

An event is in the ledger before anything is done about it. All state is the picture, which a replay of the ledger
gives again; what this object keeps besides is only what it has said to whom, so that nothing is said twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

from ckptd import __version__, link, orders, status
from ckptd.agents import Agents, Session, Sessions
from ckptd.allocation import AllocationWatch
from ckptd.clock import RunClock
from ckptd.consult import Consultations
from ckptd.core import events, picture, tierbook
from ckptd.core.commands import Ask, Command, Gather, Launch, OpenStore, Record, Rehearse, Steer, Stop
from ckptd.core.decisions import next_deadline
from ckptd.core.devices import node_identity
from ckptd.core.hang import Limits
from ckptd.core.state import LIVE, Status
from ckptd.door import Door
from ckptd.errors import ExitStatus
from ckptd.fleet import Fleet
from ckptd.jobspec import JobSpec
from ckptd.journal import Journal, Origin
from ckptd.launchers.base import Launcher, RemoteLauncher
from ckptd.ledger import Ledger
from ckptd.link import Channel, Message
from ckptd.node.tiers import marker_key
from ckptd.notify import Notifier
from ckptd.place import Place
from ckptd.rehearsal import Rehearsal
from ckptd.rundir import RunDir, boot_id
from ckptd.units import format_duration
from ckptd.upkeep import Upkeep
from ckptd.watch import Watch
from ckptd_shim import contract

log = logging.getLogger(__name__)

NOTHING_LIVES = (Status.STARTING, Status.ENDED)
"""States in which a command that refuses to go on leaves no worker without a daemon."""
TICK_S = 1.0
ASK_AGAIN_S = 2.0
MAX_MARKERS = 1000
"""Commits whose marker is known by its digest: far more than are kept, and what fits into one message."""
HOLD_S = 3600.0
"""How long a checkpoint is kept for a reader that does not say when it is done."""
HELLO_PATIENCE_S = 10.0
"""How long a connection may say nothing before it is closed."""
MIRROR_S = 30.0
"""How long the last commit of a run may take to come to lie on two nodes, once the run is over."""
DRAIN_S = 600.0
"""How long the last commit of a run may take to every tier, once the run is over."""
MAX_RECORDS = 100
"""Records in a row that a decision may ask for: more is a loop, which must not fill the disk."""

Observer = Callable[[events.Event], None]


class Daemon:
    """Supervises one run from start to end."""

    def __init__(
        self, *, spec: JobSpec, run_dir: RunDir, run_id: str, ledger: Ledger, launcher: Launcher | RemoteLauncher,
        socket_path: str, door: Door | None = None, drill: contract.Drill | contract.RestoreDrill | None = None,
        notifier: Notifier | None = None, allocation: AllocationWatch | None = None,
    ) -> None:  # fmt: skip
        """`door`: where agents on other machines dial, with a launcher that starts them there.

        `allocation`: what Slurm says of the nodes, and for how long it lends them.
        """
        self.spec = spec
        self.run_dir = run_dir
        self.run_id = run_id
        self.picture = picture.Picture()
        self.observers: list[Observer] = []
        self._ledger = ledger
        self._journal = Journal(ledger, acknowledge=self._acknowledge, tell=self._note)
        self._socket_path = socket_path
        self._door = door
        self._allocation = allocation
        self._drill = drill
        self._notifier = notifier or Notifier()
        self._detaching = False
        self._new: deque[tuple[events.Event, Session | None]] = deque()
        """What has come and is not folded yet, with the connection that it came over."""
        self._turn_is_due = False
        self._orders: tuple[picture.Picture, orders.Launching] | None = None
        self._markers: dict[str, str] = {}
        """CRC-32C of the markers of the newest commits."""
        self._control: contract.Control | None = None
        self._steer: Steer | None = None
        self._wake = asyncio.Event()
        self._acting = False
        hang = spec.hang
        self._watch = Watch(
            Limits(enabled=hang.enabled, factor=hang.factor, floor_s=hang.floor, startup_s=hang.startup)
        )
        self._home = Place(run_dir.path)
        self._turned = time.monotonic()
        self.web_address: str | None = None
        self.clock = RunClock.after(self._replay(), last_t=ledger.last_t(), boot_id=boot_id())
        self.agents: Sessions
        if door is None:
            local = cast("Launcher", launcher)
            self.agents = Agents(launcher=local, run_id=run_id, happened=self.happened, now=self.clock.now)
        else:
            self.agents = Fleet(
                launcher=cast("RemoteLauncher", launcher), run_id=run_id, happened=self.happened, now=self.clock.now,
                heartbeat_s=spec.cluster.heartbeat_timeout, adopting=self._agents_may_live and not door.moved,
            )  # fmt: skip
        self.agents.stop_patience_s += spec.restart.stop_grace
        self._rehearsal = Rehearsal(run_dir=str(run_dir.path), done=self.happened, now=self.clock.now)
        self._held: dict[str, float] = {}
        """Checkpoints that somebody else reads, to when they are not to be deleted, by the monotonic clock."""
        self._consultations = Consultations(self.agents)
        self._upkeep = Upkeep(self, self._consultations)

    @property
    def _allocation_id(self) -> str:
        return self._allocation.identity if self._allocation is not None else ""

    @property
    def _agents_may_live(self) -> bool:
        """Agents of a daemon before this one, in the same allocation if in any, which dial by themselves."""
        state = self.picture.run
        return state.status not in NOTHING_LIVES and state.allocation == self._allocation_id

    # --- history and time ---

    def _replay(self) -> Iterator[events.Event]:
        """Fold what is in the ledger, and pass each event on."""
        for _, event in self._ledger.events():
            self.picture = picture.apply(self.picture, event)
            self._watch.saw(event)
            if self._allocation is not None:
                self._allocation.saw(event)
            if isinstance(event, events.SaveCommitted | events.CheckpointCopied):
                self._remember(event)
            yield event

    def happened(self, event: events.Event) -> None:
        """Append an event of this daemon's own making, fold it, and do what it calls for."""
        self._append(replace(event, at=event.at or time.time()))
        self._act()

    def _append(self, event: events.Event) -> None:
        self._take(event)
        self._take_in()

    def _take(self, event: events.Event, session: Session | None = None, origin: Origin | None = None) -> None:
        """An event has come: it is written, folded and acted on with all that come in the same turn of the loop."""
        if self._journal.take(event, origin):
            self._new.append((event, session))

    def _take_in(self) -> None:
        """Write what has come, then fold it."""
        self._journal.write()
        while self._new:
            event, session = self._new.popleft()
            self._fold(event)
            if session is not None:
                self._heard(session, event)

    def _soon(self) -> None:
        """Take in and act at the end of this turn of the loop: once, however many nodes speak in it."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self._take_in()
        self._act()

    def _acknowledge(self, origin: Origin) -> None:
        session = self.agents.session(origin.node)
        if session is not None and session.agent_id == origin.agent_id:
            session.channel.send({"type": "ack", "seq": origin.seq})

    def _remember(self, event: events.SaveCommitted | events.CheckpointCopied) -> None:
        self._markers[marker_key(event.tier, event.path)] = event.marker_crc32c
        while len(self._markers) > MAX_MARKERS:
            del self._markers[next(iter(self._markers))]

    def _fold(self, event: events.Event) -> None:
        self.picture = picture.apply(self.picture, event)
        self._watch.saw(event)
        if self._allocation is not None:
            self._allocation.saw(event)
        if isinstance(event, events.AttemptLaunched):
            self._control = None
            self._steer = None
        for observer in self.observers:
            observer(event)
        if isinstance(event, events.SaveCommitted | events.CheckpointCopied):
            self._remember(event)
            self._prune()
        elif isinstance(event, events.SharingFound):
            for session in self.agents.sessions():
                found = orders.tiers(self.spec, session.node, self.picture.run.own_tiers)
                session.channel.send({"type": "tiers", "tiers": found})
        elif isinstance(event, events.CheckpointMirrored) and self.picture.run.own_tiers:
            self._prune()  # what was kept for want of a newer one with two copies

    # --- the loop ---

    async def run(self) -> int:
        """Supervise until the run is over, or this daemon is asked to leave it alone; returns the exit status."""
        servers = [await link.listen(self._socket_path, self._serve)]
        os.chmod(self._socket_path, 0o600)
        if self._door is not None:
            servers.append(
                await link.listen_tcp(
                    self._door.sock, self._door.secret, self._serve, expected=len(self.spec.cluster.hosts)
                )
            )  # fmt: skip
        self._handle_signals()
        try:
            self.happened(
                events.DaemonStarted(
                    t=self.clock.now(), policy=self.spec.policy(self.run_id).to_dict(), pid=os.getpid(),
                    host=socket.gethostname(), version=__version__, boot_id=boot_id(), mono=time.monotonic(),
                    epoch=self._door.epoch if self._door is not None else 0, allocation=self._allocation_id,
                )
            )  # fmt: skip
            if self._allocation is not None:
                for event in self._allocation.departed(self.picture.run, self.clock.now()):
                    self.happened(event)
            self._notifier.ready()
            await self._until_ended()
            await self._rehearsal.close()
            self._notifier.stopping()
            if self.picture.run.status is Status.ENDED:
                await self._until_mirrored(min(self._drain_s(), MIRROR_S))
                await self.agents.dismiss(self._drain_s())
            self._journal.close()
        finally:
            for server in servers:
                server.close()
            if self._home.gone():  # what was written since is no run
                contract.unlink_quietly(str(self.run_dir.control_path))
                with contextlib.suppress(OSError):
                    os.rmdir(self.run_dir.path)
            self._home.close()
            with contextlib.suppress(OSError):
                os.unlink(self._socket_path)
        if self.picture.run.status is not Status.ENDED:
            return ExitStatus.REQUEUE  # the run goes on, and wants a daemon again
        outcome = self.picture.run.outcome
        assert outcome is not None
        return outcome.exit_status

    async def _until_ended(self) -> None:
        while self.picture.run.status is not Status.ENDED and not self._detaching:
            deadline = next_deadline(self.picture.run)
            wait = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - self.clock.now()) + 0.001)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)
            self._wake.clear()
            self._tick()

    def _tick(self) -> None:
        self._turned = time.monotonic()
        self._notifier.alive()
        self.agents.mind(self.picture.run)
        self._look_at_home()
        self._look_at_ranks()
        self._look_at_allocation()
        self._take_in()
        self._act()

    def _act(self) -> None:
        """Do what the picture calls for, until it calls for nothing more."""
        if self._acting:
            return
        self._acting = True
        try:
            for _ in range(MAX_RECORDS):
                if self.picture.run.status is Status.ENDED:
                    break
                commands = picture.decide(self.picture, self.clock.now())
                if len(commands) == 1 and isinstance(commands[0], Record):
                    self._append(replace(commands[0].event, at=time.time()))
                    continue
                self._steer = next((c for c in commands if isinstance(c, Steer)), None)
                for command in commands:
                    self._carry_out(command)
                self._push_control()
                self._push_promotion()
                self._push_mirrors()
                return
            else:
                raise RuntimeError(f"a decision is recorded for ever: {commands[0]}")
            self._wake.set()
        finally:
            self._acting = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Ask(node=node, what=what, avoid=avoid, suspects=suspects, settle=settle, floor=floor):
                question: Message = {"type": "ask", "what": what}
                if what == "sharing":
                    question |= {"nodes": list(command.nodes), "tiers": list(command.tiers)}
                if what == "holdings":
                    question["markers"] = dict(self._markers)
                if what == "inventory":
                    question |= {
                        "floor": floor, "markers": dict(self._markers), "avoid": list(avoid), "suspects": list(suspects),
                        "expected": tierbook.newest_sequences(self.picture.tiers), "settle": settle,
                    }  # fmt: skip
                self.agents.say(node, ("ask", what), question)
            case Gather(node=node, attempt=attempt):
                self.agents.say(node, ("gather", attempt), orders.gather(self.picture.run, node))
            case OpenStore(node=node, attempt=attempt):
                self.agents.say(node, ("store", attempt), {"type": "store", "attempt": attempt})
            case Launch(node=node, attempt=attempt):
                if self.agents.unsaid(node, ("launch", attempt)):
                    order = self._launching.order(node, python=self._python(node))
                    self.agents.say(node, ("launch", attempt), order)
            case Rehearse(tier=tier):
                self._rehearsal.start(tier)
            case Stop(node=node, attempt=attempt, grace=grace, stacks=stacks):
                order = {"type": "stop", "attempt": attempt, "grace": grace, "stacks": stacks}
                self.agents.say(node, ("stop", attempt), order)
            case _:
                pass

    @property
    def _launching(self) -> orders.Launching:
        """The orders to launch what the picture shows now: made once for all nodes."""
        if self._orders is None or self._orders[0] is not self.picture:
            made = orders.Launching(self.spec, self.run_dir, self.run_id, self.picture, drill=self._drill)
            self._orders = (self.picture, made)
        return self._orders[1]

    def _python(self, node: str) -> str | None:
        """The interpreter of a node's workers, where job.yaml has none for all and the host one of its own."""
        return self.agents.python(node) if self.spec.python is None else None

    def _look_at_home(self) -> None:
        """Whether the run directory is still there: without it nobody can reach this run, and a second one may begin."""
        if self.picture.run.request is None and self._home.gone():
            self._note(
                "error",
                f"the run directory {self.run_dir.path} was removed or replaced while the run lives: saving and stopping. "
                "Checkpoints are kept; `ckptd run` goes on from the newest as a new run, without this one's history",
            )
            self.request("stop", source="removed run directory", exit_status=ExitStatus.REQUEUE)

    def _look_at_allocation(self) -> None:
        """Whether Slurm takes nodes out of use, and whether its time is over."""
        if self._allocation is None or self.picture.run.status is Status.ENDED:
            return
        for event in self._allocation.changed(self.picture.run, self.clock.now()):
            self.happened(event)
        stop = self._allocation.stop(self.picture, self.clock.now())
        if stop is not None:
            self.happened(stop)

    def _look_at_ranks(self) -> None:
        """Whether they still move, and, now and then, where they are."""
        for event in (self._watch.progress, self._watch.hang):
            found = event(self.picture.run, self.clock.now())
            if found is not None:
                self.happened(found)

    # --- the control file ---

    def _push_control(self) -> None:
        """Have the control file say what holds now, where that changed."""
        state = self.picture.run
        node = orders.node_of_rank_zero(state)
        session = None if node is None else self.agents.session(node)
        if state.status not in LIVE or node is None or session is None or not state.nodes[node].started:
            return
        decision = self.picture.decision
        steer = self._steer
        wanted = contract.Control(
            seq=0,
            attempt=state.attempt,
            interval_s=decision.interval_s if decision else None,
            interval_steps=decision.interval_steps if decision and decision.interval_s is None else None,
            save_request=steer.save_request if steer else state.save_request,
            stop_after_save=steer.stop_after_save if steer else False,
            reason=steer.reason if steer else (decision.reason if decision else ""),
            issued_at=0.0,
        )
        if self._control is not None and replace(self._control, seq=0, issued_at=0.0) == wanted:
            return
        # Numbers go up over restarts of the daemon, since the run's clock does.
        seq = max((self._control.seq if self._control else 0) + 1, int(self.clock.now() * 1000))
        self._control = replace(wanted, seq=seq, issued_at=time.time())
        message = {
            "type": "control",
            "path": str(self.run_dir.control_path),
            "document": {**self._control.__dict__},
        }
        session.channel.send(message)

    def _push_promotion(self) -> None:
        """Have agents know how often a checkpoint goes to each tier, where that changed."""
        every = {tier.name: tier.every for tier in self.picture.tiers if tier.every is not None}
        if len(every) < 2:
            return
        # All nodes see the same tiers: the node of rank 0 hears of commits first, and two would be in each other's way.
        sessions = self.agents.sessions()
        here = self.agents.session(orders.node_of_rank_zero(self.picture.run) or "")
        here = here or next((s for s in sessions if s.promotion.get("here")), next(iter(sessions), None))
        for session in sessions:
            order = {"type": "promotion", "every": every, "here": session is here}
            if session.promotion != order:
                session.promotion = order
                session.channel.send(order)

    def _push_mirrors(self) -> None:
        """Have each agent know whose files it holds a second copy of, where that changed."""
        state = self.picture.run
        if state.status not in LIVE or not state.own_tiers:
            return
        for session in self.agents.sessions():
            order = orders.mirror(state, session.node)
            if session.mirror != order:
                session.mirror = order
                session.channel.send(order)

    async def _until_mirrored(self, most_s: float) -> None:
        """At the end of a run: let the last commit come to lie on two nodes, where each has its own tier."""
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline and not self.agents.hurried:
            state, book = self.picture.run, {tier.name: tier for tier in self.picture.tiers}
            nodes = [name for name in state.placement if self.agents.session(name) is not None]
            tier = book[state.own_tiers[0]] if state.own_tiers else None
            if tier is None or len(nodes) < 2 or tier.mirrored_sequence >= tier.newest_sequence:
                return
            await asyncio.sleep(0.05)

    def _drain_s(self) -> float:
        """What may be waited for at the end; somebody who wants to stop now waits for nothing."""
        request = self.picture.run.request
        return 0.0 if request is not None and request.request == "stop_now" else DRAIN_S

    # --- requests ---

    def request(self, what: str, *, source: str, exit_status: int | None = None, reason: str = "") -> None:
        """Somebody asks for `save`, `stop` or `stop_now`."""
        self.happened(
            events.Requested(
                t=self.clock.now(), request=what, source=source, exit_status=exit_status, reason=reason,  # type: ignore[arg-type]
                timeout_s=orders.drain_timeout(self.picture.estimate),
            )
        )  # fmt: skip

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        # A closed terminal is no reason to end days of training.
        loop.add_signal_handler(signal.SIGHUP, lambda: log.info("SIGHUP ignored"))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        pending = self.picture.run.request
        if self.picture.run.status is Status.ENDED:
            self.agents.hurry()
        elif (pending is None or pending.request == "relaunch") and not self._detaching:
            self.request("stop", source=signal.Signals(number).name, exit_status=ExitStatus.REQUEUE)

    def _on_interrupt(self) -> None:
        pending = self.picture.run.request
        if self.picture.run.status is Status.ENDED:
            self.agents.hurry()
        elif pending is None or pending.request == "relaunch":
            self.request("stop", source="Ctrl-C", exit_status=ExitStatus.INTERRUPTED)
        else:
            self.request("stop_now", source="Ctrl-C again", exit_status=ExitStatus.INTERRUPTED)

    # --- connections ---

    async def _serve(self, channel: Channel) -> None:
        try:
            first = await asyncio.wait_for(channel.receive(), HELLO_PATIENCE_S)
        except TimeoutError:
            raise link.LinkError(f"nothing was said for {HELLO_PATIENCE_S:g} s") from None
        if first is None:
            return
        if first["type"] == "request" and not channel.remote:
            answer = await self._upkeep.answer(first) if self._upkeep.answers(first) else self._answer(first)
            channel.send(answer)
            await channel.flush()
        elif first["type"] == "hello":
            await self._serve_agent(channel, first)
        else:
            channel.send({"type": "refused", "why": f"a connection does not begin with {first['type']!r}"})
            await channel.flush()

    def _answer(self, request: Message) -> Message:
        what = request.get("what")
        if what == "status":
            return {"type": "status", "status": self.status()}
        if what == "ping":
            return {"type": "pong", "pid": os.getpid()}
        if what == "hold":
            self._held[str(request.get("path"))] = time.monotonic() + HOLD_S
            return {"type": "accepted"}
        if what == "drilled":
            return self._drilled(request)
        if what == "detach":
            return self._detach(str(request.get("source", "ckptd")))
        if what in ("drain", "undrain"):
            return self._drain(str(request.get("device", "")), drained=what == "drain")
        if what in ("stop", "stop_now", "save"):
            state = self.picture.run
            if state.status is Status.ENDED:
                return {"type": "refused", "why": "the run is over"}
            if what == "save" and state.status is not Status.TRAINING:
                return {"type": "refused", "why": f"the run is {state.status.value}: there is nothing to save"}
            if what == "stop" and state.request is not None and state.request.request != "relaunch":
                return {"type": "accepted", "why": "a stop is under way already"}
            exit_status = None if what == "save" else int(request.get("exit_status") or ExitStatus.REQUEUE)
            self.request(what, source=str(request.get("source", "ckptd")), exit_status=exit_status)
            return {"type": "accepted"}
        return {"type": "refused", "why": f"unknown request {what!r}"}

    def _drilled(self, request: Message) -> Message:
        """Take down a drill that the command line has held."""
        try:
            event = events.from_parts("drilled", dict(request["result"]), t=self.clock.now())
        except (KeyError, TypeError, ValueError) as error:
            return {"type": "refused", "why": f"a drill's result cannot be read: {error!r}"}
        assert isinstance(event, events.Drilled)
        self._held.pop(event.path, None)
        self.happened(event)
        return {"type": "accepted"}

    def _detach(self, source: str) -> Message:
        """Leave, and leave the run as it is: agents and workers go on, and the next daemon takes them over."""
        if self.picture.run.status is Status.ENDED:
            return {"type": "refused", "why": "the run is over"}
        patience = format_duration(self.spec.cluster.orphan_timeout)
        self._note(
            "info", f"this daemon leaves ({source}), the run goes on; without another one for {patience} it stops"
        )
        self._detaching = True
        self._wake.set()
        return {"type": "accepted"}

    def _drain(self, asked: str, *, drained: bool) -> Message:
        """Take devices out of use or give them back: one by index, `node:index` or identity, or a whole node by name."""
        named = self.picture.run.book.named(asked)
        if not named and asked in self.picture.run.policy.nodes:
            named = [node_identity(asked)]  # a node that has not dialled in yet
        if not named:
            known = ", ".join(self.picture.run.book.names()) or "none yet"
            return {"type": "refused", "why": f"no device or node is called {asked!r}; there are: {known}"}
        for identity in named:
            self.happened(
                events.DeviceDrained(t=self.clock.now(), device=identity, drained=drained, source="ckptd drain")
            )
        return {"type": "accepted", "devices": named}

    async def _serve_agent(self, channel: Channel, hello: Message) -> None:
        session = await self.agents.admit(channel, hello)
        if session is None:
            return
        acknowledged = self._journal.acknowledged(session.node, session.agent_id)
        settings = orders.settings(
            self.spec,
            len(hello.get("devices", [])),
            python=self._python(session.node),
            node=session.node,
            own=self.picture.run.own_tiers,
        )
        epoch = self._door.epoch if self._door is not None else 0
        channel.send({"type": "welcome", "settings": settings, "acknowledged": acknowledged, "epoch": epoch})
        self._control = None  # whatever it says now, say it to this agent
        self._take(
            events.AgentConnected(
                t=self.clock.now(), at=time.time(), node=session.node, pid=int(hello.get("pid", 0)),
                devices=list(hello.get("devices", [])), running=hello.get("running"), address=str(hello.get("address", "")),
            )
        )  # fmt: skip
        self._soon()
        try:
            while (message := await channel.receive()) is not None:
                self._from_agent(session, message)
        finally:
            self._consultations.lost(session)
            if self.agents.left(session):
                self._wake.set()

    def _from_agent(self, session: Session, message: Message) -> None:
        session.silent_s, session.spoke_at = 0.0, time.monotonic()
        if message["type"] == "live":
            if self._door is not None:  # the agent has to know that it was heard, or it ends what it carries
                session.channel.send({"type": "heard", "mono": message.get("mono", 0.0)})
            if message.get("attempt") == self.picture.run.attempt:
                self._watch.hear(message)
                self._look_at_ranks()
        elif message["type"] == "event":
            self._event_from_agent(session, message)
        elif message["type"] == "answer":
            self._consultations.answered(message)
        else:
            log.warning("node %s sent a message of an unknown kind: %s", session.node, message["type"])

    def _event_from_agent(self, session: Session, message: Message) -> None:
        try:
            origin = Origin(node=session.node, agent_id=session.agent_id, seq=int(message["seq"]))
            age = float(message.get("age_s", 0.0))
            if not math.isfinite(age):
                raise ValueError(f"an age of {age} s")
        except (KeyError, TypeError, ValueError) as error:
            raise link.LinkError(f"an event without a number or an age: {error!r}") from None
        try:
            event = self._read_event(session, message, t=self.clock.now() - age)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("node %s sent an event that cannot be read (%r): %.500r", session.node, error, message)
            self._take_in()  # what came before it
            if not self._journal.waiting:
                self._acknowledge(origin)  # it would be no better the next time
            return
        self._take(event, session, origin)
        self._soon()

    def _heard(self, session: Session, event: events.Event) -> None:
        """What an agent told is in the ledger and in the picture."""
        if isinstance(event, events.HealthReported):
            self.agents.forget_said(session, ("ask", "health"))
        if isinstance(event, events.SharingReported):
            self.agents.forget_said(session, ("ask", "sharing"))
        if isinstance(event, events.HoldingsReported):
            self.agents.forget_said(session, ("ask", "holdings"))
            self._say_rejected(event.rejected)
        if isinstance(event, events.InventoryReported):
            if event.problem:
                log.warning("node %s: %s", session.node, event.problem)
                asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask_again, session)
                return
            self.agents.forget_said(session, ("ask", "inventory"))
            self._say_what_was_found(event)

    def _read_event(self, session: Session, message: Message, *, t: float) -> events.Event:
        data = dict(message["data"])
        if "detected_age_s" in data:
            data["detected_t"] = t + float(data.pop("detected_age_s"))
        for found in data.get("exits", []) if message["kind"] == "attempt_ended" else []:
            found["t"] = t + float(found.get("t", 0.0))  # told relative to the event, since clocks differ
        if message["kind"] == "requested":
            data |= {"exit_status": ExitStatus.REQUEUE, "timeout_s": orders.drain_timeout(self.picture.estimate)}
        return events.from_parts(
            message["kind"], data, t=t, at=time.time(), attempt=message.get("attempt"), node=session.node,
            rank=message.get("rank"),
        )  # fmt: skip

    def _say_what_was_found(self, event: events.InventoryReported) -> None:
        """Tell a person what is odd about the checkpoints that were found."""
        for item in event.unreachable:
            self._note(
                "error",
                f"tier {item['tier']!r} is passed over, it cannot be read: {item['problem']}{_risk(item, event)}",
            )
        self._say_rejected(event.rejected)
        if event.chosen is not None and event.chosen.get("run_id") not in (None, self.run_id):
            self._note(
                "warning",
                f"going on from step {event.chosen['step']} of an earlier run named {self.spec.name!r} "
                f"({event.chosen['path']}); to begin afresh give the run another name",
            )

    def _say_rejected(self, rejected: list[dict[str, Any]]) -> None:
        for item in rejected:
            self._note("warning", f"{item['path']} is not resumed from: {item['problem']}")

    def _note(self, level: Literal["info", "warning", "error"], what: str) -> None:
        self._append(events.Noted(t=self.clock.now(), at=time.time(), level=level, what=what))

    def _ask_again(self, session: Session) -> None:
        self.agents.forget_said(session, ("ask", "inventory"))
        self._act()

    # --- what the daemon does by itself ---

    def _prune(self) -> None:
        # Of a tier that all nodes see, one of them is enough, and two would be in each other's way.
        sessions = self.agents.sessions()
        first = self.agents.session(orders.node_of_rank_zero(self.picture.run) or "") or next(iter(sessions), None)
        for session in sessions if self.picture.run.own_tiers else [s for s in sessions if s is first]:
            session.channel.send({"type": "prune", "holdings": self.holdings(), "shared": session is first})

    def holdings(self) -> Message:
        """What retention has to know of the run."""
        now = time.monotonic()
        self._held = {path: until for path, until in self._held.items() if until > now}
        drilled = [path for path in (self._rehearsal.holding, *self._held) if path]
        return orders.holdings(self.picture.run, self.run_id, drilled=drilled, tiers=self.picture.tiers)

    # --- what others ask of it ---

    @property
    def markers(self) -> dict[str, str]:
        """CRC-32C of the markers of the newest commits, by `marker_key`."""
        return dict(self._markers)

    def status(self) -> dict[str, Any]:
        """The status document. May be called from another thread: pictures are never changed in place."""
        daemon = {"pid": os.getpid(), "version": __version__, "web": self.web_address}
        watch = self._watch
        return status.document(
            self.picture, t=self.clock.now(), live=watch.live, daemon=daemon, heartbeat_at=watch.heartbeat_at
        )

    def alive(self) -> bool:
        """Whether the main loop has turned of late. May be called from another thread."""
        return time.monotonic() - self._turned < 10 * TICK_S


def _risk(item: dict[str, Any], event: events.InventoryReported) -> str:
    newest = (event.chosen or {}).get("sequence", 0)
    if item.get("expected", 0) <= newest:
        return ""
    return f". IT HOLDS A NEWER COMMIT than any other, {item['expected']} and not {newest}: what came after is trained again"
