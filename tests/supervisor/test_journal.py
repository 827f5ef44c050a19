"""A ledger that cannot be written: nothing stops, nothing is lost, nothing is told twice."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sqlite3

import pytest
from daemons import event, hello, living

from ckptd import journal as journal_module
from ckptd.core import events as ev
from ckptd.journal import Journal, Origin
from ckptd.ledger import Ledger


@contextlib.contextmanager
def full():
    """Within it this process may not make any file longer, as on a full disk.

    No fixture: pytest writes a test's result before it tears fixtures down, and its output may be a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)


class Desk:
    def __init__(self, path):
        self.ledger = Ledger.open(path)
        self.acknowledged, self.told = [], []
        self.journal = Journal(self.ledger, acknowledge=self.acknowledged.append, tell=self.tell)

    def tell(self, level, what):
        self.told.append((level, what))

    def take(self, event, origin):
        new = self.journal.take(event, origin)
        self.journal.write()
        return new

    def written(self):
        return [e.what for _, e in self.ledger.events()]


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path / "ledger.db")
    with desk.ledger:
        yield desk


def note(what):
    return ev.Noted(t=1.0, at=1.0, level="info", what=what)


def test_without_trouble_it_is_the_ledger(desk):
    desk.journal.append(note("own"))
    origin = Origin(node="n", agent_id="a", seq=1)
    assert desk.take(note("agent's"), origin)
    assert not desk.take(note("agent's"), origin)
    assert desk.written() == ["own", "agent's"]
    assert desk.acknowledged == [origin, origin]  # a sender that sends again has not heard it
    assert desk.told == []


def test_a_full_disk_makes_events_late_in_their_order_and_acknowledged_only_then(desk):
    desk.journal.append(note("before"))
    with full():
        first, second = (Origin(node="n", agent_id="a", seq=seq) for seq in (1, 2))
        desk.journal.append(note("own"))
        assert desk.take(note("1"), first)
        assert desk.take(note("2"), second)
        assert not desk.take(note("1"), first), "told again after a redial"
        assert desk.acknowledged == []
        assert [level for level, _ in desk.told] == ["error"], "once, not at every event"
        assert "no room for the ledger" in desk.told[0][1]
        desk.journal.write()
        assert desk.journal.waiting == 3
    desk.journal.write()
    assert desk.written() == ["before", "own", "1", "2"]
    assert desk.acknowledged == [second], "which speaks for all before it"
    assert [level for level, _ in desk.told] == ["error", "info"]
    assert desk.journal.waiting == 0


def test_a_ledger_that_somebody_holds_locked_is_no_reason_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptd.ledger._BUSY_S", 0.05)
    monkeypatch.setattr(journal_module, "RETRY_LOCKED_S", 0.0)
    desk = Desk(tmp_path / "ledger.db")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    with desk.ledger:
        other.execute("BEGIN IMMEDIATE")
        desk.journal.append(note("held up"))
        assert desk.journal.waiting == 1
        other.execute("ROLLBACK")
        desk.journal.write()
        assert desk.written() == ["held up"]
    other.close()


def test_what_is_still_waiting_at_the_end_is_said(desk, caplog):
    with full():
        desk.journal.append(note("lost"))
        desk.journal.close()
        assert "1 events could not be written" in caplog.text


def test_a_daemon_with_a_full_disk_folds_what_it_cannot_write_and_acknowledges_it_later(tmp_path):
    async def scene():
        async with living(tmp_path) as house:
            wire = await house.dial()
            wire.send(hello())
            await wire.wait_for("ask")
            with full():
                wire.send(event(1, "health_reported"))
                wire.send(event(2, "inventory_reported"))
                order = await wire.wait_for("launch")  # decided in memory
                assert order["context"]["attempt"] == 1
                assert house.of(ev.AttemptLaunched) == []
                assert any("no room for the ledger" in note["what"] for note in house.daemon.status()["notes"])
            while (await wire.wait_for("ack"))["seq"] < 2:
                pass
            kinds = [e.kind for _, e in house.ledger.events()]
            assert kinds.index("inventory_reported") < kinds.index("attempt_launched")

    asyncio.run(scene())
