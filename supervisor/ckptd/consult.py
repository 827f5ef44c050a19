"""What the command line asks of a living daemon and only an agent can answer: the daemon reads no checkpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from ckptd.agents import Sessions
from ckptd.link import Message

PATIENCE_S = 3600.0
"""Reading every byte of a large checkpoint takes its time; an agent that is gone is noticed by its connection."""


class Consultations:
    """Questions that wait for their answers."""

    def __init__(self, agents: Sessions) -> None:
        self._agents = agents
        self._token = 0
        self._waiting: dict[int, tuple[Any, asyncio.Future[Message]]] = {}

    async def ask(self, what: str, **question: Any) -> Message:
        """An agent's answer: `ok`, and `why` where it is false."""
        session = next(iter(self._agents.sessions()), None)
        if session is None:
            return {"ok": False, "why": "no node agent is connected just now; try again"}
        self._token += 1
        token = self._token
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = session, future
        session.channel.send({"type": "consult", "token": token, "what": what, **question})
        try:
            return await asyncio.wait_for(future, PATIENCE_S)
        except TimeoutError:
            return {"ok": False, "why": f"no answer within {PATIENCE_S:.0f} s"}
        finally:
            self._waiting.pop(token, None)

    def answered(self, message: Message) -> None:
        """An agent says something to a question."""
        _, future = self._waiting.get(int(message.get("token", 0)), (None, None))
        if future is not None and not future.done():
            future.set_result(message)

    def lost(self, session: Any) -> None:
        """A connection to an agent ended: what it was asked gets no answer."""
        for asked, future in self._waiting.values():
            if asked is session and not future.done():
                future.set_result({"ok": False, "why": "the node agent's connection was lost; try again"})
