"""What has happened to this run, so far and for good? One append-only table of events in SQLite, and views over it.

An event is durable when `append` returns: it survives kill -9 of everything, and a power cut as far as the disk tells
the truth about fsync. Times: `t` is the run's own clock, `at` the wall clock at that moment. The views are for people
and their tools; the daemon folds `events()` itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any, Final, Self

import sqlite_utils

from ckptd.core import events as ev
from ckptd.errors import LedgerDamaged, LedgerError, LedgerFull
from ckptd.ledger_salvage import salvage, set_aside
from ckptd.ledger_schema import APPLICATION_ID, BOOLEANS, MIGRATIONS, VERSION, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_BUSY_S: Final = 10.0
_PAGE: Final = 1000
_NO_ROOM: Final = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("FULL", "IOERR_WRITE", "IOERR_FSYNC", "IOERR_DIR_FSYNC", "IOERR_TRUNCATE", "IOERR_SHMSIZE")
)
"""A full disk reports FULL; a quota, a full tmpfs or a file size limit come out as failed writes."""

_NETWORK: Final = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "pvfs",
    "orangefs",
)
"""File systems on which several hosts see a file and mmap is not coherent between them: WAL corrupts there."""


class Ledger:
    """The events of one run. Open it with `open`; usable from several threads, one at a time."""

    def __init__(self, db: sqlite_utils.Database, path: str, *, warning: str | None = None) -> None:
        self.path = path
        self.warning = warning
        """Something about where the ledger lies that the user should be told; None: all is well."""
        self.skipped = 0
        """Events met by `events` so far that only a newer ckptd knows."""
        self._db = db
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, readonly: bool = False) -> Self:
        """Open the ledger at `path`; made if it is not there, unless `readonly`.

        Raises:
            LedgerError: it is missing, damaged, something else, or from a newer ckptd. The file is left as it is.
            LedgerFull: there is no room to make it.
        """
        path = os.path.abspath(path)
        uri = f"file:{urllib.parse.quote(path)}?mode={'ro' if readonly else 'rwc'}"
        with _explained(path):
            if readonly and not os.path.exists(path):
                raise LedgerError(f"there is no ledger at {path}: the run has not been started, or lives elsewhere")
            # Autocommit: transactions are begun and ended here, explicitly.
            conn = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                warning = None if readonly else _prepare(conn, path)
                db = sqlite_utils.Database(conn, execute_plugins=False)
                _check_version(db, path)
                if not readonly:
                    _migrate(db)
                elif _pragma(conn, "user_version") == 0:
                    raise LedgerError(f"{path} is not a ledger yet: no daemon has written to it")
            except BaseException:
                conn.close()
                raise
        return cls(db, path, warning=warning)

    @classmethod
    def renewed(cls, path: str | os.PathLike[str]) -> tuple[Self, str, list[ev.Event]]:
        """A new ledger in the place of a damaged one, with all events of that one that can be read.

        Returns (the new one, where the old one is now, the events).

        Raises:
            LedgerError: the old one cannot be moved away, or the new one not be made.
        """
        path = os.path.abspath(path)
        try:
            aside = set_aside(path)
        except OSError as error:
            raise LedgerError(f"the damaged ledger {path} cannot be set aside: {error}") from None
        history = salvage(aside)
        fresh = cls.open(path)
        fresh.append_many(history)
        return fresh, aside, history

    def renew(self) -> str:
        """Go on in a new file, as `renewed` does, while in use. Returns where the old one is now."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._db.conn.close()
            fresh, aside, _ = self.renewed(self.path)
            self._db = fresh._db
        return aside

    def append(self, event: ev.Event) -> int:
        """Add an event; durable on return. Returns its id.

        A number that JSON has no name for (NaN, infinity) is kept as null.

        Raises:
            LedgerFull: no room; nothing was added, and a later append may succeed.
            LedgerError: anything else that SQLite objects to.
        """
        with self._transaction():
            return self._insert(event)

    def append_many(self, events: Sequence[ev.Event]) -> list[int]:
        """Add several events, all or none; durable on return. Returns their ids. Raises like `append`."""
        with self._transaction():
            return [self._insert(event) for event in events]

    def append_from_agent(self, event: ev.Event, node: str, agent_id: str, seq: int) -> bool:
        """Add an event that an agent numbered `seq`, once: False if it is here already. Raises like `append`."""
        return self.append_told([(event, (node, agent_id, seq))])[0]

    def append_told(self, told: Sequence[tuple[ev.Event, tuple[str, str, int] | None]]) -> list[bool]:
        """Add several events, all or none; durable on return. Raises like `append`.

        Each comes with (node, agent's id, number) of the agent that told it, or None. An event that an agent told is
        added once: the answer for it is False if it is here already.
        """
        with self._transaction():
            return [self._insert_told(event, origin) for event, origin in told]

    def acknowledged(self, node: str, agent_id: str) -> int:
        """The highest number among the events of this agent that are here; 0 for none."""
        with self._lock, _explained(self.path):
            row = self._db.execute(
                "SELECT max(seq) FROM agent_seq WHERE node = ? AND agent_id = ?", (node, agent_id)
            ).fetchone()
        return int(row[0] or 0)

    def events(self, after_id: int = 0) -> Iterator[tuple[int, ev.Event]]:
        """Every event with an id above `after_id`, in order. Appending meanwhile is allowed.

        Raises:
            LedgerError: the file cannot be read, or an event in it makes no sense.
        """
        last = after_id
        while True:
            with self._lock, _explained(self.path):
                rows = self._db.execute(
                    "SELECT id, t, at, attempt, kind, node, rank, data FROM events WHERE id > ? ORDER BY id LIMIT ?",
                    (last, _PAGE),
                ).fetchall()
            for last, t, at, attempt, kind, node, rank, data in rows:
                if kind not in ev.kinds():
                    self.skipped += 1
                    continue
                try:
                    event = ev.from_parts(kind, json.loads(data), t=t, at=at, attempt=attempt, node=node, rank=rank)
                except (ValueError, TypeError, AttributeError) as error:
                    raise LedgerError(f"event {last} in {self.path} cannot be read: {error}") from None
                yield last, event
            if len(rows) < _PAGE:
                return

    def last_t(self) -> float:
        """Where the run's clock stood at the latest of all events, in seconds; 0.0 for an empty ledger."""
        with self._lock, _explained(self.path):
            return float(self._db.execute("SELECT max(t) FROM events").fetchone()[0] or 0.0)

    def rows(self, view: str) -> list[dict[str, Any]]:
        """Every row of a view (`attempts`, `interruptions`, `restarts`, `saves`, `decisions`), in order of events."""
        if view not in VIEWS:
            raise ValueError(f"no view {view!r}; there are {', '.join(VIEWS)}")
        with self._lock, _explained(self.path):
            cursor = self._db.execute(f"SELECT * FROM {view}")  # noqa: S608 - one of our own names, checked above
            names = [column[0] for column in cursor.description]
            rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        for row in rows:
            row.update({name: bool(row[name]) for name in BOOLEANS if row.get(name) is not None})
        return rows

    def close(self) -> None:
        """Close the file; a ledger that is closed already stays so."""
        with self._lock:
            self._db.conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _insert_told(self, event: ev.Event, origin: tuple[str, str, int] | None) -> bool:
        if origin is not None:
            cursor = self._db.execute("INSERT OR IGNORE INTO agent_seq VALUES (?, ?, ?)", origin)
            if cursor.rowcount == 0:
                return False
        self._insert(event)
        return True

    def _insert(self, event: ev.Event) -> int:
        if not (math.isfinite(event.t) and math.isfinite(event.at)):
            raise ValueError(f"an event needs a time: t={event.t}, at={event.at}")
        row = self._db.execute(
            "INSERT INTO events (t, at, attempt, kind, node, rank, data) VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (event.t, event.at, event.attempt, event.kind, event.node, event.rank, _to_json(ev.data_of(event))),
        ).fetchone()
        return int(row[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _explained(self.path), _transaction(self._db.conn):
            yield


@contextlib.contextmanager
def _transaction(conn: sqlite3.Connection) -> Iterator[None]:
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:  # SQLite rolls some errors back by itself
            conn.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn what SQLite says into what happened to which file, and what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _NO_ROOM:
            raise LedgerFull(f"no room for the ledger {path} ({error}): free space or raise the quota there") from error
        primary = None if code is None else code & 0xFF
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise LedgerDamaged(_damaged(path, str(error)), str(error)) from error
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerError(f"the ledger {path} has been locked by another program for {_BUSY_S:g} s") from error
        raise LedgerError(f"the ledger {path} cannot be used: {error}") from error


def _damaged(path: str, what: str) -> str:
    return (
        f"the ledger {path} is damaged or is no ledger ({what}). Nothing was changed, and the checkpoints are not affected. "
        "`ckptd run` sets it aside and goes on with what can be read of it"
    )


def _pragma(conn: sqlite3.Connection, name: str) -> Any:
    row = conn.execute(f"PRAGMA {name}").fetchone()
    return row[0] if row else None


def _prepare(conn: sqlite3.Connection, path: str) -> str | None:
    """Check the file, and set it up for durable appends. Returns a warning, or None."""
    verdict = _pragma(conn, "quick_check(1)")
    if verdict != "ok":
        raise LedgerDamaged(_damaged(path, str(verdict)), str(verdict))
    application, version = _pragma(conn, "application_id"), _pragma(conn, "user_version")
    tables = conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if application != APPLICATION_ID and (tables or version):
        raise LedgerError(f"{path} is an SQLite database of something else; name another run_dir")
    warning = _set_journal(conn, path, network=_network_filesystem(path))
    os.chmod(path, 0o600)
    return warning


def _set_journal(conn: sqlite3.Connection, path: str, *, network: str | None) -> str | None:
    """WAL where it is safe, a rollback journal elsewhere: slower, and readers wait for writers. Returns a warning."""
    mode = None
    if network is None:
        with contextlib.suppress(sqlite3.OperationalError):  # "locking protocol": WAL needs shared memory
            mode = _pragma(conn, "journal_mode=WAL")
        if mode == "wal":
            conn.execute("PRAGMA synchronous=FULL")
            return None
    _pragma(conn, "journal_mode=DELETE")
    conn.execute("PRAGMA synchronous=EXTRA")  # a removed journal that comes back after a power cut undoes its commit
    why = f"is on a network file system ({network})" if network else "is on a file system that refuses WAL"
    return f"the ledger {path} {why}: it is written more slowly, and a local disk as run_dir is safer"


def _network_filesystem(path: str) -> str | None:
    """Type of the network file system that holds `path`, None if it is a local one as far as can be told."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            kind = _filesystem_type(os.path.realpath(path), file.read())
    except OSError:
        return None
    return kind if kind.removeprefix("fuse.").startswith(_NETWORK) else None


def _filesystem_type(path: str, mountinfo: str) -> str:
    """Type of the file system that the absolute `path` lies on, out of the text of /proc/self/mountinfo."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts in one place, the later one is what is seen
            best, kind = point, after.split(" ")[0]
    return kind


def _check_version(db: sqlite_utils.Database, path: str) -> None:
    version = _pragma(db.conn, "user_version")
    if version > VERSION:
        raise LedgerError(
            f"{path} was written by a newer ckptd (ledger version {version}, this one reads up to {VERSION}): upgrade"
        )


def _migrate(db: sqlite_utils.Database) -> None:
    if _pragma(db.conn, "user_version") == VERSION:
        return
    with _transaction(db.conn):
        version = int(_pragma(db.conn, "user_version"))  # again: now nobody else can change it
        for step in MIGRATIONS[version:]:
            step(db)
        db.conn.execute(f"PRAGMA user_version={VERSION}")


def _to_json(data: ev.Json) -> str:
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
