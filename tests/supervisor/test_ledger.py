"""The ledger: what it acknowledged is there for good, and its views say what the events say."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import ledger as ledger_module
from ckptd import ledger_schema
from ckptd.core import events as ev
from ckptd.errors import LedgerError, LedgerFull
from ckptd.ledger import Ledger


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path):
    with Ledger.open(path) as opened:
        yield opened


@contextlib.contextmanager
def child(code, *arguments):
    """A Python process that is dead when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def step(n):
    return ev.Progress(t=float(n), at=1e9 + n, attempt=1, step=n)


class TestEvents:
    def test_come_back_as_they_were(self, path):
        every = [
            cls(t=i / 7, at=1.7e9 + i, attempt=i, node=f"n{i}", rank=i) for i, cls in enumerate(ev._REGISTRY.values())
        ]
        every.append(ev.AttemptLaunched(t=99.5, placement={"a": [0, 1]}, resume={"step": 3, "path": "/ü/x"}))
        with Ledger.open(path) as one:
            ids = one.append_many(every)
            assert ids == list(range(1, len(every) + 1))
        with Ledger.open(path) as other:
            assert list(other.events()) == list(zip(ids, every, strict=True))
            assert list(other.events(after_id=ids[-2])) == [(ids[-1], every[-1])]
            assert other.last_t() == 99.5
            assert other.append(step(1)) == ids[-1] + 1

    def test_empty(self, ledger):
        assert list(ledger.events()) == []
        assert ledger.last_t() == 0.0
        assert all(ledger.rows(view) == [] for view in ledger_schema.VIEWS)

    def test_more_than_a_page_while_appending(self, ledger):
        ledger.append_many([step(n) for n in range(2500)])
        seen = []
        for id_, event in ledger.events():
            if id_ == 1:
                ledger.append(step(2500))
            seen.append(event.step)
        assert seen == list(range(2501))

    def test_of_a_newer_ckptd_are_skipped_and_counted(self, ledger):
        ledger.append(step(1))
        insert = "INSERT INTO events (t, at, kind, data) VALUES (2, 0, ?, ?)"
        ledger._db.execute(insert, ("rank_teleported", "{}"))
        ledger._db.execute(insert, ("progress", '{"step": 2, "colour": "red"}'))
        assert [event.step for _, event in ledger.events()] == [1, 2]
        assert ledger.skipped == 1

    def test_that_make_no_sense_are_named(self, ledger):
        ledger._db.execute("INSERT INTO events (t, at, kind, data) VALUES (2, 0, 'progress', '{\"step\": ')")
        with pytest.raises(LedgerError, match=r"event 1 in .*ledger\.db cannot be read"):
            list(ledger.events())

    def test_numbers_that_json_has_no_name_for_become_null(self, ledger):
        ledger.append(ev.Progress(t=1.0, step=3, loss=float("nan")))
        ledger.append(ev.HealthReported(t=1.0, detail="x"))
        ledger.append(ev.InventoryReported(t=1.0, rejected=[{"step": float("inf")}]))
        (_, progress), _, (_, inventory) = ledger.events()
        assert (progress.step, progress.loss) == (3, None)
        assert inventory.rejected == [{"step": None}]

    def test_need_a_time(self, ledger):
        with pytest.raises(ValueError, match="needs a time"):
            ledger.append(step(float("nan")))
        assert list(ledger.events()) == []

    @pytest.mark.parametrize("statement", ["UPDATE events SET t = 0", "DELETE FROM events"])
    def test_are_never_changed(self, ledger, statement):
        ledger.append(step(1))
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            ledger._db.execute(statement)
        assert ledger.last_t() == 1.0

    def test_several_are_added_all_or_none(self, ledger):
        with pytest.raises(ValueError, match="needs a time"):
            ledger.append_many([step(1), step(float("inf"))])
        assert list(ledger.events()) == []
        ledger.append(step(2))

    def test_from_an_agent_once_in_any_order(self, path):
        with Ledger.open(path) as one:
            assert one.append_from_agent(step(1), "n0", "a", 1) is True
            assert one.append_from_agent(step(3), "n0", "a", 3) is True
            assert one.append_from_agent(step(1), "n0", "a", 1) is False
        with Ledger.open(path) as other:  # a daemon that started again
            assert other.append_from_agent(step(3), "n0", "a", 3) is False
            assert other.append_from_agent(step(2), "n0", "a", 2) is True  # late, not lost
            assert other.append_from_agent(step(11), "n0", "b", 1) is True  # an agent that started again
            assert other.append_from_agent(step(12), "n1", "a", 1) is True
            assert [event.step for _, event in other.events()] == [1, 3, 2, 11, 12]

    def test_an_agents_event_that_found_no_room_is_not_taken_for_seen(self, ledger):
        full(ledger)
        with pytest.raises(LedgerFull):
            for seq in range(1000):
                ledger.append_from_agent(ev.Noted(t=1.0, what="x" * 500), "n", "a", seq)
        ledger._db.execute("PRAGMA max_page_count=1000000")
        assert ledger.append_from_agent(step(1), "n", "a", seq) is True
        assert ledger.append_from_agent(step(1), "n", "a", 0) is False

    def test_from_several_threads(self, ledger):
        errors = []

        def work(first):
            try:
                for n in range(first, first + 50):
                    ledger.append(step(n))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(k * 50,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sorted(event.step for _, event in ledger.events()) == list(range(200))


class TestDurability:
    WRITER = """
import sys
from ckptd.core import events as ev
from ckptd.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
n = int(sys.argv[2])
while True:
    if n % 10 == 0:
        ids = ledger.append_many([ev.Progress(t=float(m), step=m, attempt=1) for m in range(n, n + 5)])
        n += 5
    else:
        ids = [ledger.append(ev.Progress(t=float(n), step=n, attempt=1))]
        n += 1
    print(ids[-1], n - 1, flush=True)
"""

    def test_kill_minus_nine_loses_nothing_that_was_acknowledged(self, path):
        expected = 0
        for round_ in range(4):
            with child(self.WRITER, path, expected) as writer:
                acknowledged = None
                for _ in range(40 + 13 * round_):
                    acknowledged = writer.stdout.readline()
                writer.send_signal(signal.SIGKILL)  # the writer is somewhere inside the next ones
                rest = writer.stdout.read()
                writer.wait()
            lines = [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
            last_id, last_step = map(int, (lines[-1] if lines else acknowledged).split())
            with Ledger.open(path) as again:
                steps = [event.step for _, event in again.events()]
                ids = [id_ for id_, _ in again.events()]
            assert max(ids) >= last_id
            assert steps[:last_id] == list(range(last_step + 1))
            assert steps == list(range(len(steps)))  # whole transactions, in order, no gap
            expected = len(steps)

    def test_the_disk_was_told(self, ledger):
        """Without FULL, WAL appends survive a process but not a power cut."""
        assert ledger._db.execute("PRAGMA synchronous").fetchone()[0] >= 2

    def test_an_append_costs_little_more_than_the_disk_asks(self, ledger, tmp_path):
        def seconds(work):
            started = time.perf_counter()
            work()
            return time.perf_counter() - started

        with open(tmp_path / "raw", "wb", buffering=0) as raw:

            def sync():
                raw.write(b"x" * 4096)
                os.fsync(raw.fileno())

            disk = statistics.median(seconds(sync) for _ in range(30))
        assert statistics.median(seconds(lambda: ledger.append(step(1))) for _ in range(100)) < 0.010 + 5 * disk


def full(ledger):
    """Leave room for a few events more."""
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages + 3}")


class TestTrouble:
    def test_no_room(self, ledger):
        full(ledger)
        appended = 0
        with pytest.raises(LedgerFull, match=r"no room for the ledger .*ledger.db .*free space") as caught:
            for _ in range(1000):
                ledger.append(ev.Noted(t=1.0, what="x" * 500))
                appended += 1
        assert caught.value.exit_status == LedgerError.exit_status
        assert len(list(ledger.events())) == appended
        ledger._db.execute("PRAGMA max_page_count=1000000")
        ledger.append(step(1))
        assert len(list(ledger.events())) == appended + 1

    def test_a_limit_on_the_size_of_files(self, path):
        """A write that fails in the kernel, as with a quota; and the ledger goes on once it is raised."""
        code = """
import resource, sys
from ckptd.core import events as ev
from ckptd.errors import LedgerFull
from ckptd.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
appended = 0
try:
    while appended < 10_000:
        ledger.append(ev.Noted(t=1.0, what="x" * 1000))
        appended += 1
except LedgerFull:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.append(ev.Noted(t=2.0, what="again"))
    print(appended, len(list(ledger.events())))
"""
        with child(code, path) as process:
            out, _ = process.communicate(timeout=60)
        appended, found = map(int, out.split())
        assert 10 < appended < 10_000
        assert found == appended + 1
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY

    @pytest.mark.parametrize("readonly", [False, True])
    def test_a_file_that_is_no_database(self, path, readonly):
        path.write_bytes(b"not a database, certainly " * 100)
        before = path.read_bytes()
        with pytest.raises(LedgerError, match=r"ledger.db is damaged or is no ledger.*`ckptd run` sets it aside"):
            Ledger.open(path, readonly=readonly)
        assert path.read_bytes() == before

    def test_a_damaged_one_is_reported_and_left_alone(self, path):
        with Ledger.open(path) as one:
            one.append_many([ev.Noted(t=float(n), what="x" * 300) for n in range(200)])
        data = bytearray(path.read_bytes())
        for page in range(2, len(data) // 4096):
            data[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
        path.write_bytes(data)
        with pytest.raises(LedgerError, match="is damaged"):
            Ledger.open(path)
        assert path.read_bytes() == data
        with pytest.raises(LedgerError, match="is damaged"), Ledger.open(path, readonly=True) as one:
            list(one.events())

    def test_one_cut_short(self, path):
        with Ledger.open(path) as one:
            one.append_many([ev.Noted(t=float(n), what="x" * 300) for n in range(200)])
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(LedgerError, match="is damaged"):
            Ledger.open(path)

    def test_a_database_of_something_else(self, path):
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE songs (title TEXT)")
        other.commit()
        other.close()
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="is an SQLite database of something else"):
            Ledger.open(path)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("readonly", [False, True])
    def test_a_newer_one(self, path, readonly):
        Ledger.open(path).close()
        conn = sqlite3.connect(path)
        conn.execute(f"PRAGMA user_version={ledger_schema.VERSION + 1}")
        conn.close()
        with pytest.raises(LedgerError, match="written by a newer ckptd"):
            Ledger.open(path, readonly=readonly)

    def test_one_that_another_program_holds(self, ledger, path, monkeypatch):
        monkeypatch.setattr(ledger_module, "_BUSY_S", 0.05)
        with Ledger.open(path) as second:
            ledger._db.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerError, match="has been locked by another program"):
                second.append(step(1))
            ledger._db.execute("ROLLBACK")
            second.append(step(1))

    def test_a_directory_that_is_not_there(self, tmp_path):
        with pytest.raises(LedgerError, match="cannot be used"):
            Ledger.open(tmp_path / "no" / "ledger.db")

    def test_a_path_with_marks_that_a_uri_would_read(self, tmp_path):
        odd = tmp_path / "a?b#c%41.db"
        with Ledger.open(odd) as one:
            one.append(step(1))
        assert odd.exists()


class TestReadonly:
    def test_sees_what_a_living_daemon_writes(self, ledger, path):
        ledger.append(step(1))
        with Ledger.open(path, readonly=True) as reader:
            assert reader.last_t() == 1.0
            ledger.append(step(2))
            assert reader.last_t() == 2.0
            with pytest.raises(LedgerError, match="readonly"):
                reader.append(step(3))

    def test_makes_nothing(self, path):
        with pytest.raises(LedgerError, match="there is no ledger at"):
            Ledger.open(path, readonly=True)
        assert not path.exists()
        path.touch()
        with pytest.raises(LedgerError, match="is not a ledger yet"):
            Ledger.open(path, readonly=True)


class TestJournal:
    def test_is_a_wal_here_and_private(self, ledger, path):
        mode = ledger._db.execute("PRAGMA journal_mode").fetchone()[0]
        assert mode == ("delete" if ledger.warning else "wal")
        assert path.stat().st_mode & 0o777 == 0o600

    def test_falls_back_where_wal_is_refused(self, tmp_path):
        # This SQLite VFS locks with a dot-file and has no shared memory: it refuses WAL, as a network file system may.
        conn = sqlite3.connect(f"file:{tmp_path}/x.db?vfs=unix-dotfile", uri=True, isolation_level=None)
        try:
            warning = ledger_module._set_journal(conn, "x.db", network=None)
            assert "refuses WAL" in warning
            assert conn.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
            assert conn.execute("PRAGMA synchronous").fetchone()[0] == 3
            conn.execute("CREATE TABLE t (x)")
        finally:
            conn.close()

    def test_on_a_network_file_system_a_wal_is_given_up(self, path):
        with Ledger.open(path) as one:
            one.append(step(1))
        conn = sqlite3.connect(path, isolation_level=None)
        try:
            warning = ledger_module._set_journal(conn, str(path), network="nfs4")
            assert "network file system (nfs4)" in warning
            assert conn.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        finally:
            conn.close()
        assert not path.with_name("ledger.db-wal").exists()
        with Ledger.open(path, readonly=True) as one:
            assert one.last_t() == 1.0

    def test_file_system_of_a_path(self):
        mounts = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:40 / /home rw shared:5 master:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /scratch rw - ext4 /dev/sdc rw
33 22 0:43 / /scratch rw - lustre mds:/x rw
34 22 0:44 / /mnt/s3 rw - fuse.s3fs s3fs rw
"""
        kinds = {
            "/var/x": "ext4",
            "/home/me/runs": "nfs4",
            "/home/me/local disk/x": "xfs",
            "/homework": "ext4",
            "/scratch/a": "lustre",
            "/": "ext4",
        }
        assert {path: ledger_module._filesystem_type(path, mounts) for path in kinds} == kinds


def views(ledger):
    return {view: ledger.rows(view) for view in ledger_schema.VIEWS}


class TestViews:
    """Attempt 1 is killed and restarted, attempt 2 is stopped, attempt 3 finishes."""

    @pytest.fixture
    def story(self, ledger):
        ledger.append_many([
            ev.DaemonStarted(t=0.0, at=1000.0),
            ev.IntervalDecided(t=0.0, at=1000.0, mtbf_s=3600.0, mtbf_low_s=1000.0, mtbf_high_s=9000.0, reason="prior"),
            ev.AttemptLaunched(t=1.0, at=1001.0, attempt=1, world_size=2),
            ev.SaveCommitted(t=9.0, at=1009.0, attempt=1, step=50, tier="disk", bytes=10, stall_s=0.5, upload_s=2.0),
            ev.SaveFailed(t=12.0, at=1012.0, attempt=1, step=60, tier="disk", stall_s=0.25, error="full", path="/x"),
            ev.SaveRejected(t=13.0, at=1013.0, attempt=1, step=70, tier="disk", stall_s=0.5, why="NaN", path="/y"),
            ev.AttemptEnded(t=21.0, at=1021.0, attempt=1, node="a"),
            ev.AttemptEnded(t=22.0, at=1022.0, attempt=1, node="b"),
            ev.Interrupted(t=20.0, at=1020.0, attempt=1, node="b", rank=1, detected_t=20.5, cause="sigkill",
                           severity="process", lost_steps=7, lost_seconds=3.5, detail="killed by signal 9"),
            ev.AttemptLaunched(t=23.0, at=1023.0, attempt=2, world_size=1, resume={"step": 50}),
            ev.Restarted(t=26.0, at=1026.0, attempt=2, interrupted_attempt=1, total_s=6.0, detect_s=0.5, stop_s=1.5,
                         wait_s=0.0, launch_s=1.0, init_s=1.0, restore_s=1.0, first_step_s=1.0, warm=True),
            ev.AttemptEnded(t=30.0, at=1030.0, attempt=2, node="a"),
            ev.RunEnded(t=30.0, at=1030.0, outcome="stopped", exit_status=75),
            ev.DaemonStarted(t=30.0, at=5000.0),
            ev.AttemptLaunched(t=31.0, at=5001.0, attempt=3, world_size=2, resume={"step": 80}),
            ev.IntervalDecided(t=32.0, at=5002.0, mtbf_s=60.0, mtbf_low_s=20.0, mtbf_high_s=90.0, stall_s=0.5,
                               restart_s=6.0, upload_s=2.0, step_s=0.1, interval_s=7.2, interval_steps=72,
                               formula="exact", clamped_by="upload"),
        ])  # fmt: skip
        return ledger

    def test_attempts(self, story):
        def row(attempt, started_at, world_size, resumed_step, ended_at, outcome):
            return {"attempt": attempt, "started_at": started_at, "world_size": world_size,
                    "resumed_step": resumed_step, "ended_at": ended_at, "outcome": outcome}  # fmt: skip

        first = [row(1, 1001.0, 2, None, 1022.0, "interrupted"), row(2, 1023.0, 1, 50, 1030.0, "stopped")]
        assert story.rows("attempts") == [*first, row(3, 5001.0, 2, 80, None, "running")]
        story.append(ev.AttemptEnded(t=40.0, at=5010.0, attempt=3))
        assert story.rows("attempts")[2] == row(3, 5001.0, 2, 80, 5010.0, "ended")
        story.append(ev.RunEnded(t=40.0, at=5010.0, outcome="finished", exit_status=0))
        assert story.rows("attempts") == [*first, row(3, 5001.0, 2, 80, 5010.0, "finished")]

    def test_attempt_that_failed_for_good_and_one_that_was_over_before(self, story):
        story.append(ev.Interrupted(t=40.0, at=5010.0, attempt=3))
        assert story.rows("attempts")[2]["outcome"] == "interrupted"
        story.append(ev.RunEnded(t=50.0, at=5020.0, outcome="stopped"))  # while it waited for devices
        assert story.rows("attempts")[2]["outcome"] == "interrupted"

    def test_interruptions(self, story):
        assert story.rows("interruptions") == [{
            "id": 9, "attempt": 1, "at": 1020.0, "detected_at": 1020.5, "cause": "sigkill", "severity": "process",
            "planned": False, "node": "b", "rank": 1, "lost_steps": 7, "lost_seconds": 3.5,
            "detail": "killed by signal 9",
        }]  # fmt: skip

    def test_restarts(self, story):
        (row,) = story.rows("restarts")
        assert row == {
            "interruption_id": 9, "total_s": 6.0, "detect_s": 0.5, "stop_s": 1.5, "wait_s": 0.0, "launch_s": 1.0,
            "init_s": 1.0, "restore_s": 1.0, "first_step_s": 1.0, "warm": True, "attempt": 2, "at": 1026.0,
        }  # fmt: skip

    def test_a_restart_that_took_two_tries_belongs_to_the_interruption_it_names(self, story):
        first = story.append(ev.Interrupted(t=40.0, attempt=3))
        second = story.append(ev.Interrupted(t=41.0, attempt=4))
        story.append(ev.Restarted(t=45.0, attempt=5, interrupted_attempt=3))
        story.append(ev.Restarted(t=45.0, attempt=5))
        assert [row["interruption_id"] for row in story.rows("restarts")][1:] == [first, second]

    def test_saves(self, story):
        assert story.rows("saves") == [
            {"step": 50, "attempt": 1, "tier": "disk", "stall_s": 0.5, "bytes": 10, "upload_s": 2.0,
             "outcome": "committed", "at": 1009.0, "path": "", "error": None, "slowdown_s": None},
            {"step": 60, "attempt": 1, "tier": "disk", "stall_s": 0.25, "bytes": None, "upload_s": None,
             "outcome": "failed", "at": 1012.0, "path": "/x", "error": "full", "slowdown_s": None},
            {"step": 70, "attempt": 1, "tier": "disk", "stall_s": 0.5, "bytes": None, "upload_s": None,
             "outcome": "rejected", "at": 1013.0, "path": "/y", "error": "NaN", "slowdown_s": None},
        ]  # fmt: skip

    def test_what_an_upload_cost_is_reported_by_the_next_save_and_stands_with_its_own(self, story):
        story.append(ev.SaveCommitted(t=20.0, attempt=2, step=80, tier="disk", slowdown_s=0.75))
        story.append(ev.SaveCommitted(t=20.5, attempt=2, step=80, tier="far", slowdown_s=0.0))
        story.append(ev.SaveCommitted(t=21.0, attempt=2, step=90, tier="disk", slowdown_s=-0.25))
        story.append(ev.SaveCommitted(t=22.0, attempt=2, step=99, tier="disk", slowdown_s=0.5))
        rows = [row for row in story.rows("saves") if row["attempt"] == 2 and row["tier"] == "disk"]
        assert [(row["step"], row["slowdown_s"]) for row in rows] == [(80, -0.25), (90, 0.5), (99, None)]

    def test_copies_are_saves_of_other_tiers_whose_time_runs_from_the_beginning_of_the_save(self, ledger):
        ledger.append_many(
            [
                ev.SaveCommitted(
                    t=12.0, at=2.0, attempt=1, step=50, tier="memory", bytes=10, stall_s=0.5, upload_s=2.0
                ),
                ev.CheckpointCopied(t=17.5, at=7.0, attempt=1, step=50, tier="disk", bytes=10, seconds=4.0, path="/d"),
                ev.CheckpointCopied(t=30.0, at=9.0, attempt=1, step=40, tier="disk", bytes=10, seconds=4.0, path="/e"),
                ev.CopyFailed(t=31.0, at=10.0, attempt=1, step=50, tier="far", path="s3://f", error="forbidden"),
            ]
        )
        rows = ledger.rows("saves")
        assert [(r["step"], r["tier"], r["outcome"], r["upload_s"], r["stall_s"]) for r in rows] == [
            (50, "memory", "committed", 2.0, 0.5), (50, "disk", "committed", 7.5, None),
            (40, "disk", "committed", 4.0, None), (50, "far", "failed", None, None),
        ]  # fmt: skip
        assert rows[-1]["error"] == "forbidden"

    def test_decisions(self, story):
        assert story.rows("decisions") == [
            {"at": 1000.0, "mtbf_s": 3600.0, "mtbf_low_s": 1000.0, "mtbf_high_s": 9000.0, "stall_s": None,
             "restart_s": None, "upload_s": None, "step_s": None, "interval_s": None, "interval_steps": None,
             "formula": "daly", "clamped_by": None, "reason": "prior"},
            {"at": 5002.0, "mtbf_s": 60.0, "mtbf_low_s": 20.0, "mtbf_high_s": 90.0, "stall_s": 0.5, "restart_s": 6.0,
             "upload_s": 2.0, "step_s": 0.1, "interval_s": 7.2, "interval_steps": 72, "formula": "exact",
             "clamped_by": "upload", "reason": ""},
        ]  # fmt: skip

    def test_any_sqlite_client_reads_them(self, story, path):
        conn = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            assert conn.execute("SELECT cause FROM interruptions").fetchall() == [("sigkill",)]
            assert [row[1] for row in conn.execute("PRAGMA table_info(events)")][:3] == ["id", "t", "at"]
        finally:
            conn.close()

    def test_no_such_view(self, ledger):
        with pytest.raises(ValueError, match="no view 'events; DROP"):
            ledger.rows("events; DROP TABLE events")

    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.sampled_from(sorted(ev.kinds())), max_size=30))
    def test_any_order_of_any_events_can_be_viewed(self, tmp_path_factory, kinds):
        with Ledger.open(tmp_path_factory.mktemp("l") / "l.db") as ledger:
            ledger.append_many([ev.from_parts(kind, {}, t=float(i), attempt=i % 3) for i, kind in enumerate(kinds)])
            counts = {view: len(rows) for view, rows in views(ledger).items()}
        assert counts == {
            "attempts": kinds.count("attempt_launched"),
            "interruptions": kinds.count("interrupted"),
            "restarts": kinds.count("restarted"),
            "saves": sum(kinds.count(f"save_{outcome}") for outcome in ("committed", "failed", "rejected"))
            + kinds.count("checkpoint_copied")
            + kinds.count("copy_failed"),
            "decisions": kinds.count("interval_decided"),
        }


def test_an_older_ledger_is_migrated_in_one_step_or_not_at_all(path, monkeypatch):
    with Ledger.open(path) as one:
        one.append(step(7))

    def add(db):
        db.execute("ALTER TABLE events ADD COLUMN extra TEXT")

    def fail(db):
        db.execute("CREATE TABLE half (x)")
        raise sqlite3.OperationalError("broken")

    first = ledger_schema.MIGRATIONS
    monkeypatch.setattr(ledger_module, "MIGRATIONS", (*first, add, fail))
    monkeypatch.setattr(ledger_module, "VERSION", len(first) + 2)
    with pytest.raises(LedgerError, match="broken"):
        Ledger.open(path)
    monkeypatch.setattr(ledger_module, "MIGRATIONS", (*first, add, lambda db: None))
    with Ledger.open(path) as one:
        names = {row[0] for row in one._db.execute("SELECT name FROM sqlite_schema")}
        assert "half" not in names
        assert "extra" in [row[1] for row in one._db.execute("PRAGMA table_info(events)")]
        assert one._db.execute("PRAGMA user_version").fetchone()[0] == len(first) + 2
        assert one.last_t() == 7.0


def test_a_ledger_from_before_the_guard_shows_rejected_saves_too(path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(ledger_module, "MIGRATIONS", ledger_schema.MIGRATIONS[:1])
        before.setattr(ledger_module, "VERSION", 1)
        with Ledger.open(path) as one:
            one._db.execute("DROP VIEW saves")
            one._db.execute("CREATE VIEW saves AS SELECT * FROM events WHERE kind = 'save_committed'")
            one.append(ev.SaveRejected(t=1.0, step=5, why="NaN"))
    with Ledger.open(path) as one:
        assert [(row["step"], row["outcome"], row["error"]) for row in one.rows("saves")] == [(5, "rejected", "NaN")]


def test_data_is_plain_json(ledger):
    ledger.append(ev.AttemptLaunched(t=1.0, placement={"n": [0]}))
    (text,) = ledger._db.execute("SELECT data FROM events").fetchone()
    assert json.loads(text)["placement"] == {"n": [0]}
