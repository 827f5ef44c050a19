"""Will a tier hold what its rules keep? Said before it is full, with what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.node import tiers
from ckptd.units import format_size
from ckptd_shim import room
from ckptd_shim.contract import Marker

if TYPE_CHECKING:
    from ckptd.jobspec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A commit on a tier."""

    bytes: int
    files: int

    @classmethod
    def of(cls, marker: Marker) -> Footprint:
        """What a committed checkpoint takes: its files, and the marker itself."""
        return cls(bytes=sum(f.size for f in marker.files), files=len(marker.files) + 2)


def foresee(name: str, directory: str, *, keep_last: int, held: int, each: Footprint) -> str | None:
    """Why the tier `name` will run full, and what to change; None: as far as is known it will not.

    The rules keep `keep_last` commits, and one more is being written before the oldest goes. Pinned ones and those of
    `keep_every` come on top, so this is the least that is needed.

    Args:
        name: of the tier.
        directory: of the run on it.
        keep_last: its rule.
        held: how many commits of the run are there already.
        each: what one takes, by the newest.
    """
    more = keep_last + 1 - held
    if more <= 0:
        return None
    try:
        left = room.room_at(directory)
    except OSError:
        return None
    one = room.needed(each.bytes, each.files)
    fits = left.bytes // one
    what = f"{format_size(left.bytes)} free, and a checkpoint takes {format_size(one)}"
    if left.files is not None and left.files // (each.files + 1) < fits:
        fits = left.files // (each.files + 1)
        what = f"{left.files} inodes free, and a checkpoint takes {each.files + 1}"
    if fits >= more:
        return None
    total = held + fits
    advice = f"set keep_last to {total - 1}" if total >= 2 else "give it another directory"
    return (
        f"tier {name!r} will be full: keep_last {keep_last} needs room for {keep_last + 1} checkpoints, one of them being "
        f"written, {held} are there, and {directory} has {what}. Free {format_size((more - fits) * one)}, or {advice}"
    )


def notes(spec: JobSpec) -> list[str]:
    """What `foresee` says of each tier of a job, by the checkpoints that its run has made so far."""
    found = []
    for tier in spec.checkpoint.tiers:
        if tier.path is None:
            continue
        directory = str(spec.tier_dir(tier))
        try:
            there = tiers.scan(tiers.Tier(name=tier.name, directory=directory))
        except OSError:
            continue
        commits = sorted((f for f in there if f.marker is not None), key=lambda f: f.sequence)
        said = None
        if commits and commits[-1].marker is not None:
            each = Footprint.of(commits[-1].marker)
            said = foresee(tier.name, directory, keep_last=tier.keep_last, held=len(commits), each=each)
        if said is not None:
            found.append(said)
    return found
