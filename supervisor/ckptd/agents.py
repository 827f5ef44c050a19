"""Which node agents are connected, what was said to them, and which of them live: started, missed, replaced, dismissed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd import link
from ckptd.core import events
from ckptd.core.state import RunState, Status
from ckptd.errors import CkptdError, ExitStatus
from ckptd.launchers.base import Launcher
from ckptd.link import Channel, Message

log = logging.getLogger(__name__)

REDIAL_PATIENCE_S = 30.0
"""How long a living agent may take to dial back before it counts as lost."""
MAX_AGENT_STARTS = 3
"""Agents that die before they say hello, in a row, before the run gives up."""
SILENCE_S = 60.0
"""A connected agent speaks twice a second. One that is silent for so long hangs, and is replaced."""
LONGEST_TURN_S = 2.0
"""What one turn of the daemon's loop may count as silence: a daemon that itself stood still has heard nobody."""
EXIT_PATIENCE_S = 10.0
STOP_PATIENCE_S = 120.0
"""What ending an attempt may take besides `stop_grace`. An agent that does not come to an end with it is replaced."""
MAX_AGENT_KILLS = 3
"""Kills of one agent in a row, after which it counts as one that cannot be killed."""


@dataclass(kw_only=True)
class Session:
    """A connected agent."""

    node: str
    agent_id: str
    channel: Channel
    said: set[tuple[Any, ...]] = field(default_factory=set)
    """What was sent over it: nothing is said twice in a connection, and all of it again in the next."""
    silent_s: float = 0.0
    spoke_at: float = 0.0
    """When it was heard last, by the monotonic clock."""
    promotion: Message = field(default_factory=dict)
    """What it was told last of the slower tiers: whether they are its business, and how often each is served."""
    mirror: Message = field(default_factory=dict)
    """What it was told last of whose files it holds a second copy of."""


class Sessions:
    """The connections to the agents of one run's nodes."""

    def __init__(self, *, nodes: list[str], run_id: str) -> None:
        self._nodes = nodes
        self._run_id = run_id
        self._sessions: dict[str, Session] = {}
        self.stop_patience_s = STOP_PATIENCE_S
        self._hurried = False

    def python(self, node: str) -> str | None:  # noqa: ARG002
        """The interpreter of a node, where it has one of its own."""
        return None

    def mind(self, state: RunState) -> None:
        """Start agents that are not there, and notice those that are gone."""
        raise NotImplementedError

    async def dismiss(self, drain_s: float = 0.0) -> None:
        """Have every agent leave; `drain_s`: how long they may take to bring the last commit to every tier."""
        raise NotImplementedError

    def hurry(self) -> None:
        """Do not wait for agents that leave."""
        self._hurried = True

    @property
    def hurried(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self._hurried

    def session(self, node: str) -> Session | None:
        """The connection of a node's agent."""
        return self._sessions.get(node)

    def sessions(self) -> list[Session]:
        """Every connection."""
        return list(self._sessions.values())

    async def admit(self, channel: Channel, hello: Message) -> Session | None:
        """The session that a hello begins, in the place of an older one of that node; None: it was refused."""
        node = str(hello.get("node"))
        refusal = self._refuse(hello, node)
        if refusal is not None:
            channel.send({"type": "refused", "why": refusal})
            await channel.flush()
            return None
        session = Session(node=node, agent_id=str(hello.get("agent_id")), channel=channel, spoke_at=time.monotonic())
        previous = self._sessions.get(node)
        self._sessions[node] = session
        if previous is not None:
            await previous.channel.close()
        return session

    def _refuse(self, hello: Message, node: str) -> str | None:
        if hello.get("protocol") != link.PROTOCOL:
            return f"protocol {hello.get('protocol')}, this daemon speaks {link.PROTOCOL}"
        if hello.get("run_id") != self._run_id:
            return f"this is run {self._run_id}, not {hello.get('run_id')}"
        if node not in self._nodes:
            return f"node {node!r} is not part of this run"
        return None

    def left(self, session: Session) -> bool:
        """A connection ended. Whether it was the present one of its node."""
        if self._sessions.get(session.node) is not session:
            return False
        del self._sessions[session.node]
        return True

    def unsaid(self, node: str, key: tuple[Any, ...]) -> bool:
        """Whether a node's agent is connected, and was not told this in its connection."""
        session = self._sessions.get(node)
        return session is not None and key not in session.said

    def say(self, node: str, key: tuple[Any, ...], message: Message) -> None:
        """Send a message once in a connection."""
        session = self._sessions.get(node)
        if session is None or key in session.said:
            return
        session.said.add(key)
        session.channel.send(message)

    def forget_said(self, session: Session, key: tuple[Any, ...]) -> None:
        """Let a message be said again."""
        session.said.discard(key)


class Agents(Sessions):
    """The agents of a run on this machine. `happened` records an event, `now` is the run's clock."""

    def __init__(
        self, *, launcher: Launcher, run_id: str, happened: Callable[[events.Event], None], now: Callable[[], float]
    ) -> None:
        super().__init__(nodes=launcher.nodes(), run_id=run_id)
        self._launcher = launcher
        self._happened = happened
        self._now = now
        self._lost_contact: dict[str, float] = {}
        self._starts: dict[str, int] = {}
        self._turned = time.monotonic()
        self._stopping_s = 0.0
        self._kills: dict[str, int] = {}

    async def admit(self, channel: Channel, hello: Message) -> Session | None:
        session = await super().admit(channel, hello)
        if session is not None:
            self._lost_contact.pop(session.node, None)
            self._starts[session.node] = 0
            self._kills[session.node] = 0
        return session

    def left(self, session: Session) -> bool:
        present = super().left(session)
        if present:
            self._lost_contact[session.node] = time.monotonic()
        return present

    def mind(self, state: RunState) -> None:
        """Start agents that are not there, and notice those that died."""
        if state.status is Status.ENDED:
            return
        now = time.monotonic()
        passed, self._turned = min(now - self._turned, LONGEST_TURN_S), now
        self._stopping_s = self._stopping_s + passed if state.status is Status.STOPPING else 0.0
        for node in self._nodes:
            session = self._sessions.get(node)
            if session is not None:
                session.silent_s += passed
                if session.silent_s > SILENCE_S:
                    log.warning("the agent of node %s has said nothing for %.0f s; it is replaced", node, SILENCE_S)
                    session.silent_s = 0.0
                    self._kill(node)
                elif (
                    self._stopping_s > self.stop_patience_s and node in state.placement and not state.nodes[node].ended
                ):
                    log.warning("the agent of node %s does not end attempt %d; it is replaced", node, state.attempt)
                    self._stopping_s = 0.0
                    self._kill(node)
                continue
            if self._launcher.alive(node):
                since = self._lost_contact.setdefault(node, now)
                if now - since > REDIAL_PATIENCE_S:
                    log.warning("the agent of node %s does not dial back; it is replaced", node)
                    self._lost_contact[node] = now
                    self._kill(node)
                continue
            known = state.nodes.get(node)
            if (
                known is not None
                and not known.lost
                and (known.connected or node in self._lost_contact or known.started)
            ):
                self._happened(events.AgentLost(t=self._now(), node=node, why=self._launcher.why_dead(node)))
            self._start(node)

    def _kill(self, node: str) -> None:
        kills = self._kills[node] = self._kills.get(node, 0) + 1
        if kills > MAX_AGENT_KILLS:
            self._happened(
                events.RunEnded(
                    t=self._now(), outcome="unavailable", exit_status=ExitStatus.UNAVAILABLE,
                    detail=f"the agent of node {node} cannot be killed, and what it launched may live: "
                    "look at the machine before this run is started again",
                )
            )  # fmt: skip
            return
        self._launcher.kill(node)

    def _start(self, node: str) -> None:
        started = self._starts.get(node, 0)
        if started >= MAX_AGENT_STARTS:
            why = self._launcher.why_dead(node)
            self._happened(
                events.RunEnded(
                    t=self._now(), outcome="unavailable", exit_status=ExitStatus.UNAVAILABLE,
                    detail=f"the agent of node {node} died {started} times before it dialled in: {why}",
                )
            )  # fmt: skip
            return
        self._starts[node] = started + 1
        self._kills[node] = 0
        try:
            self._launcher.start(node)
        except CkptdError as error:
            log.error("%s", error)
        self._lost_contact[node] = time.monotonic()

    async def dismiss(self, drain_s: float = 0.0) -> None:
        """Have every agent leave; one that does not is ended.

        `drain_s`: how long they may take to bring the last commit to every tier; `hurry` cuts it short.
        """
        for session in self.sessions():
            session.channel.send({"type": "exit", "drain_s": drain_s})
        deadline = time.monotonic() + drain_s + EXIT_PATIENCE_S
        for node in self._launcher.nodes():
            while self._launcher.alive(node) and time.monotonic() < deadline and not self._hurried:
                await asyncio.sleep(0.02)
            if self._launcher.alive(node):
                self._launcher.kill(node)
