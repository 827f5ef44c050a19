"""What does an agent do with the checkpoints on its tiers? It finds, prunes, pins, and answers questions about them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

from ckptd.core.keeping import name_of
from ckptd.errors import CkptdError, UsageError
from ckptd.link import Message
from ckptd.node import lookup, retire, tiers
from ckptd.node.inuse import InUse
from ckptd.node.retire import Holdings
from ckptd.node.tiers import Found, Tier
from ckptd_shim import contract

log = logging.getLogger(__name__)


class Keeper:
    """Lives on the agent's event loop; what reads or deletes is done in threads.

    Args:
        run_id: whose checkpoints these are.
        emit: tells the daemon of an event, `AgentLink.event`.
        say: answers a question that came by way of the daemon, `AgentLink.say`.
    """

    def __init__(self, run_id: str, *, emit: Callable[..., None], say: Callable[[Message], None]) -> None:
        self.tiers: list[Tier] = []
        """Fastest first; as the daemon said last."""
        self.in_use = InUse()
        self._run_id = run_id
        self._emit = emit
        self._say = say
        self._pruning = False
        self._tight: set[str] = set()
        """Tiers that will be full, which was said."""
        self._verified: dict[str, bool] = {}
        """By path: whether every digest matched when this agent last looked."""

    async def inventory(self, order: Message) -> Message:
        """Which checkpoint to resume from: the fields of `InventoryReported`."""
        answer = await asyncio.to_thread(
            tiers.inventory, self.tiers, self._run_id, order["markers"], order["avoid"],
            suspects=order.get("suspects", ()), in_use=self.in_use,
        )  # fmt: skip
        self._verified |= {item["path"]: False for item in answer.get("rejected", ())}
        if answer.get("chosen") is not None:
            self._verified[answer["chosen"]["path"]] = True
        return answer

    async def prune(self, holdings: Holdings) -> None:
        """Delete what the rules of each tier no longer keep."""
        if self._pruning:
            return  # the next commit asks again; a tier that hangs must not take a thread at each
        self._pruning = True
        try:
            for tier in self.tiers:
                await self._prune_tier(tier, holdings)
        finally:
            self._pruning = False

    async def _prune_tier(self, tier: Tier, holdings: Holdings) -> None:
        try:
            gone, tight = await asyncio.to_thread(
                retire.prune_and_see, tier, holdings, in_use=self.in_use, verified=dict(self._verified)
            )
        except OSError as error:
            self._emit("noted", level="warning", what=f"tier {tier.name!r}: nothing was deleted: {error}")
            return
        for item in gone:
            self._deleted(item.path, item.tier, item.step, item.why)
        if tight is not None and tier.name not in self._tight:
            self._emit("noted", level="warning", what=tight)
        (self._tight.discard if tight is None else self._tight.add)(tier.name)

    def _deleted(self, path: str, tier: str, step: int, why: str) -> None:
        log.info("deleted %s: %s", path, why)
        self._verified.pop(path, None)
        self._emit("checkpoint_deleted", step=step, tier=tier, path=path, why=why)

    def unpin(self, names: Iterable[str]) -> None:
        """These pins are over, says the ledger."""
        with self.in_use.lock:
            self.in_use.pinned -= set(names)

    # --- what the command line asks, by way of the daemon ---

    async def consulted(self, order: Message) -> None:
        """Answer one question; what came of it is told as an event before."""
        questions = {"pin": self._pin, "verify": self._verify, "gc": self._gc}
        reply: Message
        try:
            reply = {"ok": True, **await questions[order["what"]](order)}
        except CkptdError as error:
            reply = {"ok": False, "why": str(error)}
        except OSError as error:
            reply = {"ok": False, "why": f"the tiers cannot be used: {error}"}
        self._say({"type": "answer", "token": order["token"], **reply})

    async def _pin(self, order: Message) -> Message:
        found = await asyncio.to_thread(self._pin_now, order)
        self._emit(
            "checkpoint_pinned", step=found.step, path=found.path, label=order["label"], pinned=True,
            source=order["source"],
        )  # fmt: skip
        return {"step": found.step, "path": found.path}

    def _pin_now(self, order: Message) -> Found:
        found = lookup.find(self.tiers, self._run_id, step=order["step"], path=order["path"], known=order["markers"])
        with self.in_use.lock:
            if not os.path.exists(os.path.join(found.path, contract.COMMITTED)):
                raise UsageError(f"{found.path} has just been deleted by the rules of its tier")
            self.in_use.pinned.add(name_of(found.path))
        return found

    async def _verify(self, order: Message) -> Message:
        found = await asyncio.to_thread(
            lookup.verified, self.tiers, self._run_id, step=order["step"], path=order["path"], known=order["markers"],
            in_use=self.in_use,
        )  # fmt: skip
        assert found.marker is not None
        return {
            "step": found.step, "path": found.path, "tier": found.tier, "sequence": found.sequence,
            "samples": found.marker.samples_seen,
        }  # fmt: skip

    async def _gc(self, order: Message) -> Message:
        found = await asyncio.to_thread(
            retire.collect, self.tiers, Holdings.from_dict(order["holdings"]), dry_run=order["dry_run"],
            in_use=self.in_use, verified=dict(self._verified),
        )  # fmt: skip
        for item in found["items"]:
            if item["gone"]:
                self._deleted(item["path"], item["tier"], item["step"], item["why"])
        return found
