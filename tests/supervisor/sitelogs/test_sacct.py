"""What sacct prints, and what becomes of it."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from ckptd.errors import UsageError
from ckptd.sitelogs import sacct
from ckptd.sitelogs.reading import Options
from ckptd.sitelogs.times import NoZone

HEADER = "JobID|JobName|State|Start|End|Elapsed|NNodes"


def read(*rows, header=HEADER, **options):
    options = {"source": "jobs.txt", "zone": UTC, "devices_per_node": 8.0} | options
    return sacct.read("\n".join([header, *rows]) + "\n", Options(**options))


def job(
    number, state, start="2026-03-01T00:00:00", end="2026-03-01T02:00:00", elapsed="02:00:00", nodes=2, name="train"
):
    return f"{number}|{name}|{state}|{start}|{end}|{elapsed}|{nodes}"


def lines(remarks):
    return [remark.line for remark in remarks]


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("FAILED", "failure"), ("NODE_FAIL", "failure"), ("OUT_OF_MEMORY", "failure"), ("REQUEUED", "failure"),
        ("COMPLETED", "completed"), ("CANCELLED by 90001", "planned"), ("CANCELLED+", "planned"), ("TIMEOUT", "planned"),
        ("PREEMPTED", "planned"), ("RUNNING", "running"), ("BOOT_FAIL", "launch"),
    ],
)  # fmt: skip
def test_states(state, kind):
    (row,) = read(job(1, state)).rows
    assert row.kind == kind
    assert (row.span_s, row.devices) == (7200.0, 16.0)
    assert row.at == datetime(2026, 3, 1, 2, tzinfo=UTC).timestamp()


def test_severity_is_what_the_state_shows():
    found = read(job(1, "NODE_FAIL"), job(2, "FAILED"), job(3, "COMPLETED"))
    assert [row.severity for row in found.rows] == ["node", "process", ""]


def test_a_state_that_nobody_knows_is_left_out_and_can_be_explained():
    found = read(job(1, "FOO"), job(2, "FAILED"))
    assert lines(found.left_out) == [2]
    assert "'FOO' is not known; --failures-are or --planned-are" in found.left_out[0].what
    told = read(job(1, "FOO"), job(2, "FAILED"), failure_words=frozenset({"foo"}), planned_words=frozenset({"failed"}))
    assert [row.kind for row in told.rows] == ["failure", "planned"]


def test_steps_and_jobs_that_never_started_are_passed_over():
    found = read(
        job(1, "FAILED"),
        job("1.batch", "FAILED"),
        job("1.0", "CANCELLED"),
        job("2", "PENDING", "Unknown", "Unknown", "00:00:00"),
        job("3_[3-9%2]", "PENDING", "Unknown", "Unknown", "00:00:00"),
        job("4", "CANCELLED by 5", "None", "2026-03-01T00:00:00", "00:00:00"),
    )
    assert [row.job for row in found.rows] == ["1"]
    assert found.passed_over == {"steps of jobs": 2, "jobs that never started": 3}
    assert not found.left_out
    assert found.read == 6


def test_a_requeue_is_one_interruption_of_one_job():
    found = read(
        job(7, "REQUEUED"),
        job(7, "COMPLETED", "2026-03-01T02:05:00", "2026-03-01T04:05:00"),
        job("8+0", "FAILED"),
        job("8+1", "FAILED"),
        job("9_1", "FAILED"),
        job("9_2", "FAILED"),
    )
    assert [(row.job, row.kind) for row in found.rows][:4] == [
        ("7", "failure"), ("7", "completed"), ("8", "failure"), ("8", "failure"),
    ]  # fmt: skip
    assert [row.job for row in found.rows][4:] == ["9_1", "9_2"]


def test_running_jobs_bring_the_time_so_far():
    running = job(1, "RUNNING", end="Unknown", elapsed="2-03:04:05")
    assert read(running).rows[0].span_s == 183_845.0
    header = "JobID|State|Start|End|NNodes"
    bare = "1|RUNNING|2026-03-01T00:00:00|Unknown|2"
    refused = read(bare, header=header)
    assert "it is running, and there is no column Elapsed; --to says until when" in refused.left_out[0].what
    told = read(bare, header=header, to_at=datetime(2026, 3, 1, 3, tzinfo=UTC).timestamp())
    assert told.rows[0].span_s == 10_800.0


def test_a_job_that_was_running_and_has_ended_is_the_same_row():
    before = read(job(1, "RUNNING", end="Unknown")).rows[0]
    after = read(job(1, "FAILED")).rows[0]
    again = read(job(1, "FAILED", "2026-03-01T05:00:00", "2026-03-01T07:00:00")).rows[0]
    assert before.digest == after.digest != again.digest


def test_elapsed_is_right_where_the_clocks_were_changed():
    night = job(1, "COMPLETED", "2026-03-29T01:30:00", "2026-03-29T03:10:00", "00:40:00")
    berlin = read(night, zone=ZoneInfo("Europe/Berlin"))
    assert (berlin.rows[0].span_s, berlin.notes) == (2400.0, [])
    utc = read(night)
    assert (utc.rows[0].span_s, lines(utc.notes)) == (2400.0, [2])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (job(1, "FAILED", end="2026-02-28T00:00:00"), "ends before it starts"),
        (job(1, "FAILED", elapsed="05:00:00"), "is the zone right?"),
        (job(1, "FAILED", end="Unknown", elapsed=""), "neither End nor Elapsed"),
        (job(1, "FAILED", start="yesterday"), "'yesterday' is not a time"),
        (job("total", "FAILED"), "'total' is not the number of a job"),
        ("1|train|FAI", "the row is cut off: 3 cells, the header has 7"),
        (job(1, "FAILED") + "|x|y", "the row is too long: 9 cells, the header has 7"),
        (job(1, ""), "state '' is not known"),
        (job(1, "FAILED", "2099-01-01T00:00:00", "2099-01-01T02:00:00"), "ends in the future"),
    ],
)
def test_rows_that_cannot_be_right(row, said):
    found = read(row, job(2, "COMPLETED"), now=datetime(2026, 4, 1, tzinfo=UTC).timestamp())
    assert lines(found.left_out) == [2]
    assert said in found.left_out[0].what
    assert [row.job for row in found.rows] == ["2"]


def test_a_name_may_hold_the_delimiter_or_a_line_break():
    found = read(job(1, "FAILED", name="cra|zy|one"), job(2, "FAILED", name="two\nlines"), job(3, "COMPLETED"))
    assert [(row.job, row.line) for row in found.rows] == [("1", 2), ("2", 3), ("3", 5)]
    assert not found.left_out


def test_a_row_that_is_cut_off_does_not_take_the_next_one_along():
    found = read("1|train|FAILED|2026-03", job(2, "FAILED"))
    assert lines(found.left_out) == [2]
    assert [row.job for row in found.rows] == ["2"]


def test_other_delimiters():
    hashed = sacct.read(
        "JobID|#State|#Start|#End|#NNodes|#SubmitLine\n"
        "1|#FAILED|#2026-03-01T00:00:00|#2026-03-01T01:00:00|#2|#a || b\n  || c\n"
        "2|#COMPLETED|#2026-03-01T00:00:00|#2026-03-01T01:00:00|#2|#x\n",
        Options(source="j", zone=UTC, devices_per_node=1.0),
    )
    assert [row.kind for row in hashed.rows] == ["failure", "completed"]
    trailing = read(job(1, "FAILED") + "|", header=HEADER + "|")
    assert len(trailing.rows) == 1


def test_devices_have_to_be_known():
    with pytest.raises(UsageError, match=r"how many devices each job had; give --devices-per-node .* AllocTRES"):
        read(job(1, "FAILED"), devices_per_node=None)
    with pytest.raises(UsageError, match="needs a column NNodes"):
        read("1|FAILED", header="JobID|State")
    assert read(job(1, "FAILED"), devices=5.0, devices_per_node=None).rows[0].devices == 5.0
    tres = read(
        "1|FAILED|2026-03-01T00:00:00|2026-03-01T01:00:00|billing=2,cpu=2,gres/gpu=32,gres/gpu:h100=32,node=4",
        "2|FAILED|2026-03-01T00:00:00|2026-03-01T01:00:00|billing=2,cpu=2,node=4",
        header="JobID|State|Start|End|AllocTRES",
        devices_per_node=None,
    )
    assert [row.devices for row in tres.rows] == [32.0]
    assert tres.passed_over == {"jobs without a device": 1}


def test_no_zone_no_import():
    with pytest.raises(NoZone, match="--time-zone"):
        read(job(1, "FAILED"), zone=None)
    assert read(job(1, "FAILED", "1772323200", "1772330400"), zone=None).rows[0].span_s == 7200.0


def test_without_times_nothing_is_learnt():
    found = read("1|a|COMPLETED", "1.batch|b|COMPLETED", header="JobID|JobName|State", devices=1.0)
    assert not found.rows
    assert "there is no column Start; export it with sacct -P" in found.left_out[0].what


def test_what_is_not_of_sacct_p():
    with pytest.raises(UsageError, match=r"is not of `sacct -P`: its columns have no delimiter"):
        read(header="JobID           JobName      State")
    assert not sacct.looks_like("1|COMPLETED|0:0")
    assert not sacct.looks_like("time,cause")


def test_only():
    found = read(job(1, "FAILED"), job(2, "FAILED", name="other"), only=(("jobname", "train"),))
    assert [row.job for row in found.rows] == ["1"]
    with pytest.raises(UsageError, match="no column 'user'"):
        read(job(1, "FAILED"), only=(("User", "x"),))
