"""`ckptd plan`."""

import json
import xml.etree.ElementTree as ET

import pytest

from ckptd import cli
from ckptd.core.sitelog import Log, Row
from ckptd.history import History


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


LLAMA = ["plan", "--failures", "419", "--days", "54", "--stall", "1m", "--restart", "10m"]


def document(capsys, *words):
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_worked_example(capsys):
    assert cli.main(LLAMA) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("M  3.09 h (90 %: ")
    (young,) = [line.split() for line in lines if line.startswith("young ") and "min" in line]
    (fixed,) = [line.split() for line in lines if line.startswith("fixed ")]
    assert young == ["young", "19.27", "min", "15.77%", "5.19%", "5.19%", "5.39%"]
    assert fixed[3] == "23.22%"
    assert err == ""


def test_json(capsys):
    found = document(capsys, *LLAMA, "--devices", "16384", "--interval", "2h")
    assert found["mtbf_s"] == pytest.approx(11_135.1, abs=0.05)
    assert found["rate_per_device_hour"] == pytest.approx(419 / (54 * 24 * 16_384))
    assert [entry["formula"] for entry in found["intervals"]] == ["young", "daly", "exact", "fixed"]
    assert found["intervals"][3]["interval_s"] == 7200.0
    for entry in found["intervals"]:
        w = entry["waste"]
        assert w["total"] == pytest.approx(w["save"] + w["rework"] + w["restart"])


def test_three_ways_to_say_m(capsys):
    by_rate = document(capsys, "plan", "--devices", "1000", "--rate", "1e-4", "--stall", "5")
    by_mtbf = document(capsys, "plan", "--mtbf", "10h", "--stall", "5s")
    by_count = document(capsys, "plan", "--failures", "24", "--days", "10", "--stall", "5s")
    assert by_rate["mtbf_s"] == pytest.approx(36_000)
    assert by_mtbf["mtbf_s"] == by_count["mtbf_s"] == 36_000
    assert by_mtbf["mtbf_low_s"] is None
    assert by_count["mtbf_low_s"] < 36_000 < by_count["mtbf_high_s"]


def test_an_upload_bounds_the_interval(capsys):
    assert cli.main([*LLAMA, "--upload", "30m"]) == 0
    assert "young: 19.27 min by the formula; no save begins before" in capsys.readouterr().out


def test_a_job_that_gets_nowhere_is_told(capsys):
    assert cli.main(["plan", "--mtbf", "1m", "--stall", "1m", "--restart", "2m"]) == 0
    assert "gets nowhere" in capsys.readouterr().err


def test_the_curve(capsys, tmp_path):
    path = tmp_path / "waste.svg"
    assert cli.main([*LLAMA, "--curve", str(path)]) == 0
    root = ET.fromstring(path.read_text())
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"waste", "save", "rework", "restart", "fixed 1h", "young 19.3m"} <= words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 4
    assert cli.main([*LLAMA, "--curve", str(tmp_path / "no" / "waste.svg")]) == 64
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_a_log_that_was_imported(capsys):
    with History.open() as history:
        rows = [Row(digest=str(hour), kind="failure", at=hour * 3600.0) for hour in (10, 20, 40)]
        history.add(Log(name="site", form="events", devices=1000.0, from_at=0.0), rows)
        history.add(Log(name="quiet", form="events", devices=8.0, from_at=0.0, to_at=9.0), [])
    own = document(capsys, "plan", "--log", "site", "--stall", "5")
    mine = document(capsys, "plan", "--log", "site", "--stall", "5", "--devices", "250")
    assert (own["devices"], own["mtbf_s"]) == (1000, pytest.approx(48_000))
    assert (mine["devices"], mine["mtbf_s"]) == (250, pytest.approx(192_000))
    assert mine["mtbf_low_s"] < mine["mtbf_s"] < mine["mtbf_high_s"]
    assert cli.main(["plan", "--stall", "5", "--log", "quiet"]) == 64
    assert "'quiet' gives no M" in capsys.readouterr().err
    assert cli.main(["plan", "--stall", "5", "--log", "sote"]) == 64
    assert "did you mean 'site'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mtbf 3h", "Missing option '--stall'"),
        ("--stall 1m", "nothing says how often the job fails"),
        ("--stall 1m --mtbf 3h --rate 1", "say it more than once"),
        ("--stall 1m --failures 3", "--failures and --days need each other"),
        ("--stall 1m --days 3", "--failures and --days need each other"),
        ("--stall 1m --failures 0 --days 3", "no failure in 3 days gives no M"),
        ("--stall 1m --failures -1 --days 3", "-1"),
        ("--stall 1m --failures 1 --days nan", "not a number above zero"),
        ("--stall 1m --failures 1 --days 1e300", "check the units"),
        ("--stall 1m --rate 1e-5", "--devices"),
        ("--stall 1m --log site --mtbf 3h", "leave --failures, --days, --rate and --mtbf out"),
        ("--stall 1m --log site", "nothing was imported yet"),
        ("--stall 1m --devices 8", "nothing says how often"),
        ("--stall 1m --devices 0 --rate 1e-5", "--devices"),
        ("--stall 1m --devices 8 --rate 0", "not a number above zero"),
        ("--stall 1m --devices 8 --rate 1e300", "check the units"),
        ("--stall 0 --mtbf 1h", "longer than nothing"),
        ("--stall 1:30 --mtbf 1h", "could mean hours or minutes"),
        ("--stall -5 --mtbf 1h", "negative"),
        ("--stall 1m --mtbf 1e9999", "longer than a century"),
        ("--stall 1m --mtbf 1h --interval 0s", "longer than nothing"),
        ("--stall 1m --mtbf 1h --restart soon", "'soon' is not a duration"),
    ],
)
def test_bad_input(words, said, capsys):
    assert cli.main(["plan", *words.split()]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err
