"""What does an agent do for other nodes' agents, and have done by them, where each node has tiers of its own?"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from ckptd.core.holdings import from_ranges
from ckptd.link import Message
from ckptd.node import gather, sharing, together
from ckptd.node.gather import Source, Wanted
from ckptd.node.keeper import Keeper, from_threads
from ckptd.node.mirror import Mirror
from ckptd.node.peers import Answer, Beating, Connection, Peer, PeerServer, send_file
from ckptd.node.shelf import Commit, Shelf, commit_of, places_of
from ckptd.node.tiers import Found, Tier
from ckptd.tiers import Copied, Crew, NoSuchFile, Pace, StoreError
from ckptd_shim import contract

READ_PATIENCE_S: Final = 120.0
"""How long no byte may come out of a tier, or from another node."""


class Neighbours:
    """Lives on the agent's event loop; what reads, sends and fetches is done in threads.

    Args:
        node: name of this one.
        run_id: whose checkpoints these are.
        secret: of the run.
        keeper: of this agent.
        emit: tells the daemon of an event, `AgentLink.event`.
    """

    def __init__(self, *, node: str, run_id: str, secret: bytes, keeper: Keeper, emit: Callable[..., None]) -> None:
        self._node = node
        self._run_id = run_id
        self._secret = secret
        self._keeper = keeper
        self._emit = emit
        self._tiers: dict[str, Tier] = {}
        self._rate: float | None = None
        self._crew = Crew()
        self._shelf = Shelf()
        self._server: PeerServer | None = None
        self._mirror: Mirror | None = None
        self._peers: dict[str, Source] = {}
        """The other nodes of the attempt."""

    def configure(self, tiers: list[Tier], bytes_per_s: float | None) -> None:
        """Use these tiers from now on."""
        self._tiers = {tier.name: tier for tier in tiers}
        self._rate = bytes_per_s

    def close(self) -> None:
        """The agent leaves."""
        if self._mirror is not None:
            self._mirror.close()
        if self._server is not None:
            self._server.close()

    @property
    def answers(self) -> dict[str, Answer]:
        """What other agents may ask for."""
        return {"get": self._get, "contribute": self._contribute}

    # --- what the daemon asks for ---

    async def tell_sharing(self, order: Message) -> None:
        """Leave a file on each of some tiers, and tell which of the other nodes' files are seen there."""
        nodes = [str(node) for node in order["nodes"]]
        asked = [self._tiers[name] for name in order["tiers"] if name in self._tiers]
        found = await asyncio.gather(
            *(asyncio.to_thread(sharing.look, tier.directory, self._run_id, self._node, nodes) for tier in asked)
        )
        seen = {tier.name: names for tier, names in zip(asked, found, strict=True)}
        self._emit("sharing_reported", nodes=nodes, seen=seen)
        # The others may still be looking for this node's.
        await asyncio.sleep(sharing.PATIENCE_S)
        for tier in asked:
            await asyncio.to_thread(sharing.clear, tier.directory, self._run_id, self._node)

    async def tell_holdings(self, order: Message, address: str) -> None:
        """Tell what this node has on its own tiers, and where others get it: at `address`."""
        if self._server is not None and self._server.host != address:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = PeerServer(host=address, secret=self._secret, answers=self.answers)
        begun = time.monotonic()
        holdings: list[dict[str, Any]] = []
        rejected: list[dict[str, Any]] = []
        for tier in self._tiers.values():
            if tier.shared:
                continue
            try:
                told = await asyncio.to_thread(
                    self._crew.run, f"look through {tier.name}", functools.partial(self._look, tier, order["markers"]),
                    stall_s=READ_PATIENCE_S,
                )  # fmt: skip
            except OSError as error:  # this node has nothing to give; the others and slower tiers may
                path = tier.directory
                rejected.append({"step": 0, "tier": tier.name, "path": path, "problem": f"it cannot be read: {error}"})
                continue
            holdings += told.holdings
            rejected += told.rejected
        self._emit(
            "holdings_reported", holdings=holdings, rejected=rejected, port=self._server.port,
            seconds=time.monotonic() - begun,
        )  # fmt: skip

    def _look(self, tier: Tier, known: dict[str, str], pace: Pace) -> Any:
        return self._shelf.tell(tier, self._run_id, known, pace)

    async def gather(self, order: Message) -> None:
        """Have what the node's workers will resume from here. Raises StoreError."""
        wanted = Wanted(
            tier=self._own(order["tier"]), name=str(order["name"]), marker_crc32c=str(order["marker_crc32c"]),
            ranks=[int(rank) for rank in order["ranks"]], world_size=int(order["world_size"]),
            everything=bool(order["everything"]), sources=[Source.from_dict(source) for source in order["sources"]],
        )  # fmt: skip
        done = await asyncio.to_thread(
            self._crew.run, f"gather {wanted.name}",
            lambda pace: gather.gather(wanted, shelf=self._shelf, dial=self._dial, in_use=self._keeper.in_use, pace=pace),
            stall_s=READ_PATIENCE_S,
        )  # fmt: skip
        self._emit(
            "files_gathered",
            attempt=int(order["attempt"]),
            fetched=done.fetched,
            bytes=done.bytes,
            seconds=done.seconds,
        )

    def follow(self, order: Message) -> None:
        """Hold a second copy of what another node's ranks save."""
        tier = self._own(order["tier"])
        if self._mirror is not None and self._mirror.tier != tier:
            self._mirror.close()
            self._mirror = None
        if self._mirror is None:
            self._mirror = Mirror(
                tier=tier, run_id=self._run_id, crew=self._crew, shelf=self._shelf, in_use=self._keeper.in_use,
                dial=self._dial, tell=from_threads(self._emit), bytes_per_s=self._rate,
            )  # fmt: skip
            self._mirror.start()
        self._mirror.follow(None if order["from"] is None else Source.from_dict(order["from"]))
        self._peers = {source.node: source for source in map(Source.from_dict, order["peers"])}

    def copy_together(self, found: Found, source: Tier, target: Tier, pace: Pace) -> Copied:
        """Have every node of the attempt bring its part of a commit to a slower tier. From a thread. Raises StoreError."""
        return together.copy(
            commit_of(source, found.name, found.marker_crc32c or None), target, me=self._node, peers=self._peers,
            dial=self._dial, own=lambda commit, places: self._bring(commit, target, places, pace), pace=pace,
        )  # fmt: skip

    def _bring(self, commit: Commit, target: Tier, places: Collection[int], pace: Pace) -> int:
        """This node's part of that. `places`: which files; onto a tier of its own, all that it holds."""
        with self._keeper.in_use.hold(commit.path):
            if target.shared:
                return together.bring(commit, target, places, pace=pace)
            wanted = places_of(commit.marker, self._node)
            if self._mirror is not None:
                wanted |= places_of(commit.marker, self._mirror.following)
            return together.bring_all(commit, target, shelf=self._shelf, hoped_for=wanted, pace=pace)

    def _dial(self, source: Source) -> Peer:
        return Peer.dial(node=source.node, host=source.host, port=source.port, secret=self._secret, me=self._node)

    def _own(self, name: Any) -> Tier:
        tier = self._tiers.get(str(name))
        if tier is None or tier.shared:
            raise StoreError(f"node {self._node} has no tier {name!r} of its own")
        return tier

    # --- what other agents ask for ---

    def _contribute(self, connection: Connection, request: Message) -> None:
        """Bring files of a commit, as they are here, to a slower tier."""
        source, target = self._own(request["tier"]), self._tiers.get(str(request["to"]))
        name = str(request["name"])
        if target is None or target == source or contract.parse_checkpoint_dirname(name) is None:
            raise StoreError(f"nothing goes from {source.name} to {request['to']!r} under the name {name!r}")
        commit = commit_of(source, name, str(request["marker_crc32c"]))
        places = {place for place in from_ranges(request["places"]) if place < len(commit.marker.files)}
        moved = self._bring(commit, target, places, Beating(connection))
        connection.send({"type": "contributed", "moved": moved})

    def _get(self, connection: Connection, request: Message) -> None:
        """One file of a commit, as it is here."""
        tier, name, file = self._own(request["tier"]), str(request["name"]), str(request["file"])
        if contract.parse_checkpoint_dirname(name) is None or file != os.path.basename(file) or file in ("", ".", ".."):
            raise StoreError(f"{name}/{file} is no file of a checkpoint")
        store = tier.store()
        with self._keeper.in_use.hold(store.path(name)):
            size = store.sizes(name).get(file)
            if size is None or size < 0:
                raise NoSuchFile(f"node {self._node} has no file {store.path(name)}/{file}")
            with store.reading(name, file) as reader:
                send_file(connection, reader, size)
