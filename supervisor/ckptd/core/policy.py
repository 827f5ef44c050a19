"""What the user asked for, as the core needs it: every number that a decision depends on, and nothing else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Formula = Literal["young", "daly", "exact"]
OnReject = Literal["skip", "rollback", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The decisions' inputs out of job.yaml. Kept in the ledger with each start of the daemon. Durations in seconds."""

    run_id: str = ""
    name: str = ""
    # devices
    min_devices: int = 1
    max_devices: int | None = None
    multiple_of: int = 1
    global_batch: int | None = None
    micro_batch: int | None = None
    wait_for_devices_s: float = 3600.0
    # nodes, where there are others than the daemon's own machine
    nodes: tuple[str, ...] = ()
    """All that are to take part, in the order in which they take ranks. Empty: the one node is this machine."""
    spares: int = 0
    """So many of them are kept idle."""
    orphan_timeout_s: float = 3600.0
    # the interval: at most one of the next two is set; neither is `auto`
    interval_s: float | None = None
    interval_steps: int | None = None
    min_interval_s: float | None = None
    max_interval_s: float | None = 7200.0
    formula: Formula = "daly"
    tiers: list[dict[str, Any]] = field(default_factory=list)
    """Fastest first: {name, promote, shared}. `promote`: a number, `auto` or None; `shared`: whether all nodes see the same
    files there, None where that is to be found out."""
    # restarts
    max_without_progress: int = 3
    max_restarts: int | None = None
    grow_at_checkpoint: bool = True
    warm: bool = True
    # the guard
    on_reject: OnReject = "skip"
    rollback_after: int = 3
    # drills; None: only by hand
    drill_every_s: float | None = None
    drill_tier: str | None = None
    skip_data: bool = False
    # the prior of the failure rate
    prior_failures: float = 1.0
    prior_device_seconds: float = 50_000 * 3600.0

    def to_dict(self) -> dict[str, Any]:
        """The policy as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote; keys of a newer ckptd are ignored, missing ones take their defaults."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        return cls(**{**values, "nodes": tuple(values.get("nodes", ()))})
