"""`ckptd report`: one file that needs no other, whatever the job has written; and answers to what-if."""

from __future__ import annotations

import json
import re

import pytest
from made_up_run import MadeUpRun

from ckptd import cli
from ckptd.core import events as ev
from ckptd.errors import ExitStatus, UsageError
from ckptd.ledger import Ledger
from ckptd.report import parse_what_if
from ckptd.rundir import RunDir

NASTY = "</script><script>alert(1)</script><!-- \x1b[31mred\x1b[0m"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run that is over, with a culprit whose log would break a page that trusts it."""
    run = MadeUpRun(nodes=1, devices=2, mtbf_s=900.0, stall_s=4.0, upload_s=5.0, name="nasty").interrupted_times(6)
    run.happen(ev.Interrupted(t=run.t, attempt=run.attempt, rank=1, cause="exception", detail=NASTY, message=NASTY))
    directory = RunDir(tmp_path_factory.mktemp("runs") / "run")
    directory.create()
    with Ledger.open(directory.ledger_path) as ledger:
        ledger.append_many(run.events)
    log = directory.make_attempt_dir(run.attempt) / "rank1.err"
    log.write_text("x" * 100_000 + "\nlast words of the culprit\n")
    return directory


def ckptd(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_the_file_is_named_after_the_run_and_needs_no_other(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = ckptd(capsys, "report", run_dir.path)
    assert (status, out) == (0, "")
    assert f"wrote {tmp_path}/nasty-report.html" in err
    page = (tmp_path / "nasty-report.html").read_text()
    own = page.replace(re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0], "")  # without plotly
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", own)
    assert "http://" not in own.replace("http://www.w3.org", "")
    assert "https://" not in own


def test_what_a_job_wrote_ends_no_element(run_dir, tmp_path, capsys):
    assert ckptd(capsys, "report", run_dir.path, "-o", tmp_path / "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert(1)" not in page
    (embedded,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
    newest = json.loads(embedded)["interruptions"][0]
    assert newest["detail"] == NASTY
    assert newest["log"]["text"].endswith("last words of the culprit")
    assert len(newest["log"]["text"]) <= 2000
    assert newest["log"]["path"].endswith("rank1.err")


def test_what_if_is_answered_everywhere(run_dir, tmp_path, capsys):
    questions = ("--what-if", "restart=2m,stall=5s", "--what-if", "interval=90")
    _, out, _ = ckptd(capsys, "report", run_dir.path, "--json", *questions)
    told = json.loads(out)["what_if"]
    assert [row["asked"] for row in told[2:]] == [{"restart": 120.0, "stall": 5.0}, {"interval": 90.0}]
    assert told[3]["interval_s"] == 90.0
    _, out, _ = ckptd(capsys, "report", run_dir.path, "--text", *questions)
    assert re.search(r"restart 2 min, stall 5 s +interval .* goodput +\d", out)
    assert ckptd(capsys, "report", run_dir.path, "-o", tmp_path / "r.html", *questions)[0] == 0
    assert '"asked":{"restart":120.0,"stall":5.0}' in (tmp_path / "r.html").read_text()


def test_words_and_json_go_to_standard_output(run_dir, capsys):
    status, out, err = ckptd(capsys, "report", run_dir.path, "--text")
    assert (status, err) == (0, "")
    assert "goodput" in out.splitlines()[0]
    assert "\x1b" not in out
    status, out, _ = ckptd(capsys, "report", run_dir.path, "--json")
    assert json.loads(out).keys() >= {
        "name",
        "goodput",
        "ettr",
        "attempts",
        "interruptions",
        "restarts",
        "saves",
        "waste",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("restart", "restart=DURATION"),
        ("speed=2", "'speed=2' is none of"),
        ("restart=fast", "is not a duration"),
        ("stall=5s,stall=6s", "given twice"),
        ("interval=0", "no time to train"),
        ("restart=-5", "is not a duration"),
        ("", "is none of"),
    ],
)
def test_a_question_that_cannot_be_asked(text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_what_if(text)


def test_wrong_usage_is_said(run_dir, tmp_path, capsys):
    for arguments, said in (
        (("--json", "--text"), "exclude each other"),
        (("--what-if", "R=2"), "none of restart=DURATION"),
        (("-o", tmp_path / "no" / "such" / "r.html"), "cannot be written: No such file"),
        (("-o", tmp_path), "cannot be written"),
    ):
        status, out, err = ckptd(capsys, "report", run_dir.path, *arguments)
        assert (status, out) == (ExitStatus.USAGE, "")
        assert said in err
        assert "Traceback" not in err
