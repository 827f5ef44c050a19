"""What the daemon answers to `ckptd pin`, `unpin`, `gc` and `rollback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckptd.clock import RunClock
from ckptd.consult import Consultations
from ckptd.core import events
from ckptd.core.keeping import name_of
from ckptd.core.picture import Picture
from ckptd.core.state import RunState
from ckptd.errors import UsageError
from ckptd.link import Message

if TYPE_CHECKING:
    from ckptd.agents import Sessions


class Run(Protocol):
    """The daemon, as far as this module needs it."""

    picture: Picture
    clock: RunClock
    agents: Sessions

    @property
    def markers(self) -> dict[str, str]: ...

    def happened(self, event: events.Event) -> None: ...

    def holdings(self) -> Message: ...


class Upkeep:
    """Checks what is asked against what the run knows, has the agent look at the tiers, and records what follows."""

    def __init__(self, run: Run, consultations: Consultations) -> None:
        self._run = run
        self._consultations = consultations
        self._questions = {"pin": self._pin, "unpin": self._unpin, "gc": self._gc, "rollback": self._rollback}

    def answers(self, request: Message) -> bool:
        """Whether a request is for this module."""
        return request.get("what") in self._questions

    async def answer(self, request: Message) -> Message:
        """`accepted` with what was asked for, or `refused` with `why`."""
        try:
            return {"type": "accepted", **await self._questions[request["what"]](request)}
        except UsageError as error:
            return {"type": "refused", "why": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"type": "refused", "why": f"the request makes no sense: {error!r}"}

    async def _ask(self, what: str, **question: object) -> Message:
        answer = await self._consultations.ask(what, markers=self._run.markers, **question)
        if not answer["ok"]:
            raise UsageError(str(answer["why"]))
        return {key: value for key, value in answer.items() if key not in ("type", "token", "ok")}

    async def _pin(self, request: Message) -> Message:
        return await self._ask(
            "pin", step=int(request["step"]), path=request.get("path"), label=str(request.get("label", "")),
            source="ckptd pin",
        )  # fmt: skip

    async def _unpin(self, request: Message) -> Message:
        event = unpinned(self._run.picture.run, int(request["step"]), request.get("path"), t=self._run.clock.now())
        for session in self._run.agents.sessions():
            session.channel.send({"type": "unpin", "names": [name_of(event.path)]})
        self._run.happened(event)
        return {"step": event.step, "path": event.path}

    async def _gc(self, request: Message) -> Message:
        return await self._ask("gc", holdings=self._run.holdings(), dry_run=bool(request["dry_run"]))

    async def _rollback(self, request: Message) -> Message:
        refuse_rollback(self._run.picture.run)
        found = await self._ask("verify", step=int(request["step"]), path=request.get("path"))
        state = self._run.picture.run  # reading it took a while
        refuse_rollback(state)
        event = rollback_to(state, found, t=self._run.clock.now(), why=str(request.get("why", "")))
        lost = max(0, state.step - event.to_step)
        self._run.happened(event)
        return {"step": event.to_step, "path": event.path, "lost_steps": lost}


def unpinned(state: RunState, step: int, path: str | None, *, t: float) -> events.CheckpointPinned:
    """The end of the pin on `step`, or on the checkpoint at `path`.

    Raises:
        UsageError: no such one is pinned, or several of that step are; the message says which are.
    """
    pins = state.keeping.pins
    found = [p for name, p in pins.items() if p.step == step and path in (None, p.path, name)]
    if not found:
        known = ", ".join(f"{p.step}" + (f" ({p.label})" if p.label else "") for p in pins.values())
        raise UsageError(f"step {step} is not pinned; pinned are: {known or 'none'}")
    if len(found) > 1:
        paths = ", ".join(p.path for p in found)
        raise UsageError(f"{len(found)} checkpoints of step {step} are pinned; say which with --path: {paths}")
    (pin,) = found
    return events.CheckpointPinned(
        t=t, step=pin.step, path=pin.path, label=pin.label, pinned=False, source="ckptd unpin"
    )


def refuse_rollback(state: RunState) -> None:
    """Raise UsageError where the run cannot go back just now."""
    if state.request is not None and state.request.request != "relaunch":
        raise UsageError("the run is stopping; roll back when it has stopped")


def rollback_to(state: RunState, found: Message, *, t: float, why: str) -> events.RolledBack:
    """Going back to what was found (`step`, `path`, `tier`, `sequence`, `samples`).

    Raises:
        UsageError: the run went back from that commit before.
    """
    if state.keeping.suspect(int(found["sequence"])):
        raise UsageError(
            f"the checkpoint of step {found['step']} at {found['path']} is suspect: the run went back from it before"
        )
    return events.RolledBack(
        t=t, to_step=int(found["step"]), path=str(found["path"]), tier=str(found["tier"]),
        sequence=int(found["sequence"]), samples=int(found["samples"]), source="ckptd rollback", why=why,
    )  # fmt: skip
