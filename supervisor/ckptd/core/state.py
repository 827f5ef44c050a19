"""What is there to know of a run? Its state, which `run` folds from the events and `decisions` reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptd.core import events, holdings, keeping
from ckptd.core.devices import DeviceBook
from ckptd.core.keeping import Keeping
from ckptd.core.policy import Policy


class Status(enum.StrEnum):
    """States of a run, under the names that status, metrics and pages show."""

    STARTING = "starting"
    WAITING = "waiting"
    LAUNCHING = "launching"
    INITIALISING = "initialising"
    RESTORING = "restoring"
    FIRST_STEP = "first_step"
    TRAINING = "training"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


LIVE = frozenset(
    {Status.LAUNCHING, Status.INITIALISING, Status.RESTORING, Status.FIRST_STEP, Status.TRAINING, Status.DRAINING}
)
"""States in which workers are meant to be running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What is known of one node."""

    connected: bool = False
    lost: bool = False
    """Its agent is known to be dead, or out of reach; what it launched may live."""
    gone_t: float | None = None
    """Since when it is out of reach (`NodeLost`), until it dials in again."""
    unclean: int | None = None
    """The attempt that it carried when it was lost: nothing else is launched there before that has ended."""
    address: str = ""
    """Where other nodes reach it; empty: it is the daemon's own machine."""
    devices: tuple[int, ...] = ()
    unhealthy: frozenset[int] = frozenset()
    health_known: bool = False
    """Asked since the last failure."""
    inventory_known: bool = False
    holdings: tuple[dict[str, Any], ...] | None = None
    """What it has in directories of its own, see `holdings`; None: it is not known what it has now."""
    seen: Mapping[str, Sequence[str]] | None = None
    """Whose files it has seen on tiers that may be shared, see `SharingReported`."""
    seen_of: frozenset[str] = frozenset()
    """Nodes that were to leave one."""
    port: int = 0
    """Where its agent gives files to others."""
    gathered: bool = False
    """It has the files that its workers of the live attempt need."""
    started: bool = False
    """Its workers of the live attempt exist."""
    finished: bool = False
    """Its workers of the live attempt all ended with status 0."""
    ended: bool = False
    """Nothing of the live attempt is left on it."""
    running: int | None = None
    """The attempt that its agent carries. None although `started`: it has ended, which the agent is about to tell."""
    agent: int = 0
    """Process id of its agent."""
    replaced: bool = False
    """Another agent than the one that was told to launch dialled in: what that one launched, if anything, is unknown."""

    @property
    def healthy(self) -> tuple[int, ...]:
        """Devices that answer for themselves; whether something is held against them is the device book's to say."""
        return tuple(index for index in self.devices if index not in self.unhealthy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What two failures have in common when they are the same one."""

    step: int
    cause: str
    text: str
    path: str | None
    """The checkpoint that the attempt came from: not part of what must be the same."""

    def same_as(self, other: Signature) -> bool:
        return (self.step, self.cause, self.text) == (other.step, other.cause, other.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A node of the attempt was lost, or its agent was, while workers of it were meant to be there."""

    node: str
    kind: Literal["agent", "node"]
    t: float
    detected_t: float
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything a decision depends on. Built by `apply` alone."""

    policy: Policy = field(default_factory=Policy)
    status: Status = Status.STARTING
    t: float = 0.0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    # the attempt
    attempt: int = 0
    placement: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    world_size: int = 0
    first_world: int | None = None
    resume: dict[str, Any] | None = None
    step: int = 0
    grounds: str = "start"
    allocation: str = ""
    """The allocation that the newest daemon is in; empty: in none."""
    store: tuple[str, int] | None = None
    """Host and port of the store that workers on several nodes meet at, once its node has opened it."""
    # how it went wrong
    failure: events.FailureDetected | None = None
    exits: tuple[dict[str, Any], ...] = ()
    losses: tuple[Loss, ...] = ()
    """Nodes and agents that the attempt lost, in the order in which that was known."""
    interrupted: events.Interrupted | None = None
    signatures: tuple[Signature, ...] = ()
    """The last failures since the last new commit."""
    suspects: tuple[str, ...] = ()
    """Checkpoints after which the same failure came twice: an older one is tried."""
    book: DeviceBook = field(default_factory=DeviceBook)
    devices_changed_t: float = 0.0
    """When a device's health, or what is held against it, last changed."""
    attempts_without_progress: int = 0
    launch_failures: int = 0
    failures: int = 0
    restarts: int = 0
    not_before: float = 0.0
    waiting_since: float | None = None
    # checkpoints
    committed: events.SaveCommitted | None = None
    commit_sequence: int = 0
    ever_committed: bool = False
    rejection: events.SaveRejected | None = None
    """The newest of the live attempt's states that the guard refused, unless it has committed one since."""
    rejections: int = 0
    """How many it refused in a row."""
    keeping: Keeping = field(default_factory=Keeping)
    """Pins, and commits that the run went back from."""
    rollback: events.RolledBack | None = None
    """The newest, until something is committed after it."""
    inventory: events.InventoryReported | None = None
    sharing: Mapping[str, bool] = field(default_factory=dict)
    """Where job.yaml does not say whether all nodes see the same files on a tier: what was found."""
    inventory_problems: int = 0
    """How often in a row the answer was that a tier cannot be read."""
    # requests
    save_request: int = 0
    request: events.Requested | None = None
    """A stop or a relaunch that is not served yet."""
    closed: bool = False
    stopped: bool = False
    """The workers saved and stopped on request, not because they had reached their end."""
    initialised: bool = False
    """The script of the live attempt made a shim."""
    total_steps: int | None = None
    """Where the script says that its end is."""
    highest: int = 0
    """The last step that any attempt completed."""
    stopped_at: int | None = None
    """The step of the newest stop on request: training was to go on there."""
    outcome: events.RunEnded | None = None

    @property
    def own_tiers(self) -> tuple[str, ...]:
        """Tiers of which each node has its own directory, fastest first."""
        return tuple(
            str(tier["name"])
            for tier in self.policy.tiers
            if (self.sharing.get(str(tier["name"])) if tier.get("shared", True) is None else tier.get("shared"))
            is False
        )

    @property
    def unknown_tiers(self) -> tuple[str, ...]:
        """Tiers of which it is to be found out whether all nodes see the same files there."""
        names = (str(tier["name"]) for tier in self.policy.tiers if tier.get("shared", True) is None)
        return tuple(name for name in names if name not in self.sharing)

    @property
    def held(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """What each living node has there."""
        return {name: held for name in self.placeable() if (held := self.nodes[name].holdings) is not None}

    def best_held(self) -> holdings.Choice | None:
        """The newest commit that the living nodes have all files of in directories of their own."""
        return holdings.choose(
            self.held, self.own_tiers, run_id=self.policy.run_id, avoid={keeping.name_of(path) for path in self.suspects},
            suspects=self.keeping.suspects(),
        )  # fmt: skip

    def usable(self, name: str, t: float) -> tuple[int, ...]:
        """Devices of a node that may be launched on at `t`: healthy, not drained, not in quarantine."""
        return self.book.usable(name, self.nodes[name].healthy, t)

    @property
    def devices_healthy(self) -> int:
        return sum(len(self.usable(name, self.t)) for name in self.placeable())

    def placeable(self) -> list[str]:
        """Nodes that can be launched on: connected, and with nothing left of an attempt that they were lost with."""
        return [name for name, node in self.nodes.items() if node.connected and node.unclean is None]

    @property
    def devices_known(self) -> int:
        return sum(len(node.devices) for node in self.nodes.values())
