"""What is known of failures at this site, from logs that were imported? Named logs in one SQLite file, and their rates.

For other parts of ckptd, and for scripts:

- `read_summary(path, name)`: events, exposure, rate (`core.sitelog.Summary`).
- `read_gaps(path, name)`: the failures of a log as device-seconds from one to the next, to replay on any number of devices.
- `read_prior(path, name, max_failures)`: a Gamma prior of bounded weight.

`path` None is `default_path()`. All three raise HistoryError with the names that there are when `name` is not one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
import os
import sqlite3
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import sqlite_utils

from ckptd.core import sitelog
from ckptd.core.sitelog import Log, Prior, Row, Summary
from ckptd.errors import HistoryError
from ckptd.rundir import runs_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

APPLICATION_ID: Final = 0x636B7068
"""`ckph`: tells a history from any other SQLite file."""
VERSION: Final = 1
_BUSY_S: Final = 10.0

_TABLES: Final = (
    """
    CREATE TABLE logs (
        name TEXT PRIMARY KEY, form TEXT NOT NULL, devices REAL, from_at REAL, to_at REAL, span_s REAL,
        merge_s REAL NOT NULL
    )
    """,
    """
    CREATE TABLE rows (
        log TEXT NOT NULL REFERENCES logs(name), digest TEXT NOT NULL, kind TEXT NOT NULL, at REAL,
        count INTEGER NOT NULL, span_s REAL, devices REAL, job TEXT NOT NULL, cause TEXT NOT NULL,
        severity TEXT NOT NULL, node TEXT NOT NULL, down_s REAL, source TEXT NOT NULL, line INTEGER NOT NULL,
        PRIMARY KEY (log, digest)
    ) WITHOUT ROWID
    """,
)


_SAID: Final = operator.attrgetter(*(f.name for f in dataclasses.fields(Row) if f.name not in ("source", "line")))


def default_path() -> Path:
    """`$XDG_STATE_HOME/ckptd/history.db`, or below `~/.local/state`."""
    return runs_root().parent / "history.db"


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What an import changed."""

    new: int
    replaced: int
    """Rows that were known and say something else now: a job that was running, a zone that was given anew."""
    known: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """The failures of a log in the time of its devices: a gap of g device-seconds takes n devices g/n seconds."""

    name: str
    devices: float
    """Size of the log's own job."""
    gaps_device_s: tuple[float, ...]
    """From the beginning of the exposure to the first failure, and from each failure to the next."""
    tail_device_s: float
    """From the last failure to the end of the exposure, without a failure."""


class History:
    """The file of imported logs. Open it with `open`."""

    def __init__(self, db: sqlite_utils.Database, path: str) -> None:
        self.path = path
        self._db = db

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None = None, *, readonly: bool = False) -> Self:
        """Open the history at `path` (None: `default_path()`); made if it is not there, unless `readonly`.

        Raises:
            HistoryError: it is missing, damaged, something else, or from a newer ckptd. The file is left as it is.
        """
        path = os.path.abspath(default_path() if path is None else path)
        with _explained(path):
            if readonly and not os.path.exists(path):
                raise HistoryError(f"there is no history at {path}: nothing was imported yet; `ckptd import` does that")
            if not readonly:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            uri = f"file:{urllib.parse.quote(path)}?mode={'ro' if readonly else 'rwc'}"
            conn = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
            try:
                db = sqlite_utils.Database(conn, execute_plugins=False)
                _prepare(db, path, readonly=readonly)
            except BaseException:
                conn.close()
                raise
        return cls(db, path)

    def close(self) -> None:
        """Close the file."""
        self._db.conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self) -> list[str]:
        """The logs that there are, sorted."""
        with _explained(self.path):
            return [row["name"] for row in self._db.query("SELECT name FROM logs ORDER BY name")]

    def log(self, name: str) -> Log:
        """What holds for all rows of a log. Raises HistoryError, with the names that there are."""
        with _explained(self.path):
            found = list(self._db.query("SELECT * FROM logs WHERE name = ?", (name,)))
        if found:
            return Log(**found[0])
        names = self.names()
        if not names:
            raise HistoryError(
                f"there is no log {name!r}: nothing was imported into {self.path}; `ckptd import` does that"
            )
        near = difflib.get_close_matches(name, names, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise HistoryError(f"there is no log {name!r} in {self.path}; it holds {', '.join(names)}{guess}")

    def rows(self, name: str) -> list[Row]:
        """All rows of a log."""
        with _explained(self.path):
            found = self._db.query("SELECT * FROM rows WHERE log = ? ORDER BY at, digest", (name,))
            return [Row(**{key: value for key, value in row.items() if key != "log"}) for row in found]

    def add(self, log: Log, rows: Sequence[Row], *, replace: bool = False) -> Added:
        """Add rows to a log, all or none. What `log` leaves open stays as it was; `replace`: forget what was there.

        Raises:
            HistoryError: the log is of another form, or the file cannot be written.
        """
        with _explained(self.path), self._transaction():
            if replace:
                self._db.execute("DELETE FROM rows WHERE log = ?", (log.name,))
                self._db.execute("DELETE FROM logs WHERE name = ?", (log.name,))
            old = next((Log(**row) for row in self._db.query("SELECT * FROM logs WHERE name = ?", (log.name,))), None)
            if old is not None and old.form != log.form:
                raise HistoryError(
                    f"the log {log.name!r} holds {old.form}, and these are {log.form}: give them another --name, or replace "
                    "what is there by --replace"
                )
            kept = dataclasses.asdict(old) if old is not None else {}
            told = {key: value for key, value in dataclasses.asdict(log).items() if value is not None}
            self._db["logs"].upsert({**kept, **told}, pk="name")  # type: ignore[union-attr]
            known = {row.digest: row for row in self.rows(log.name)}
            new = [row for row in rows if row.digest not in known]
            changed = [row for row in rows if row.digest in known and not _same(row, known[row.digest])]
            records = [{"log": log.name, **dataclasses.asdict(row)} for row in (*new, *changed)]
            self._db["rows"].upsert_all(records, pk=("log", "digest"))  # type: ignore[union-attr]
            return Added(new=len(new), replaced=len(changed), known=len(rows) - len(new) - len(changed))

    def summary(self, name: str) -> Summary:
        """What a log says. Raises HistoryError, with the names that there are."""
        return sitelog.summarize(self.log(name), self.rows(name))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def read_summary(path: str | os.PathLike[str] | None, name: str) -> Summary:
    """What the log `name` says: events, exposure, rate."""
    with History.open(path, readonly=True) as history:
        return history.summary(name)


def read_gaps(path: str | os.PathLike[str] | None, name: str) -> Gaps:
    """The failures of the log `name`, to replay them.

    Raises:
        HistoryError: there is no such log, or it has no failures with times and devices.
    """
    summary = read_summary(path, name)
    if not summary.gaps_device_s or not summary.devices:
        raise HistoryError(f"the log {name!r} has no failures with times, so there is nothing to replay")
    return Gaps(
        name=name,
        devices=summary.devices,
        gaps_device_s=summary.gaps_device_s,
        tail_device_s=summary.tail_device_s,
    )


def read_prior(path: str | os.PathLike[str] | None, name: str, max_failures: float) -> tuple[Prior, Summary]:
    """A prior from the log `name`, with the weight of at most `max_failures` failures, and the log that it is from.

    Raises:
        HistoryError: there is no such log, or it has no exposure.
    """
    summary = read_summary(path, name)
    prior = sitelog.bounded_prior(summary, max_failures)
    if prior is None:
        raise HistoryError(f"the log {name!r} has no exposure, so it gives no rate; see what `ckptd import` says of it")
    return prior, summary


def _same(one: Row, other: Row) -> bool:
    """Do two rows say the same, wherever they were read?"""
    return _SAID(one) == _SAID(other)


def _prepare(db: sqlite_utils.Database, path: str, *, readonly: bool) -> None:
    application = next(iter(db.query("PRAGMA application_id")))["application_id"]
    version = next(iter(db.query("PRAGMA user_version")))["user_version"]
    if application == APPLICATION_ID and version > VERSION:
        raise HistoryError(f"{path} was written by a newer ckptd; take that one, or another file with --history")
    if application == APPLICATION_ID:
        return
    if application or version or db.table_names():
        raise HistoryError(f"{path} is not a history of ckptd but another SQLite file; name another with --history")
    if readonly:
        raise HistoryError(f"{path} is empty: nothing was imported yet; `ckptd import` does that")
    db.execute("BEGIN IMMEDIATE")
    if not db.table_names():  # nobody was faster
        for statement in _TABLES:
            db.execute(statement)
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={VERSION}")
    db.execute("COMMIT")


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise HistoryError(f"the history {path} cannot be used: {what}; name another with --history") from error
