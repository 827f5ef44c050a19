"""Which nodes on other machines are lost, and where is an agent to be started? Heartbeats say the first, never TCP alone.

A node is lost when nothing has been heard of it for `cluster.heartbeat_timeout`, by the daemon's own monotonic clock. Its
agent, if it lives, knows by its own that it was not heard for `cluster.fence_timeout`, which is shorter, and has ended
what it carried alone. A connection that breaks means nothing by itself: the agent dials again. Meanwhile the launcher
reaches for the node, and finds out whether the agent there lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.agents import LONGEST_TURN_S, Session, Sessions
from ckptd.core import events
from ckptd.core.state import RunState, Status
from ckptd.errors import ExitStatus
from ckptd.launchers.base import Arrival, RemoteLauncher
from ckptd.link import Channel, Message

log = logging.getLogger(__name__)

ADOPTION_GRACE_S = 7.0
"""Agents that live dial a new daemon within this: until then nobody reaches for their nodes."""
REDIAL_GRACE_S = 2.0
"""The same after a connection that broke: an agent tries again at once."""
DIAL_PATIENCE_S = 16.0
"""An agent that lives and was told where to dial does so within this (see `link`: a try that hangs, and the pause after it).

One that does not hangs. That its node was out of reach says nothing against it."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Between two tries to reach a node."""
MAX_VAIN_STARTS = 3
"""Tries on every node, all of them in vain, after which a run that has no agent at all ends."""
FAREWELL_S = 15.0


@dataclass(kw_only=True)
class _Watch:
    """What is known of one node's agent."""

    silent_s: float = 0.0
    lost: bool = False
    next_start: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    vain: int = 0
    why: str = ""
    met: bool = False
    """Its agent has dialled in to this daemon."""
    told_at: float | None = None
    """When an agent was first found alive there since it last dialled in, and told where to dial."""


class Fleet(Sessions):
    """The agents of one run on other machines."""

    def __init__(
        self, *, launcher: RemoteLauncher, run_id: str, happened: Callable[[events.Event], None],
        now: Callable[[], float], heartbeat_s: float, adopting: bool,
    ) -> None:  # fmt: skip
        super().__init__(nodes=launcher.nodes(), run_id=run_id)
        self._happened = happened
        self._now = now
        self._turned = time.monotonic()
        self._remote = launcher
        self._heartbeat_s = heartbeat_s
        # Agents of a run that is under way dial by themselves.
        first = time.monotonic() + (ADOPTION_GRACE_S if adopting else 0.0)
        self._watches = {node: _Watch(next_start=first) for node in launcher.nodes()}
        self._stopping_s = 0.0
        self.superseded = False

    async def admit(self, channel: Channel, hello: Message) -> Session | None:
        session = await super().admit(channel, hello)
        if session is not None:
            self._watches[session.node] = _Watch(met=True)
        return session

    def left(self, session: Session) -> bool:
        present = super().left(session)
        if present:
            watch = self._watches[session.node]
            watch.silent_s = session.silent_s
            watch.next_start = time.monotonic() + REDIAL_GRACE_S
        return present

    def python(self, node: str) -> str | None:
        return self._remote.python(node)

    def mind(self, state: RunState) -> None:
        if state.status is Status.ENDED:
            return
        now = time.monotonic()
        # A daemon that stood still itself has heard nobody.
        before, self._turned = self._turned, now
        passed = min(now - before, LONGEST_TURN_S)
        self._stopping_s = self._stopping_s + passed if state.status is Status.STOPPING else 0.0
        for node, watch in self._watches.items():
            arrival = self._remote.arrival(node)
            if arrival is not None:
                self._arrived(node, watch, arrival, state)
            session = self.session(node)
            if session is None:
                watch.silent_s += passed
            else:
                if session.spoke_at > before:  # since the last look: only what came after that is silence
                    session.silent_s = -min(session.spoke_at - before, passed)
                session.silent_s += passed
                watch.silent_s = session.silent_s
            if watch.silent_s > self._heartbeat_s and not watch.lost:
                self._lose(node, watch, f"nothing was heard of it for {watch.silent_s:.0f} s", session)
            if session is not None and self._stopping_s > self.stop_patience_s and node in state.placement:
                self._end_at_last(node, state)
            if (session is None or watch.lost) and now >= watch.next_start and not self._remote.busy(node):
                hangs = watch.told_at is not None and now - watch.told_at >= DIAL_PATIENCE_S
                self._remote.start(node, replace=watch.lost and hangs)
                watch.next_start = now + watch.pause_s
                if watch.told_at is not None and not hangs:
                    watch.next_start = min(watch.next_start, watch.told_at + DIAL_PATIENCE_S)
                watch.pause_s = min(LONGEST_PAUSE_S, 2 * watch.pause_s)
        self._give_up(state)

    def _end_at_last(self, node: str, state: RunState) -> None:
        """Replace an agent that speaks and does not come to an end with an attempt: another one ends what is left."""
        if not state.nodes[node].ended and not self._remote.busy(node):
            log.warning("the agent of node %s does not end attempt %d; it is replaced", node, state.attempt)
            self._stopping_s = 0.0
            self._remote.start(node, replace=True)

    def _lose(self, node: str, watch: _Watch, why: str, session: Session | None) -> None:
        watch.lost = True
        if session is not None:
            session.channel.abort()  # whatever still comes out of it is too late: the agent dials again
        self._happened(events.NodeLost(t=self._now(), node=node, why=why, silent_s=watch.silent_s))

    def _arrived(self, node: str, watch: _Watch, arrival: Arrival, state: RunState) -> None:
        if arrival.superseded:
            self._supersede(arrival.why)
        elif not arrival.ok:
            watch.vain += 1
            if arrival.why != watch.why:
                log.warning("%s", arrival.why)
            watch.why = arrival.why
            known = state.nodes.get(node)
            if not watch.lost and not watch.met and (known is None or known.agent == 0):
                # It was never there, and carries nothing: nobody needs to wait for its silence.
                self._lose(node, watch, arrival.why, None)
        else:
            watch.vain, watch.why = 0, ""
            known = state.nodes.get(node)
            if arrival.before == "alive" and watch.told_at is None:
                watch.told_at = time.monotonic()
                watch.next_start = min(watch.next_start, watch.told_at + DIAL_PATIENCE_S)
            replaced = arrival.before in ("dead", "killed") and known is not None and known.agent and not known.lost
            if replaced and self.session(node) is None:
                self._happened(events.AgentLost(t=self._now(), node=node, why=f"it was found {arrival.before}"))

    def _supersede(self, why: str) -> None:
        self.superseded = True
        self._happened(
            events.RunEnded(
                t=self._now(), outcome="unavailable", exit_status=ExitStatus.USAGE,
                detail=f"another daemon has taken this run over, and this one ends ({why})",
            )
        )  # fmt: skip

    def _give_up(self, state: RunState) -> None:
        """End a run that nobody can start an agent for: its hosts, or its installation, need a person."""
        watches = self._watches.values()
        if state.placement or not all(w.vain >= MAX_VAIN_STARTS and not w.met for w in watches):
            return
        whys = dict.fromkeys(w.why for w in watches)
        self._happened(
            events.RunEnded(
                t=self._now(), outcome="unavailable", exit_status=ExitStatus.UNAVAILABLE,
                detail=f"no node agent could be started: {'; '.join(list(whys)[:5])}",
            )
        )  # fmt: skip

    def _hears(self, sessions: list[Session]) -> bool:
        return any(self.session(session.node) is session for session in sessions)

    async def dismiss(self, drain_s: float = 0.0) -> None:
        """Have every agent leave. Those that cannot be told do so by themselves, in time."""
        if not self.superseded:
            deadline = time.monotonic() + drain_s + FAREWELL_S
            # The one that sees to the slower tiers first: the others may hold a part of what it brings there.
            first = [session for session in self.sessions() if session.promotion.get("here")]
            for session in first:
                session.channel.send({"type": "exit", "drain_s": drain_s})
            while self._hears(first) and time.monotonic() < deadline and not self._hurried:
                await asyncio.sleep(0.02)
            for session in self.sessions():
                if session not in first:
                    session.channel.send({"type": "exit", "drain_s": drain_s})
            while self.sessions() and time.monotonic() < deadline and not self._hurried:
                await asyncio.sleep(0.02)
            silent = [n for n, w in self._watches.items() if w.met and (w.lost or self.session(n) is not None)]
            for node in silent:
                self._remote.end(node)
            while any(map(self._remote.busy, silent)) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(self._remote.close, over=not self.superseded)
