"""Which checkpoints of a run leave a tier, how do they go, and what else is lying about there?

Deleting renames first, so a half-deleted checkpoint looks gone. What another run made, and what nobody can say who
made, is not touched.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ckptd import space
from ckptd.core import keeping, retention
from ckptd.core.keeping import Range, name_of
from ckptd.node import tiers
from ckptd.node.inuse import InUse
from ckptd.node.tiers import Found, Tier
from ckptd.tiers import Store
from ckptd.tiers.base import COPY_PREFIX, DOOMED_PREFIX
from ckptd_shim import contract

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What retention has to know beside a tier's own rules. Travels as JSON."""

    run_id: str
    live_attempt: int | None = None
    """The attempt that may be writing; None: none lives."""
    protected: dict[str, str] = field(default_factory=dict)
    """Names of checkpoints that stay, and why."""
    pinned: tuple[str, ...] = ()
    """Names."""
    suspects: tuple[Range, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        suspects = tuple((int(first), last) for first, last in data["suspects"])
        return cls(**{**data, "pinned": tuple(data["pinned"]), "suspects": suspects})


@dataclass(frozen=True, kw_only=True)
class Item:
    """One directory of a tier and its fate."""

    path: str
    tier: str
    step: int
    what: str
    """`committed`, `partial`, `damaged`, `half deleted`, `half copied`."""
    goes: bool
    why: str
    bytes: int | None = None
    files: int | None = None
    sequence: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def survey(
    tier: Tier, holdings: Holdings, *, in_use: InUse | None = None, verified: Mapping[str, bool] | None = None
) -> list[Item]:
    """Every checkpoint directory of a tier and what retention makes of it, in the order to delete.

    Args:
        tier: where.
        holdings: what is known of the run.
        in_use: what this process is using.
        verified: by path, whether every digest matched when somebody looked.

    Raises:
        OSError: the tier cannot be read.
    """
    using = in_use or InUse()
    store = tier.store()
    found = {f.path: f for f in tiers.scan(tier, store=store)}
    others = {path: why for path, f in found.items() if (why := _hands_off(f, holdings.run_id, store)) is not None}
    held = [
        retention.Held(
            path=f.path, tier=f.tier, step=f.step, sequence=f.sequence, attempt=f.attempt,
            committed=f.marker is not None, verified=(verified or {}).get(f.path), created_t=f.created,
            pinned=name_of(f.path) in holdings.pinned or name_of(f.path) in using.pinned, in_use=using.held(f.path),
            suspect=keeping.is_suspect(holdings.suspects, f.sequence),
        )
        for f in found.values()
        if f.path not in others
    ]  # fmt: skip
    rules = retention.Rules(
        keep_last=tier.keep_last, keep_every_steps=tier.keep_every_steps, keep_every_seconds=tier.keep_every_seconds
    )
    protected = {
        f.path: holdings.protected[name] for f in found.values() if (name := name_of(f.path)) in holdings.protected
    }
    fates = retention.judge(held, rules, protected=protected, live_attempt=holdings.live_attempt)
    items = [_item(found[fate.path], goes=fate.doomed, why=fate.why) for fate in fates]
    items += [_item(found[path], goes=False, why=why) for path, why in others.items()]
    return items if tier.shared else [_with_own_size(item, store) for item in items]


def _hands_off(found: Found, run_id: str, store: Store) -> str | None:
    """Why a directory is none of this run's business; None: this run made it."""
    if found.problem:
        return f"not understood, so not touched: {found.problem}"
    if found.marker is not None:
        return None if found.marker.run_id == run_id else f"of another run ({found.marker.run_id})"
    owner = store.owner(found.name)
    if owner is None:
        return "nothing says which run began it; remove it by hand if none is writing it"
    return None if owner == run_id else f"begun by another run ({owner})"


def _with_own_size(item: Item, store: Store) -> Item:
    """What this node holds of a commit, where each holds a part."""
    if item.bytes is None:
        return item
    try:
        sizes = store.sizes(name_of(item.path))
    except OSError:
        return item
    return dataclasses.replace(item, bytes=sum(sizes.values()), files=len(sizes))


def _item(found: Found, *, goes: bool, why: str) -> Item:
    marker = found.marker
    what = "damaged" if found.problem else "partial" if marker is None else "committed"
    size = sum(f.size for f in marker.files) if marker is not None else None
    files = len(marker.files) if marker is not None else None
    return Item(
        path=found.path, tier=found.tier, step=found.step, what=what, goes=goes, why=why, bytes=size, files=files,
        sequence=found.sequence,
    )  # fmt: skip


def leftovers(tier: Tier, *, in_use: InUse | None = None, sources: Iterable[str] = ()) -> list[Item]:
    """Half-done deletions, and half-done copies of checkpoints that are on no tier any more.

    `sources`: names of the commits that are on some tier, whose copies will be gone on with. An object store has no such
    leftovers: what is half there is a checkpoint that is not committed.
    """
    if tier.remote:
        return []
    try:
        names = sorted(os.listdir(tier.directory))
    except OSError:
        return []
    items = []
    for name in names:
        path = os.path.join(tier.directory, name)
        prefix = next((p for p in (DOOMED_PREFIX, COPY_PREFIX) if name.startswith(p)), None)
        parsed = None if prefix is None else contract.parse_checkpoint_dirname(name.removeprefix(prefix))
        if prefix is None or parsed is None:
            continue
        original = name.removeprefix(prefix)
        what = "half deleted" if prefix == DOOMED_PREFIX else "half copied"
        if prefix == DOOMED_PREFIX:
            goes, why = True, "its deletion was begun"
        elif in_use is not None and in_use.held(original):
            goes, why = False, "it is being copied"
        elif original in set(sources):
            goes, why = False, "what it is a copy of is still there: the copy will be gone on with"
        else:
            goes, why = True, "what it is a copy of is gone"
        items.append(Item(path=path, tier=tier.name, step=parsed[0], what=what, goes=goes, why=why))
    return items


def delete(tier: Tier, items: Iterable[Item], *, in_use: InUse | None = None) -> list[Item]:
    """Delete those of `items` that go; returns the ones that went. One that is pinned or used by now stays."""
    using = in_use or InUse()
    store = tier.store()
    gone = []
    for item in items:
        if not item.goes:
            continue
        name = name_of(item.path)
        if name.startswith((DOOMED_PREFIX, COPY_PREFIX)):
            shutil.rmtree(item.path, ignore_errors=True)
            gone.append(item)
            continue
        try:
            with using.lock:
                if using.kept(item.path):
                    continue
                if not tier.remote:  # a store that does not answer must not hold the lock
                    store.bury(name)
            store.delete(name)
        except OSError as error:
            log.warning("cannot delete %s: %s", item.path, error)
            continue
        gone.append(item)
    return gone


def prune(
    tier: Tier, holdings: Holdings, *, in_use: InUse | None = None, verified: Mapping[str, bool] | None = None
) -> list[Item]:
    """Delete what the tier's rules no longer keep; returns what went."""
    return prune_and_see(tier, holdings, in_use=in_use, verified=verified)[0]


def prune_and_see(
    tier: Tier, holdings: Holdings, *, in_use: InUse | None = None, verified: Mapping[str, bool] | None = None
) -> tuple[list[Item], str | None]:
    """`prune`, and why the tier will be full before the rules next let something go; None: it will not."""
    found = survey(tier, holdings, in_use=in_use, verified=verified)
    gone = delete(tier, found, in_use=in_use)
    left = [item for item in found if item.what == "committed" and item not in gone]
    newest = max(left, key=lambda item: item.sequence, default=None)
    if newest is None or tier.remote:
        return gone, None
    each = space.Footprint(bytes=newest.bytes or 0, files=(newest.files or 0) + 2)
    return gone, space.foresee(tier.name, tier.directory, keep_last=tier.keep_last, held=len(left), each=each)


def collect(
    tiers_: Iterable[Tier], holdings: Holdings, *, dry_run: bool, in_use: InUse | None = None,
    verified: Mapping[str, bool] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`ckptd gc`: survey every tier, and unless `dry_run` delete what goes.

    Returns {"items": [fields of `Item`, and `gone`], "problems": [text]}.
    """
    items: list[dict[str, Any]] = []
    problems = []
    every = list(tiers_)
    surveys: list[tuple[Tier, list[Item]]] = []
    for tier in every:
        try:
            surveys.append((tier, survey(tier, holdings, in_use=in_use, verified=verified)))
        except OSError as error:
            problems.append(f"tier {tier.name!r} cannot be read: {error}")
    sources = {name_of(i.path) for _, found in surveys for i in found if i.what == "committed"}
    if problems:  # what cannot be seen may be what a copy is made of
        sources |= {n for tier, _ in surveys for i in leftovers(tier) if (n := _copied(i.path))}
    for tier, found in surveys:
        here = found + leftovers(tier, in_use=in_use, sources=sources)
        gone = [] if dry_run else delete(tier, here, in_use=in_use)
        paths = {item.path for item in gone}
        items += [{**item.to_dict(), "gone": item.path in paths} for item in here]
    return {"items": items, "problems": problems}


def _copied(path: str) -> str:
    name = os.path.basename(path)
    return name.removeprefix(COPY_PREFIX) if name.startswith(COPY_PREFIX) else ""
