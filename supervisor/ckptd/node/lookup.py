"""Which committed checkpoint does a person mean by a step, or by a path?"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from ckptd.core.keeping import name_of
from ckptd.errors import UsageError
from ckptd.node import tiers
from ckptd.node.inuse import InUse
from ckptd.node.tiers import Found, Tier
from ckptd.tiers import verify

_SHOWN = 12


def find(
    tiers_: Iterable[Tier], run_id: str, *, step: int, path: str | None = None, known: Mapping[str, str] | None = None
) -> Found:
    """The newest commit of `step`, by commit sequence, on the fastest tier that holds it; or the one at `path`.

    Args:
        tiers_: fastest first.
        run_id: commits of other runs do not count.
        step: of the checkpoint.
        path: its directory, or the name of it, where one step was committed more than once.
        known: CRC-32C of markers, see `tiers.scan`.

    Raises:
        UsageError: there is no such commit; the message says what there is.
    """
    found: list[Found] = []
    unreadable = []
    for tier in tiers_:
        try:
            found += tiers.scan(tier, known)
        except OSError as error:
            unreadable.append(f"tier {tier.name!r} cannot be read: {error}")
    own = [f for f in found if f.marker is not None and f.marker.run_id == run_id]
    if path is not None:
        return _at(path, step, found, own, unreadable)
    # The order of tiers is kept by `max`, which takes the first of equals.
    chosen = max((f for f in own if f.step == step), key=lambda f: f.sequence, default=None)
    if chosen is not None:
        return chosen
    raise UsageError(f"{_why_not(step, [f for f in found if f.step == step], run_id)}; {_known(own, unreadable)}")


def verified(
    tiers_: Collection[Tier], run_id: str, *, step: int, path: str | None = None,
    known: Mapping[str, str] | None = None, in_use: InUse | None = None,
) -> Found:  # fmt: skip
    """Like `find`, and every byte of it is read and compared with what was committed.

    Raises:
        UsageError: there is no such commit, or it is damaged.
    """
    found = find(tiers_, run_id, step=step, path=path, known=known)
    using = in_use or InUse()
    try:
        with using.hold(found.path):
            tier = next(tier for tier in tiers_ if tier.name == found.tier)
            # Where nodes have directories of their own, what this one has of it; the others see to theirs at the launch.
            verify(tier.store(), found.name, found.marker_crc32c, partial=not tier.shared)
    except OSError as error:
        raise UsageError(f"the checkpoint of step {step} is damaged: {error}") from None
    return found


def _at(path: str, step: int, found: list[Found], own: list[Found], unreadable: list[str]) -> Found:
    wanted = os.path.realpath(path) if os.sep in path.rstrip(os.sep) else None
    name = name_of(path)
    same = [f for f in found if name_of(f.path) == name and wanted in (None, os.path.realpath(f.path))]
    chosen = next((f for f in same if f in own), None)
    if chosen is None:
        why = _why_not(step, same, "") if same else f"there is no checkpoint {path} on the tiers of this run"
        raise UsageError(f"{why}; {_known(own, unreadable)}")
    if chosen.step != step:
        raise UsageError(f"{chosen.path} is of step {chosen.step}, not {step}")
    return chosen


def _why_not(step: int, there: list[Found], run_id: str) -> str:
    damaged = next((f for f in there if f.problem), None)
    if damaged is not None:
        return f"the checkpoint of step {step} at {damaged.path} cannot be trusted: {damaged.problem}"
    if any(f.marker is not None and f.marker.run_id != run_id for f in there):
        return f"the checkpoint of step {step} is of another run, whose checkpoints are not touched"
    if there:
        return f"the checkpoint of step {step} at {there[0].path} is not committed"
    return f"there is no checkpoint of step {step}"


def _known(own: list[Found], unreadable: list[str]) -> str:
    steps = list(dict.fromkeys(f.step for f in sorted(own, key=lambda f: f.sequence, reverse=True)))
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    listed = (
        f"committed are, newest first: {', '.join(map(str, steps[:_SHOWN]))}{more}" if steps else "none is committed"
    )
    return "; ".join([listed, *unreadable])
