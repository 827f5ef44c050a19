"""The file of imported logs."""

import os
import sqlite3
import subprocess
import sys

import pytest

from ckptd.core.sitelog import Log, Row
from ckptd.errors import HistoryError
from ckptd.history import History, default_path, read_gaps, read_prior, read_summary

HOUR = 3600.0
LOG = Log(name="site", form="events", devices=10.0)


def row(hour, kind="failure", **values):
    return Row(digest=f"r{hour}", kind=kind, at=hour * HOUR, source="f.csv", line=2, **values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "history.db"


@pytest.fixture
def history(path):
    with History.open(path) as opened:
        yield opened


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "ckptd" / "history.db"


def test_what_goes_in_comes_out(history):
    rows = [
        row(0, "start", cause="c", severity="node", node="n", down_s=1.5),
        row(1, devices=4.0, job="7", span_s=3.0, count=2),
    ]
    history.add(LOG, rows)
    assert history.rows("site") == rows
    assert history.log("site") == LOG
    assert history.names() == ["site"]


def test_importing_again_adds_nothing(history):
    rows = [row(hour) for hour in (0, 10, 20)]
    added = history.add(LOG, rows)
    assert (added.new, added.replaced, added.known) == (3, 0, 0)
    before = history.summary("site")
    added = history.add(LOG, rows)
    assert (added.new, added.replaced, added.known) == (0, 0, 3)
    assert history.summary("site") == before


def test_a_log_grows_and_its_rows_can_change(history):
    history.add(LOG, [row(0), row(10, "running")])
    added = history.add(LOG, [row(10, "failure"), row(20)])
    assert (added.new, added.replaced, added.known) == (1, 1, 0)
    assert [found.kind for found in history.rows("site")] == ["failure"] * 3


def test_settings_stay_where_nothing_else_is_said(history):
    history.add(Log(name="site", form="events", devices=10.0, from_at=-HOUR), [row(0)])
    history.add(Log(name="site", form="events", merge_s=60.0), [row(10)])
    assert history.log("site") == Log(name="site", form="events", devices=10.0, from_at=-HOUR, merge_s=60.0)


def test_replace_forgets(history):
    history.add(LOG, [row(0), row(10)])
    history.add(Log(name="other", form="events", devices=1.0), [row(5)])
    history.add(Log(name="site", form="jobs"), [row(20, span_s=HOUR)], replace=True)
    assert [found.at for found in history.rows("site")] == [20 * HOUR]
    assert history.log("site").devices is None
    assert len(history.rows("other")) == 1


def test_forms_are_not_mixed(history):
    history.add(LOG, [row(0)])
    with pytest.raises(HistoryError, match=r"holds events, and these are jobs: give them another --name"):
        history.add(Log(name="site", form="jobs"), [row(1, span_s=1.0)])
    assert len(history.rows("site")) == 1


def test_for_others(history, path):
    history.add(LOG, [row(0, "start"), row(10), row(30), row(40, "planned")])
    assert read_summary(path, "site").failures == 2
    gaps = read_gaps(path, "site")
    assert (gaps.devices, gaps.gaps_device_s, gaps.tail_device_s) == (10.0, (100 * HOUR, 200 * HOUR), 100 * HOUR)
    prior, summary = read_prior(path, "site", 1.0)
    assert (prior.failures, prior.device_seconds) == (1.0, 200 * HOUR)
    assert summary.exposure_device_s == 400 * HOUR


def test_what_is_not_there_is_said(history, path, tmp_path):
    with pytest.raises(HistoryError, match=r"no history at .*none.db: nothing was imported yet; `ckptd import`"):
        read_summary(tmp_path / "none.db", "site")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(HistoryError, match=r"there is no log 'site': nothing was imported"):
        read_summary(path, "site")
    history.add(LOG, [row(0)])
    history.add(Log(name="lanl", form="counts", devices=1.0), [])
    with pytest.raises(HistoryError, match=r"no log 'sit' .* it holds lanl, site; did you mean 'site'\?"):
        read_summary(path, "sit")
    with pytest.raises(HistoryError, match="'lanl' has no failures with times"):
        read_gaps(path, "lanl")
    with pytest.raises(HistoryError, match="'site' has no exposure"):
        read_prior(path, "site", 1.0)


def test_files_that_are_no_history_are_left_alone(tmp_path):
    garbage, other, newer = tmp_path / "garbage", tmp_path / "other.db", tmp_path / "newer.db"
    garbage.write_bytes(b"not a database, and long enough to be taken for one " * 100)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE precious (x)")
    History.open(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version=99")
    for path, said in ((garbage, "cannot be used"), (other, "another SQLite file"), (newer, "by a newer ckptd")):
        before = path.read_bytes()
        with pytest.raises(HistoryError, match=said):
            History.open(path)
        assert path.read_bytes() == before
    with pytest.raises(HistoryError, match="cannot be used: "):
        History.open(garbage / "below.db")


def test_an_import_that_is_killed_leaves_all_or_nothing(path):
    """Many rows in a transaction that a kill -9 of their process cuts off."""
    with History.open(path) as history:
        history.add(LOG, [row(0)])
    code = f"""
import os, signal
from ckptd.core.sitelog import Log, Row
from ckptd.history import History
class Deadly(list):
    def __iter__(self):
        for i in range(1000):
            yield Row(digest=str(i), kind="failure", at=float(i))
        os.kill(os.getpid(), signal.SIGKILL)
history = History.open({str(path)!r})
log = Log(name="site", form="events", devices=10.0)
with history._transaction():
    history._db["rows"].insert_all(dict(
        log="site", digest=r.digest, kind=r.kind, at=r.at, count=1, job="", cause="", severity="", node="", source="", line=0,
    ) for r in Deadly())
"""
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, timeout=60, capture_output=True)
    assert ended.returncode == -9, ended.stderr
    with History.open(path) as history:
        assert len(history.rows("site")) == 1


def test_one_that_writes_waits_for_another(path):
    """Two processes import the same rows into a file that neither of them finds there."""
    code = f"""
from ckptd.core.sitelog import Log, Row
from ckptd.history import History
with History.open({str(path)!r}) as history:
    added = history.add(Log(name="l", form="events", devices=1.0),
                        [Row(digest=str(i), kind="failure", at=float(i)) for i in range(500)])
print(added.new)
"""
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        told = [process.communicate(timeout=60)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert sorted(int(text) for text in told) == [0, 500]
