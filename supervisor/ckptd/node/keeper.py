"""What does an agent do with the checkpoints on its tiers? Find, promote, prune and pin them, and answer questions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ckptd.core.keeping import name_of
from ckptd.errors import CkptdError, UsageError
from ckptd.link import Message
from ckptd.node import inventory, lookup, retire
from ckptd.node.inuse import InUse
from ckptd.node.promote import Promoter, Tell, Together, copied_event
from ckptd.node.retire import Holdings
from ckptd.node.tiers import Found, Tier, clear_graves, marker_key
from ckptd.tiers import Copied, Crew, NoSuchFile

log = logging.getLogger(__name__)

TIDY_PATIENCE_S = 10.0
"""How long the last deletions of a run may take."""


def from_threads(emit: Callable[..., None]) -> Tell:
    """`emit`, which belongs to the event loop that runs now, for threads to call."""
    loop = asyncio.get_running_loop()

    def tell(kind: str, **event: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the agent has left
            loop.call_soon_threadsafe(functools.partial(emit, kind, **event))

    return tell


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
        self.together: Together | None = None
        """Copies commits of which each node holds a part."""
        self._run_id = run_id
        self._emit = emit
        self._say = say
        self._crew = Crew()
        self._promoter: Promoter | None = None
        self._pruning: set[str] = set()
        self._holdings: Holdings | None = None
        """As the daemon said last."""
        self._tight: set[str] = set()
        """Tiers that will be full, which was said."""
        self._verified: dict[str, bool] = {}
        """By path: whether every digest matched when this agent last looked."""

    # --- slower tiers ---

    def configure(self, tiers: list[Tier]) -> None:
        """Use these tiers from now on."""
        self.tiers = tiers
        if self._promoter is not None and self._promoter.tiers != tiers:
            self.promote({}, here=False)

    def promote(self, every: dict[str, int], *, here: bool) -> None:
        """Have commits brought to the tiers after the first, each as often as the daemon says, if that is done `here`.

        From then on it goes on without a daemon.
        """
        if not here or len(self.tiers) < 2:
            if self._promoter is not None:
                self._promoter.close()
                self._promoter = None
            return
        if self._promoter is None:
            self._promoter = Promoter(
                tiers=self.tiers, run_id=self._run_id, crew=self._crew, in_use=self.in_use, tell=from_threads(self._emit),
                together=self.together,
            )  # fmt: skip
        self._promoter.set_every(every)

    def saw(self, kind: str, event: Message) -> None:
        """What an attempt says: a commit is news for the slower tiers, whether a daemon is there or not."""
        if kind == "save_committed" and self._promoter is not None:
            self._promoter.known[marker_key(event["tier"], event["path"])] = event["marker_crc32c"]
            self._promoter.committed(int(event["sequence"]))

    async def finish(self, drain_s: float) -> None:
        """The run is over: bring its last commit everywhere, within `drain_s`, say where it is missing, and tidy up."""
        promoter = self._promoter
        if promoter is None:
            return
        if promoter.behind and drain_s > 0:
            what = f"the last commit is being copied to the slower tiers; this may take {drain_s:.0f} s at most"
            self._emit("noted", level="info", what=what)
        for missing in await asyncio.to_thread(promoter.drain, drain_s):
            self._emit("noted", level="error", what=missing)
        promoter.close()
        if self._holdings is not None:  # the daemon's order to prune after the last copy may come too late
            jobs = [asyncio.ensure_future(self._prune_tier(tier, self._holdings)) for tier in self.tiers]
            await asyncio.wait(jobs, timeout=TIDY_PATIENCE_S)

    # --- finding and deleting ---

    async def inventory(self, order: Message) -> Message:
        """Which checkpoint to resume from: the fields of `InventoryReported`."""
        tell = from_threads(self._emit)
        suspects = order.get("suspects", ())
        if self._promoter is not None:
            self._promoter.known.update(order["markers"])
            self._promoter.suspects = suspects

        def fetched(found: Found, to: Tier, copied: Copied) -> None:
            tell("checkpoint_copied", **copied_event(found, to, copied))

        question = inventory.Question(
            tiers=self.tiers, run_id=self._run_id, known=order["markers"], avoid=order["avoid"], suspects=suspects,
            expected=order.get("expected", {}), settle=bool(order.get("settle")), crew=self._crew,
            in_use=self.in_use, fetched=fetched, floor=int(order.get("floor", 0)),
        )  # fmt: skip
        answer = await asyncio.to_thread(inventory.inventory, question)
        self._verified |= {item["path"]: False for item in answer.get("rejected", ())}
        if answer.get("chosen") is not None:
            self._verified[answer["chosen"]["path"]] = True
        return answer

    async def prune(self, holdings: Holdings, *, shared: bool = True) -> None:
        """Delete what the rules of each tier no longer keep; `shared`: also of tiers that all nodes see."""
        self._holdings = holdings
        if self._promoter is not None:
            self._promoter.suspects = holdings.suspects
        tiers = [tier for tier in self.tiers if shared or not tier.shared]
        await asyncio.gather(*(self._prune_tier(tier, holdings) for tier in tiers))

    async def settle(self, patience_s: float) -> None:
        """Let deletions that are under way come to their end; a tier that hangs is not waited for longer than that."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._pruning and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    async def clear_graves(self) -> None:
        """Finish deletions that were cut short."""
        await asyncio.gather(*(asyncio.to_thread(clear_graves, tier) for tier in self.tiers))

    async def _prune_tier(self, tier: Tier, holdings: Holdings) -> None:
        if tier.name in self._pruning:
            return  # the next commit asks again; a tier that hangs must not take a thread at each
        self._pruning.add(tier.name)
        try:
            gone, tight = await asyncio.to_thread(
                retire.prune_and_see, tier, holdings, in_use=self.in_use, verified=dict(self._verified)
            )
        except OSError as error:
            self._emit("noted", level="warning", what=f"tier {tier.name!r}: nothing was deleted: {error}")
            return
        finally:
            self._pruning.discard(tier.name)
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
            self.in_use.pinned.add(name_of(found.path))
        try:  # from now on nothing deletes it; it may have gone before
            next(tier for tier in self.tiers if tier.name == found.tier).store().marker(found.name)
        except NoSuchFile:
            self.unpin([name_of(found.path)])
            raise UsageError(f"{found.path} has just been deleted by the rules of its tier") from None
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
