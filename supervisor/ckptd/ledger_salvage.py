"""What can still be read of a damaged ledger, and where does it go meanwhile?"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import urllib.parse
from typing import Final

from ckptd.core import events as ev

_SIDES: Final = ("-wal", "-shm", "-journal")
_COLUMNS: Final = "id, t, at, attempt, kind, node, rank, data"
_FORWARD: Final = f"SELECT {_COLUMNS} FROM events WHERE id > ? ORDER BY id"  # noqa: S608 - our own words
_BACKWARD: Final = f"SELECT {_COLUMNS} FROM events WHERE id > ? ORDER BY id DESC"  # noqa: S608


def set_aside(path: str) -> str:
    """Rename the ledger at `path`, and SQLite's files beside it, to the first `<path>.damaged-N` that is free.

    Raises:
        OSError: that cannot be done.
    """
    number = 1
    while os.path.lexists(aside := f"{path}.damaged-{number}"):
        number += 1
    os.rename(path, aside)
    for side in _SIDES:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path + side, aside + side)
    return aside


def salvage(path: str) -> list[ev.Event]:
    """Every event that can be read in the file at `path`, oldest first; there may be gaps. Never raises for damage."""
    found: dict[int, ev.Event] = {}
    uri = f"file:{urllib.parse.quote(os.path.abspath(path))}?mode=ro"
    for query in (_FORWARD, _BACKWARD):
        # From the start up to the damage, then from the end down to it.
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(uri, uri=True)) as conn:
            for row in conn.execute(query, (max(found, default=0),)):
                event = _event(row)
                if event is not None:
                    found[row[0]] = event
    return [event for _, event in sorted(found.items())]


def _event(row: tuple[int, float, float, int | None, str, str | None, int | None, str]) -> ev.Event | None:
    _, t, at, attempt, kind, node, rank, data = row
    try:
        return ev.from_parts(kind, json.loads(data), t=float(t), at=float(at), attempt=attempt, node=node, rank=rank)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None  # of a newer ckptd, or damaged itself
