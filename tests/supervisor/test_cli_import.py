"""`ckptd import`: what a user sees of it."""

import io
import json
import sys

import pytest

from ckptd import cli

EVENTS = """time,kind,cause,relaunch
2026-03-01 00:00,start,,
2026-03-02 00:00,failure,gpu,2026-03-02 01:00
2026-03-02 00:02,failure,gpu,
2026-03-04 00:00,failure,nic,2026-03-03 23:00
2026-03-05 00:00,maintenance,,
2026-03-99 00:00,failure,gpu,
2026-03-11 00:00,failure,nic,2026-03-11 03:00
"""
JOBS = """JobID|State|Start|End|Elapsed|NNodes
1|NODE_FAIL|2026-03-01T00:00:00|2026-03-02T00:00:00|1-00:00:00|2
1.batch|FAILED|2026-03-01T00:00:00|2026-03-02T00:00:00|1-00:00:00|2
2|RUNNING|2026-03-02T00:00:00|Unknown|1-00:00:00|4
3|FOO|2026-03-02T00:00:00|2026-03-03T00:00:00|1-00:00:00|4
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "site.csv").write_text(EVENTS)
    (tmp_path / "jobs.txt").write_text(JOBS)
    return tmp_path


def imported(capsys, *words):
    assert cli.main(["import", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_events(here, capsys):
    assert cli.main(["import", "site.csv", "--time-zone", "UTC", "--devices", "100", "--for-devices", "400"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[:2] == [
        "site.csv: 7 rows, 6 new, 0 replaced, 0 already there",
        "  1 left out, as they cannot be right:",
    ]
    assert lines[2].startswith("    line 7: '2026-03-99 00:00' is not a time: day ")
    assert lines[3:11] == [
        "  1 taken with a remark:",
        "    line 5: goes on 3600 s before it happens; how long it was down is not known",
        "log site: 6 rows",
        "  events     3 failures, 1 planned stops, 1 other, 1 rows of the same events",
        "  by cause   nic 2, gpu 1",
        "  exposure   24000 device-hours: 10 d",
        "  down       2 h, median of 2 that are known",
        "  rate       0.000125 per device-hour",
    ]
    assert lines[11].startswith("  M          3.33 d on 100 devices (90 %: ")
    assert lines[12].startswith("  M for you  20 h on 400 devices (90 %: ")
    assert len(lines) == 13
    assert (here / "state" / "ckptd" / "history.db").exists()


def test_json(capsys):
    found = imported(capsys, "site.csv", "--time-zone", "UTC", "--devices", "100", "--for-devices", "50")
    assert found["rows"]["new"] == 6
    assert [item["line"] for item in found["rows"]["left_out"]] == [7]
    assert found["events"]["failures"] == found["events"]["counted_in_rate"] == 3
    assert found["exposure"]["device_hours"] == 24_000
    assert found["rate_per_device_hour"] == pytest.approx(3 / 24_000)
    own, scaled = found["mtbf"]["own"], found["mtbf"]["for"]
    assert (own["devices"], scaled["devices"]) == (100.0, 50.0)
    assert scaled["mtbf_s"] == pytest.approx(2 * own["mtbf_s"])
    assert own["low_s"] < own["mtbf_s"] < own["high_s"]


def test_importing_twice_adds_nothing(capsys):
    words = ["site.csv", "--time-zone", "UTC", "--devices", "100"]
    first = imported(capsys, *words)
    second = imported(capsys, *words)
    assert (second["rows"]["new"], second["rows"]["already_there"]) == (0, 6)
    assert {key: second[key] for key in ("events", "exposure", "mtbf")} == {
        key: first[key] for key in ("events", "exposure", "mtbf")
    }


def test_a_zone_that_was_wrong_is_put_right(capsys):
    first = imported(capsys, "site.csv", "--time-zone", "UTC", "--devices", "100")
    second = imported(capsys, "site.csv", "--time-zone", "+08:00", "--devices", "100")
    assert second["rows"]["replaced"] == 6
    assert second["first_at"] == first["first_at"] - 8 * 3600
    assert second["events"] == first["events"]


def test_jobs(here, capsys):
    words = ["jobs.txt", "--time-zone", "Europe/Berlin", "--devices-per-node", "8"]
    found = imported(capsys, *words)
    assert found["form"] == "jobs"
    assert found["events"]["failures"] == 1
    assert found["events"]["running"] == 1
    assert found["events"]["by_cause"] == {"node_fail": 1}
    assert found["exposure"]["device_hours"] == 24 * 16 + 24 * 32
    assert found["exposure"]["running_hours"] == 24
    assert found["mtbf"]["own"]["devices"] == 24
    assert found["rows"]["passed_over"] == {"steps of jobs": 1}
    assert [item["line"] for item in found["rows"]["left_out"]] == [5]
    ended = JOBS.replace("RUNNING", "FAILED").replace("Unknown|1-00", "2026-03-04T00:00:00|2-00")
    (here / "jobs.txt").write_text(ended)
    later = imported(capsys, *words)
    assert (later["rows"]["replaced"], later["events"]["failures"], later["events"]["running"]) == (1, 2, 0)
    assert later["exposure"]["device_hours"] == 24 * 16 + 48 * 32


def test_counts(here, capsys):
    (here / "llama.csv").write_text("cause,count\nfaulty GPU,148\neverything else,271\n")
    assert cli.main(["import", "llama.csv", "--devices", "16384"]) == 64
    assert "say with --days, or with --from and --to" in capsys.readouterr().err
    found = imported(capsys, "llama.csv", "--devices", "16384", "--days", "54")
    assert found["mtbf"]["own"]["mtbf_s"] == pytest.approx(11_135.1, abs=0.05)
    spelt = ["--time-zone", "UTC", "--from", "2026-01-01", "--to", "2026-02-24"]
    assert imported(capsys, "llama.csv", "--name", "x", "--devices", "16384", *spelt)["mtbf"] == found["mtbf"]


def test_a_dry_run_keeps_nothing(here, capsys):
    found = imported(capsys, "site.csv", "--time-zone", "UTC", "--devices", "100", "--dry-run")
    assert found["events"]["failures"] == 3
    assert not (here / "state").exists()


def test_pieces_from_standard_input_under_one_name(here, capsys, monkeypatch):
    lines = EVENTS.splitlines(keepends=True)
    for piece in (lines[:4], [lines[0], *lines[4:]]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(piece).encode())))
        words = ["-", "--name", "site", "--time-zone", "UTC", "--devices", "100", "--history", "h.db"]
        found = imported(capsys, *words)
    assert (found["events"]["failures"], found["history"]) == (3, str(here / "h.db"))
    assert cli.main(["import", "-"]) == 64
    assert "give one with --name" in capsys.readouterr().err


def test_the_exposure_that_is_asked_for(capsys):
    words = ["site.csv", "--time-zone", "UTC", "--devices", "100", "--from", "2026-03-03", "--to", "2026-03-23 00:00"]
    found = imported(capsys, *words)
    assert (found["events"]["failures"], found["events"]["outside_exposure"]) == (2, 1)
    assert found["exposure"]["wall_hours"] == 20 * 24


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\n"])
def test_nothing_in_a_file_is_no_error(here, content, capsys):
    (here / "empty.txt").write_bytes(content)
    assert cli.main(["import", "empty.txt"]) == 0
    assert "empty.txt is empty: nothing to import" in capsys.readouterr().err


@pytest.mark.parametrize("header", [JOBS.splitlines()[0], "time,cause,gpus"])
def test_a_header_alone_is_no_error(here, header, capsys):
    (here / "header.txt").write_text(header + "\n")
    found = imported(capsys, "header.txt", "--time-zone", "UTC", "--devices", "8")
    assert (found["rows"]["read"], found["rate_per_device_hour"]) == (0, None)


def test_bytes_that_are_no_text(here, capsys):
    (here / "odd.csv").write_bytes(b"time,cause,gpus\n2026-03-01 10:00,a\xffb\x1b[31m,8\n2026-03-02 10:00,c,8\n")
    assert cli.main(["import", "odd.csv", "--time-zone", "UTC"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "2 failures" in out
    for content, said in ((b"a\0b", "zero bytes"), (b"\xff\xfea\0", "UTF-16")):
        (here / "bin.csv").write_bytes(content)
        assert cli.main(["import", "bin.csv"]) == 64
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing.csv", "nothing.csv cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("site.csv --devices 8", "has no zone; name it with --time-zone"),
        ("site.csv --time-zone UTC", "does not say how many devices"),
        ("site.csv --devices 8 --time-zone CEST", "'CEST' is not a time zone"),
        ("site.csv --devices 0 --time-zone UTC", "not a number above zero"),
        ("site.csv --devices 8 --time-zone UTC --time-column tim", "did you mean 'time'"),
        ("site.csv --devices 8 --time-zone UTC --time-format %H:%M", "--time-format: '%H:%M' does not give day"),
        ("site.csv --devices 8 --time-zone UTC --only x", "write COLUMN=VALUE"),
        ("site.csv --devices 8 --time-zone UTC --name ../x", "cannot be a name"),
        ("site.csv --devices 8 --time-zone UTC --days 3", "--days is for rows without times"),
        ("site.csv --devices 8 --time-zone UTC --from 2026-03-05 --to 2026-03-04", "--to is not after --from"),
        ("site.csv --devices 8 --time-zone UTC --to soon", "--to: 'soon' is not a time"),
        ("site.csv --devices 8 --failures-are a,b --planned-are B", "b cannot be failures and planned as well"),
        ("site.csv --devices 8 --time-zone UTC --history .", "--history"),
        ("site.csv --devices 8 --time-zone UTC --history site.csv/h.db", "cannot be used"),
        ("site.csv --devices 8 --time-zone UTC --history jobs.txt", "is not a database; name another with --history"),
        ("jobs.txt --devices 8 --time-zone UTC --from 2026-03-05", "--from is for a log of events"),
        ("jobs.txt --time-zone UTC", "how many devices each job had"),
        ("prose.txt", "is neither a CSV nor of `sacct -P`: it begins with 'Slurm accounting storage is disabled'"),
    ],
)
def test_what_cannot_be_imported(here, words, said, capsys):
    (here / "prose.txt").write_text("Slurm accounting storage is disabled\n")
    assert cli.main(["import", *words.split()]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert (here / "jobs.txt").read_text() == JOBS


def test_another_form_under_the_same_name(capsys):
    imported(capsys, "site.csv", "--time-zone", "UTC", "--devices", "100")
    words = ["import", "jobs.txt", "--time-zone", "UTC", "--devices-per-node", "8", "--name", "site"]
    assert cli.main(words) == 64
    assert "holds events, and these are jobs" in capsys.readouterr().err
    assert cli.main([*words, "--replace"]) == 0
