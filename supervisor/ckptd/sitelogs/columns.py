"""Which column of a CSV holds what? The ones that the command line names, or else ones with a well-known name."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import UTC, timedelta, timezone
from typing import TYPE_CHECKING, Final

from ckptd.errors import UsageError

if TYPE_CHECKING:
    from datetime import tzinfo

KNOWN: Final[dict[str, tuple[str, ...]]] = {
    "time": (
        "time", "timestamp", "datetime", "date_time", "event", "event_time", "failure_time", "failed_at", "occurred",
        "occurred_at", "prob_started", "started", "started_at", "start_time", "start", "interrupted_at", "at", "when",
    ),
    "date": ("date", "day"),
    "end": (
        "relaunch", "relaunched", "relaunched_at", "end", "ended", "ended_at", "end_time", "prob_fixed", "fixed",
        "recovered", "recovered_at", "resumed", "resumed_at", "repaired",
    ),
    "down": ("down_time", "downtime_min", "down_minutes", "downtime_minutes"),
    "kind": ("kind", "event_type", "type"),
    "cause": ("cause", "root_cause", "reason", "category"),
    "severity": ("severity",),
    "node": ("node", "nodes_named", "host", "hostname", "nodenumz", "nodenum"),
    "devices": ("devices", "gpus", "n_gpus", "num_gpus", "gpu_count", "ngpus"),
    "count": ("count", "failures", "n_failures", "interruptions"),
    "days": ("days",),
    "first": ("first", "first_at", "from"),
    "last": ("last", "last_at", "to"),
}  # fmt: skip
"""Roles, and names by which their columns are found, the likeliest first."""

_ZONE: Final = re.compile(r"_(?:utc|gmt)(?:_?(plus|minus|p|m)?_?(\d{1,2}))?$")
_CATEGORIES: Final = ("facilities", "hardware", "human_error", "network", "undetermined", "software")
"""Of the failure data that Los Alamos published: one of these columns is filled, and its name is the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Positions of the columns in a row, by role. A role without a column is missing."""

    at: dict[str, int]
    causes: tuple[tuple[int, str], ...]
    """(position, name) of columns whose filling is the cause; with one column, its content is."""
    zones: dict[str, tzinfo]
    """Zones that the names of columns give away, by role: `relaunch_utc`."""

    def cell(self, role: str, cells: list[str]) -> str:
        """What a row holds in the column of `role`; empty: nothing, or no such column."""
        return cells[self.at[role]].strip() if role in self.at else ""

    def cause(self, cells: list[str]) -> str:
        """The cause of a row, in lower case."""
        if len(self.causes) == 1:
            return cells[self.causes[0][0]].strip().lower()
        return next((name for position, name in self.causes if cells[position].strip()), "")


def find(header: list[str], asked: dict[str, tuple[str, ...]], source: str) -> Columns:
    """The columns of `header`. `asked`: names from the command line, by role.

    Raises:
        UsageError: a column that was named is not there.
    """
    names = [_plain(name) for name in header]
    at: dict[str, int] = {}
    for role, wanted in asked.items():
        if role != "cause":
            at[role] = _named(header, wanted[0], role, source)
    for role, known in KNOWN.items():
        free = {name: i for i, name in reversed(list(enumerate(names))) if i not in at.values()}
        found = next((free[name] for name in known if name in free), None)
        if role not in at and role != "cause" and found is not None:
            at[role] = found
    if "date" in at and "time" not in at:
        part = next((i for i, name in enumerate(names) if name.startswith("time_") and i not in at.values()), None)
        if part is not None:
            at["time"] = part
    causes = [(_named(header, name, "cause", source), _plain(name)) for name in asked.get("cause", ())]
    if not causes and set(_CATEGORIES) <= set(names):
        causes = [(names.index(name), name.replace("_", " ")) for name in _CATEGORIES]
    if not causes:
        causes = [(names.index(name), name) for name in KNOWN["cause"] if name in names][:1]
    zones = {role: zone for role, i in at.items() if (zone := _zone(header[i])) is not None}
    return Columns(at=at, causes=tuple(causes), zones=zones)


def _named(header: list[str], wanted: str, role: str, source: str) -> int:
    for i, name in enumerate(header):
        if name.strip().lower() == wanted.strip().lower():
            return i
    near = difflib.get_close_matches(wanted, header, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(name.strip() for name in header)}"
    raise UsageError(f"{source} has no column {wanted!r} to take the {role} from{guess}")


def _plain(name: str) -> str:
    """A name in lower case with underscores, without what it says of zones."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")
    return _ZONE.sub("", plain).removesuffix("_local")


def _zone(name: str) -> tzinfo | None:
    match = _ZONE.search(re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_"))
    if match is None:
        return None
    hours = int(match[2] or 0) * (-1 if (match[1] or "").startswith("m") else 1)
    return timezone(timedelta(hours=hours)) if hours and abs(hours) <= 14 else UTC
