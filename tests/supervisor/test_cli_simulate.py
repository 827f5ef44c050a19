"""`ckptd simulate` as a user meets it."""

import json
import xml.etree.ElementTree as ET

import pytest

from ckptd import cli

SHORT = ["simulate", "--days", "5", "--seeds", "2", "--stall", "1m"]


def run(capsys, *words):
    status = cli.main([*SHORT, *words])
    return status, capsys.readouterr()


def test_policies_stand_side_by_side(capsys):
    status, said = run(capsys, "--failures", "40", "--vendor-mtbf", "10d", "--json")
    assert status == 0
    document = json.loads(said.out)
    assert document["mtbf_s"] == pytest.approx(5 * 86_400 / 40)
    assert {policy["name"] for policy in document["policies"]} == {"ckptd", "oracle", "best fixed", "fixed", "vendor"}
    status, said = run(capsys, "--failures", "40", "--vendor-mtbf", "10d")
    assert status == 0
    assert "as it learns" in said.out
    assert "regret" in said.out


@pytest.mark.parametrize("name", ["w.svg", "w.html"])
def test_curves_are_drawn(capsys, tmp_path, name):
    status, _ = run(capsys, "--mtbf", "3h", "--surge", "5:6h:1d", "--curve", str(tmp_path / name))
    assert status == 0
    text = (tmp_path / name).read_text()
    start = text.index("<svg")
    assert ET.fromstring(text[start : text.index("</svg>") + 6]).tag.endswith("svg")
    assert "simulated" in text
    assert name.endswith("svg") == (start == 0)


def test_a_log_is_replayed(capsys, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("time,kind\n" + "".join(f"2024-01-{day:02d} 06:30:00,failure\n" for day in range(1, 21)))
    status, said = run(capsys, "--log", str(log), "--time-zone", "UTC", "--json")
    assert status == 0
    document = json.loads(said.out)
    assert (document["reference"], document["days"]) == ("best fixed", pytest.approx(19))
    assert document["failures_per_run"] == 19  # the first opens the log


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing says how often"),
        (["--failures", "3", "--mtbf", "1h"], "more than once"),
        (["--mtbf", "1h", "--surge", "lots"], "--surge lots"),
        (["--mtbf", "1h", "--surge", "5:2d:1x"], "FACTOR:LENGTH"),
        (["--mtbf", "1h", "--surge", "5:2d", "--shape", "0.7"], "give one of them"),
        (["--mtbf", "1ms"], "too much to simulate"),
        (["--mtbf", "1h", "--surge", "1e5:2d"], "too much to simulate"),
        (["--log", "/nowhere/at-all"], "no"),
        (["--mtbf", "1h", "--curve", "/nowhere/w.svg"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(capsys, words, told, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    status, said = run(capsys, *words)
    assert status == 64
    assert told in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
