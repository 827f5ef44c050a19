"""Which commit can be resumed from where each node holds some of its files, and who has what of it?

A holding is what a node says of one commit in its own directory of a tier: `{tier, name, path, step, attempt, sequence,
run_id, created, samples_seen, world_size, comparable, marker_crc32c, files, held}`. `files` is how many files the commit
has, `held` which of them the node has: places in the marker's list, as ranges of the first and the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.core.keeping import Range, is_suspect

Holding = Mapping[str, Any]
Ranges = Sequence[Sequence[int]]

_TOLD = (
    "step", "tier", "path", "marker_crc32c", "sequence", "attempt", "samples_seen", "world_size", "comparable", "run_id",
    "files",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A commit of which every file is held by some node that was asked."""

    commit: dict[str, Any]
    """As `InventoryReported.chosen` has it, and `files`."""
    name: str
    holders: dict[str, list[list[int]]]
    """Node -> ranges of the files that it has; the nodes in the order in which they were asked."""

    @property
    def sequence(self) -> int:
        return int(self.commit["sequence"])


def as_ranges(places: Iterable[int]) -> list[list[int]]:
    """Sorted places as [first, last] of each run: [0, 1, 2, 5] is [[0, 2], [5, 5]]."""
    found: list[list[int]] = []
    for place in sorted(set(places)):
        if found and found[-1][1] == place - 1:
            found[-1][1] = place
        else:
            found.append([place, place])
    return found


def from_ranges(ranges: Ranges) -> set[int]:
    """The places that `as_ranges` was given."""
    return {place for first, last in ranges for place in range(first, last + 1)}


def choose(
    reports: Mapping[str, Sequence[Holding]], tiers: Sequence[str], *, run_id: str, avoid: Collection[str] = (),
    suspects: Collection[Range] = (),
) -> Choice | None:  # fmt: skip
    """The newest commit that is all there, on the fastest tier that has it; None: there is none.

    Args:
        reports: what each living node holds.
        tiers: names, fastest first.
        run_id: whose commits count; where there are none, those of the run that committed last do.
        avoid: names of checkpoints to take only where there is no other.
        suspects: commit sequences that are not resumed from at all.
    """
    whole = _whole(reports, tiers, run_id=run_id, suspects=suspects)
    order = {tier: i for i, tier in enumerate(tiers)}
    return min(
        whole, key=lambda c: (c.name in avoid, -c.sequence, order.get(c.commit["tier"], len(order))), default=None
    )


def seen(reports: Mapping[str, Sequence[Holding]], *, run_id: str) -> tuple[int, int]:
    """(how many commits of the run the nodes have something of, the highest commit sequence of all)."""
    every = [holding for held in reports.values() for holding in held]
    own = {holding["name"] for holding in every if holding["run_id"] == run_id}
    return len(own), max((int(holding["sequence"]) for holding in every), default=0)


def holders(reports: Mapping[str, Sequence[Holding]], tier: str, marker_crc32c: str) -> dict[str, list[list[int]]]:
    """Who has which files of one commit on a tier."""
    return {
        node: [list(each) for each in holding["held"]]
        for node, held in reports.items()
        for holding in held
        if holding["tier"] == tier and holding["marker_crc32c"] == marker_crc32c
    }


def _whole(
    reports: Mapping[str, Sequence[Holding]], tiers: Sequence[str], *, run_id: str, suspects: Collection[Range]
) -> list[Choice]:
    every = [
        holding
        for held in reports.values()
        for holding in held
        if holding["tier"] in tiers and not is_suspect(suspects, int(holding["sequence"]))
    ]
    own = [holding for holding in every if holding["run_id"] == run_id]
    if not own and every:
        last = max(every, key=lambda holding: float(holding["created"]))["run_id"]
        own = [holding for holding in every if holding["run_id"] == last]
    commits: dict[tuple[str, str, str], Holding] = {}
    for holding in own:
        commits.setdefault((holding["tier"], holding["name"], holding["marker_crc32c"]), holding)
    found = []
    for (tier, name, crc), holding in commits.items():
        having = holders(reports, tier, crc)
        if set().union(*map(from_ranges, having.values())) >= set(range(int(holding["files"]))):
            commit = {key: holding[key] for key in _TOLD}
            found.append(Choice(commit=commit, name=name, holders=having))
    return found
