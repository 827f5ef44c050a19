"""Which tables and views does a ledger have, and how does an old one become a new one?

A change of the schema is a new function at the end of `MIGRATIONS`; those that were released are never edited.
"""

# ruff: noqa: S608 - SQL is put together here out of this file's own words

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlite_utils

APPLICATION_ID: Final = 0x636B7074
"""`ckpt`: tells a ledger from any other SQLite file."""

_TABLES: Final = (
    """
    CREATE TABLE events (
        id INTEGER PRIMARY KEY,
        t REAL NOT NULL,
        at REAL NOT NULL,
        attempt INTEGER,
        kind TEXT NOT NULL,
        node TEXT,
        rank INTEGER,
        data TEXT NOT NULL
    )
    """,
    "CREATE INDEX events_by_kind ON events (kind, attempt)",
    "CREATE TRIGGER events_keep BEFORE UPDATE ON events BEGIN SELECT raise(ABORT, 'events are never changed'); END",
    "CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT raise(ABORT, 'events are never deleted'); END",
    # A row for every event that came from an agent: exact in any order, also when one of them could not be written.
    """
    CREATE TABLE agent_seq (
        node TEXT NOT NULL,
        agent_id TEXT NOT NULL,
        seq INTEGER NOT NULL,
        PRIMARY KEY (node, agent_id, seq)
    ) WITHOUT ROWID
    """,
)


def _columns(*names: str) -> str:
    """Keys of `data` as columns."""
    return ", ".join(f"json_extract(e.data, '$.{name}') AS {name}" for name in names)


# The run's end belongs to the attempt before it, if no other was launched in between.
_RUN_END: Final = """
    SELECT json_extract(r.data, '$.outcome') FROM events r
    WHERE r.kind = 'run_ended' AND r.id > e.id AND r.id < coalesce(
        (SELECT min(n.id) FROM events n WHERE n.kind = 'attempt_launched' AND n.id > e.id), 9223372036854775807)
    ORDER BY r.id LIMIT 1
"""

VIEWS: Final[dict[str, str]] = {
    # outcome: running | interrupted | ended | what the run ended as: finished, failed, stopped, unavailable
    "attempts": f"""
        SELECT attempt, started_at, world_size, resumed_step, ended_at, CASE
            WHEN run_outcome IN ('finished', 'failed') THEN run_outcome
            WHEN interrupted THEN 'interrupted'
            WHEN run_outcome IS NOT NULL THEN run_outcome
            WHEN ended_at IS NULL THEN 'running'
            ELSE 'ended' END AS outcome
        FROM (
            SELECT e.id, e.attempt, e.at AS started_at,
                json_extract(e.data, '$.world_size') AS world_size,
                json_extract(e.data, '$.resume.step') AS resumed_step,
                (SELECT max(x.at) FROM events x WHERE x.kind = 'attempt_ended' AND x.attempt = e.attempt) AS ended_at,
                EXISTS (SELECT 1 FROM events i WHERE i.kind = 'interrupted' AND i.attempt = e.attempt) AS interrupted,
                ({_RUN_END}) AS run_outcome
            FROM events e WHERE e.kind = 'attempt_launched'
        ) ORDER BY id
    """,
    "interruptions": f"""
        SELECT e.id, e.attempt, e.at,
            e.at + max(0.0, json_extract(e.data, '$.detected_t') - e.t) AS detected_at,
            {_columns("cause", "severity", "planned")}, e.node, e.rank,
            {_columns("lost_steps", "lost_seconds", "detail")}
        FROM events e WHERE e.kind = 'interrupted' ORDER BY e.id
    """,
    # The interruption is that of the attempt which the event names, or else the last one before it.
    "restarts": f"""
        SELECT coalesce(
                (SELECT max(i.id) FROM events i WHERE i.kind = 'interrupted' AND i.id < e.id
                    AND i.attempt = json_extract(e.data, '$.interrupted_attempt')),
                (SELECT max(i.id) FROM events i WHERE i.kind = 'interrupted' AND i.id < e.id)) AS interruption_id,
            {_columns("total_s", "detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s")},
            {_columns("warm")}, e.attempt, e.at
        FROM events e WHERE e.kind = 'restarted' ORDER BY e.id
    """,
    # A save, and each copy of it on another tier, whose time runs from the beginning of the save, if that is known.
    "saves": f"""
        SELECT json_extract(e.data, '$.step') AS step, e.attempt, {_columns("tier", "stall_s", "bytes")},
            CASE e.kind WHEN 'checkpoint_copied' THEN coalesce(
                (SELECT e.t - (s.t - json_extract(s.data, '$.upload_s')) FROM events s
                    WHERE s.kind = 'save_committed' AND s.attempt = e.attempt
                        AND json_extract(s.data, '$.step') = json_extract(e.data, '$.step') ORDER BY s.id LIMIT 1),
                json_extract(e.data, '$.seconds'))
            ELSE json_extract(e.data, '$.upload_s') END AS upload_s,
            CASE e.kind WHEN 'checkpoint_copied' THEN 'committed' WHEN 'copy_failed' THEN 'failed'
                ELSE substr(e.kind, 6) END AS outcome,
            e.at, {_columns("path")}, coalesce(json_extract(e.data, '$.error'), json_extract(e.data, '$.why')) AS error,
            lead(json_extract(e.data, '$.slowdown_s')) OVER (PARTITION BY e.attempt, json_extract(e.data, '$.tier')
                ORDER BY e.id) AS slowdown_s
        FROM events e
        WHERE e.kind IN ('save_committed', 'save_failed', 'save_rejected', 'checkpoint_copied', 'copy_failed')
        ORDER BY e.id
    """,
    "decisions": f"""
        SELECT e.at, {_columns("mtbf_s", "mtbf_low_s", "mtbf_high_s", "stall_s", "restart_s", "upload_s", "step_s")},
            {_columns("interval_s", "interval_steps", "formula", "clamped_by", "reason")}
        FROM events e WHERE e.kind = 'interval_decided' ORDER BY e.id
    """,
}

BOOLEANS: Final = ("planned", "warm")
"""Columns of the views that SQLite, which has no truth values, gives as 0 and 1."""


def _first(db: sqlite_utils.Database) -> None:
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    for statement in _TABLES:
        db.execute(statement)
    for name, select in VIEWS.items():
        db.execute(f"CREATE VIEW {name} AS {select}")


def _renew_saves(db: sqlite_utils.Database) -> None:
    db.execute("DROP VIEW saves")
    db.execute(f"CREATE VIEW saves AS {VIEWS['saves']}")


MIGRATIONS: Final[tuple[Callable[[sqlite_utils.Database], None], ...]] = (
    _first,
    _renew_saves,
    _renew_saves,
    _renew_saves,
)

VERSION: Final = len(MIGRATIONS)
"""What `PRAGMA user_version` says in a ledger of this ckptd."""
