"""Committed checkpoints on this node's tiers: which there are, and which to resume from."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.core import keeping
from ckptd.core.keeping import Range
from ckptd.node.inuse import InUse
from ckptd_shim import contract
from ckptd_shim.digest import crc32c_bytes, verify_checkpoint
from ckptd_shim.errors import CheckpointError

DOOMED_PREFIX = ".doomed-"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of job.yaml as a node uses it."""

    name: str
    directory: str
    """`<tier path>/<run name>`."""
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_every_seconds: float | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tier:
        """As the daemon sends it."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A directory that looks like a checkpoint. `marker` None: not committed, or its marker cannot be read."""

    path: str
    tier: str
    step: int
    attempt: int
    created: float
    marker: contract.Marker | None
    marker_crc32c: str = ""
    problem: str = ""

    @property
    def sequence(self) -> int:
        return self.marker.sequence if self.marker is not None else 0


def marker_key(tier: str, path: str) -> str:
    """What the digest of a checkpoint's marker is known by."""
    return f"{tier}/{os.path.basename(path)}"


def scan(tier: Tier, known: Mapping[str, str] | None = None) -> list[Found]:
    """Every checkpoint directory of a tier, committed or not.

    `known`: CRC-32C of markers by `marker_key`, as the ledger has them from the commits. The marker vouches for every
    other file; only the ledger vouches for the marker.

    Raises:
        OSError: the tier cannot be read at all.
    """
    try:
        names = os.listdir(tier.directory)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        parsed = contract.parse_checkpoint_dirname(name)
        path = os.path.join(tier.directory, name)
        if parsed is None:
            continue
        step, attempt = parsed
        marker, digest, problem, created = None, "", "", 0.0
        try:
            created = os.stat(path).st_mtime
            with open(os.path.join(path, contract.COMMITTED), "rb") as file:
                data = file.read()
            digest = crc32c_bytes(data)
            committed = (known or {}).get(marker_key(tier.name, path), digest)
            marker = contract.Marker.from_json(data, where=os.path.join(path, contract.COMMITTED))
            if digest != committed:
                problem, marker = (
                    f"its marker has CRC-32C {digest}, {committed} was committed: its bytes have changed",
                    None,
                )
            elif (marker.step, marker.attempt) != (step, attempt):
                problem, marker = f"its marker is of step {marker.step}, attempt {marker.attempt}", None
            elif marker.format != contract.FORMAT:
                problem, marker = f"its format is {marker.format}; this ckptd reads {contract.FORMAT}", None
        except FileNotFoundError:
            pass  # not committed
        except (OSError, contract.ContractError) as error:
            problem = str(error)
        found.append(
            Found(path=path, tier=tier.name, step=step, attempt=attempt, created=created, marker=marker,
                  marker_crc32c=digest, problem=problem)
        )  # fmt: skip
    return found


def inventory(
    tiers: list[Tier], run_id: str, known: Mapping[str, str] | None = None, avoid: Collection[str] = (), *,
    suspects: Sequence[Range] = (), in_use: InUse | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The answer to "which checkpoint?": the fields of `InventoryReported`.

    Goes through the commits of this run from the newest, by commit sequence, and takes the first whose files all
    have the sizes and digests of the marker; those in `avoid` (paths) only where there is no other. Where this run has no commits but an earlier run of the same name has
    (its run directory was lost), those are taken, and `chosen.run_id` tells. Commits whose sequence is in `suspects`
    are not resumed from at all. What is being read is held in `in_use`.
    """
    begun = time.monotonic()
    found: list[Found] = []
    for tier in tiers:
        try:
            found += scan(tier, known)
        except OSError as error:
            return {"problem": f"tier {tier.name!r} cannot be read: {error}"}
    committed = [f for f in found if f.marker is not None]
    rejected = [
        {"step": f.step, "tier": f.tier, "path": f.path, "problem": f.problem} for f in found if f.problem
    ]  # fmt: skip
    sound = [f for f in committed if not keeping.is_suspect(suspects, f.sequence)]
    own = [f for f in sound if f.marker is not None and f.marker.run_id == run_id]
    if not own and sound:
        newest = max(sound, key=lambda f: f.marker.created if f.marker is not None else 0.0)
        assert newest.marker is not None
        own = [f for f in sound if f.marker is not None and f.marker.run_id == newest.marker.run_id]
    chosen: dict[str, Any] | None = None
    for candidate in sorted(own, key=lambda f: (f.path not in avoid, f.sequence), reverse=True):
        try:
            with contextlib.nullcontext() if in_use is None else in_use.hold(candidate.path):
                marker = verify_checkpoint(candidate.path, candidate.marker_crc32c)
        except (CheckpointError, OSError) as error:
            rejected.append(
                {"step": candidate.step, "tier": candidate.tier, "path": candidate.path, "problem": str(error)}
            )
            continue
        chosen = {
            "step": marker.step,
            "tier": candidate.tier,
            "path": candidate.path,
            "marker_crc32c": candidate.marker_crc32c,
            "sequence": marker.sequence,
            "attempt": marker.attempt,
            "samples_seen": marker.samples_seen,
            "world_size": marker.world_size,
            "comparable": marker.comparable,
            "run_id": marker.run_id,
        }
        break
    return {
        "chosen": chosen,
        "rejected": rejected,
        "commits": len(own) + (len(committed) - len(sound)) + sum(1 for f in found if f.problem),
        "newest_sequence": max((f.sequence for f in committed), default=0),
        "seconds": time.monotonic() - begun,
    }


def clear_graves(tier: Tier) -> None:
    """Finish deletions that were cut short."""
    try:
        names = os.listdir(tier.directory)
    except OSError:
        return
    for name in names:
        if name.startswith(DOOMED_PREFIX):
            shutil.rmtree(os.path.join(tier.directory, name), ignore_errors=True)
