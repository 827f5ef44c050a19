"""The live overview: what is new in the ledger is taken in, however many ask, and a ledger that is not there is said."""

from __future__ import annotations

import json
import threading

import pytest
from made_up_run import MadeUpRun

from ckptd import status
from ckptd.core.overview import Overview
from ckptd.errors import LedgerError
from ckptd.ledger import Ledger
from ckptd.web import live


@pytest.fixture
def run():
    return MadeUpRun(nodes=1, devices=2, mtbf_s=600.0, stall_s=2.0, upload_s=4.0).interrupted_times(5)


class Watched:
    """A live overview whose requests for a status are counted."""

    def __init__(self, path, run):
        self.run = run
        self.asked = 0
        self.overview = live.LiveOverview(path, self.status)

    def status(self):
        self.asked += 1
        return status.document(self.run.picture, t=self.run.t)

    def told(self):
        return json.loads(self.overview.body())


def whole(run):
    folded = Overview()
    for event in run.events:
        folded.apply(event)
    return json.loads(json.dumps(folded.document(status.document(run.picture, t=run.t))))


def test_what_is_told_bit_by_bit_is_what_is_told_at_once(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FRESH_S", 0.0)
    path = tmp_path / "ledger.db"
    watched = Watched(path, run)
    with Ledger.open(path) as ledger:
        for begin in range(0, len(run.events), 40):
            ledger.append_many(run.events[begin : begin + 40])
            told = watched.told()
    told.pop("asked_at")
    assert told == whole(run)


def test_many_who_look_on_cost_one_status(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FRESH_S", 3600.0)
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.append_many(run.events)
    watched = Watched(path, run)
    bodies = []
    readers = [threading.Thread(target=lambda: bodies.append(watched.overview.body())) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(bodies) == 8
    assert len(set(bodies)) == 1
    assert watched.asked == 1


def test_a_ledger_that_cannot_be_read_is_said_and_asked_for_again(run, tmp_path):
    path = tmp_path / "ledger.db"
    watched = Watched(path, run)
    with pytest.raises(LedgerError, match="no ledger"):
        watched.told()
    with Ledger.open(path) as ledger:
        ledger.append_many(run.events)
    assert watched.told()["wall_s"] > 0
