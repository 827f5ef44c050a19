"""A damaged ledger costs history, and neither the run nor its checkpoints."""

from __future__ import annotations

import os
import shutil

import pytest
import yaml

from ckptd import jobspec, rescue
from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.policy import Policy
from ckptd.core.state import Status
from ckptd.errors import LedgerDamaged
from ckptd.journal import Journal
from ckptd.ledger import Ledger
from ckptd.ledger_salvage import salvage
from ckptd.rundir import RunDir
from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, Marker


@pytest.fixture
def run(tmp_path):
    """A run directory and its job, with one commit of attempt 7 on its tier."""
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "job.yaml"
    tiers = [{"name": "disk", "path": str(tmp_path / "c")}]
    text = {"name": "job", "command": ["train.py"], "run_dir": str(tmp_path / "run"), "checkpoint": {"tiers": tiers}}
    path.write_text(yaml.safe_dump(text))
    spec = jobspec.load(path)
    run_dir = RunDir(spec.run_dir_path)
    run_dir.create()
    here = tmp_path / "c" / "job" / contract.checkpoint_dirname(10, 7)
    here.mkdir(parents=True)
    Marker(
        format=contract.FORMAT, run_id="abc", sequence=3, step=10, samples_seen=1, epoch=0, attempt=7, world_size=2,
        global_batch=None, loss=None, created=1.0, comparable=True, files=[],
    ).write(here / COMMITTED)  # fmt: skip
    return run_dir, spec


def start(run_id="abc"):
    return ev.DaemonStarted(t=0.0, at=1.0, policy=Policy(run_id=run_id, name="job").to_dict())


def events_of(run_dir):
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        return [event for _, event in ledger.events()]


def test_where_nothing_can_be_read_the_checkpoints_say_whose_they_are_and_how_far_it_counted(run, capsys):
    run_dir, spec = run
    run_dir.make_attempt_dir(8)
    run_dir.ledger_path.write_bytes(b"\0" * 5000)
    with rescue.opened(run_dir, spec) as ledger:
        assert ledger.append(ev.Noted(t=1.0, what="later")) > 0
    assert "the ledger was damaged" in capsys.readouterr().err
    assert (run_dir.path / "ledger.db.damaged-1").read_bytes() == b"\0" * 5000
    state = picture.replay(events_of(run_dir)).run
    assert (state.policy.run_id, state.attempt, state.status) == ("abc", 8, Status.ENDED)
    assert [e.level for e in events_of(run_dir) if isinstance(e, ev.Noted)] == ["error", "warning"]
    # The next daemon ends what may still run of that attempt before it launches the ninth.
    state = picture.replay([*events_of(run_dir), start()]).run
    assert state.status is Status.STOPPING
    assert set(state.placement) == {"local"}
    with rescue.opened(run_dir, spec) as ledger:
        assert len(list(ledger.events())) == len(events_of(run_dir)), "a whole one is left as it is"


def test_a_second_one_gets_a_name_of_its_own_and_without_any_trace_a_new_run_begins(run):
    run_dir, spec = run
    shutil.rmtree(spec.tier_dir(spec.checkpoint.tiers[0]))
    for _ in range(2):
        run_dir.ledger_path.write_bytes(b"nothing of a database")
        with rescue.opened(run_dir, spec):
            pass
    assert [type(e) for e in events_of(run_dir)] == [ev.Noted]
    assert sorted(p.name for p in run_dir.path.glob("*.damaged-?")) == ["ledger.db.damaged-1", "ledger.db.damaged-2"]


def damage(path):
    """Spoil pages in the middle of the table, so that its beginning and its end can be read."""
    data = bytearray(path.read_bytes())
    pages = len(data) // 4096
    for page in range(pages // 2, pages // 2 + 3):
        data[page * 4096 : page * 4096 + 4096] = b"\xa5" * 4096
    path.write_bytes(data)


def test_what_can_be_read_is_taken_over_with_its_pins(run, capsys):
    run_dir, spec = run
    history = [start(), ev.CheckpointPinned(t=1.0, step=10, path="/c/step_000000010.a0007", label="keep me")]
    history += [ev.Noted(t=2.0 + n, what="x" * 300) for n in range(400)]
    history += [ev.AttemptLaunched(t=500.0, attempt=7, world_size=1, placement={"local": [0]})]
    with Ledger.open(run_dir.ledger_path) as ledger:
        ledger.append_many(history)
    damage(run_dir.ledger_path)
    with pytest.raises(LedgerDamaged, match="`ckptd run` sets it aside"):
        Ledger.open(run_dir.ledger_path)
    with rescue.opened(run_dir, spec):
        pass
    found = events_of(run_dir)
    assert 100 < len(found) < len(history)
    assert "events of it could be read" in capsys.readouterr().err
    state = picture.replay(found).run
    assert [pin.label for pin in state.keeping.pins.values()] == ["keep me"]
    assert (state.attempt, state.status) == (7, Status.LAUNCHING), "the end was readable: whoever carries it is adopted"
    assert salvage(str(run_dir.path / "ledger.db.damaged-1")) == found[: len(found) - 1]


def test_damage_that_is_met_while_the_run_is_supervised_is_mended_on_the_spot(run):
    run_dir, _ = run
    told = []
    with Ledger.open(run_dir.ledger_path) as ledger:
        journal = Journal(ledger, acknowledge=lambda _: None, tell=lambda level, what: told.append((level, what)))
        journal.append(start())
        ledger._db.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with open(run_dir.ledger_path, "r+b") as file:
            file.write(os.urandom(run_dir.ledger_path.stat().st_size))
        ledger._db.conn.execute("PRAGMA cache_size=0")
        journal.append(ev.Noted(t=1.0, what="after"))
        for _ in range(3):
            journal.write()
        assert journal.waiting == 0
        assert ledger.append(ev.Noted(t=2.0, what="and again")) > 0
    assert [level for level, _ in told] == ["error"]
    assert "damaged-1" in told[0][1]
    assert [e.what for e in events_of(run_dir) if isinstance(e, ev.Noted)] == ["after", "and again"]
