"""CSV files of interruptions, clean and dirty."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from ckptd.errors import UsageError
from ckptd.sitelogs import events_csv
from ckptd.sitelogs.reading import Options
from ckptd.sitelogs.times import NoZone


def read(text, **options):
    return events_csv.read(text, Options(**({"source": "log.csv", "zone": UTC, "devices": 8.0} | options)))


def utc(*parts):
    return datetime(*parts, tzinfo=UTC).timestamp()


def lines(remarks):
    return [remark.line for remark in remarks]


def test_columns_are_found_by_their_names():
    found = read(
        "Event Time;Kind;Root Cause;Severity;Host;GPUs\n"
        "2026-03-01 10:00;start;;;;64\n"
        "2026-03-02 10:00;failure;NIC;node;n1;64\n"
        "2026-03-03 10:00;Maintenance;;;;32\n",
        devices=None,
    )
    assert found.form == "events"
    assert [row.kind for row in found.rows] == ["start", "failure", "planned"]
    failure = found.rows[1]
    assert (failure.at, failure.cause, failure.severity, failure.node) == (utc(2026, 3, 2, 10), "nic", "node", "n1")
    assert [row.devices for row in found.rows] == [64.0, 64.0, 32.0]
    assert failure.line == 3
    assert not found.left_out


def test_columns_that_are_named():
    found = read(
        "a,b,c\n2026-03-01 10:00,x,failed\n",
        columns={"time": ("A",), "cause": ("b",), "kind": ("c",)},
    )
    assert (found.rows[0].cause, found.rows[0].kind) == ("x", "failure")
    with pytest.raises(UsageError, match=r"log.csv has no column 'tine' to take the time from; did you mean 'time'"):
        read("time,b\n", columns={"time": ("tine",)})


def test_the_filled_one_of_several_columns_is_the_cause():
    text = "time,GPU,Network\n2026-03-01 10:00,,cable\n2026-03-02 10:00,HBM,\n2026-03-03 10:00,,\n"
    found = read(text, columns={"cause": ("GPU", "Network")})
    assert [row.cause for row in found.rows] == ["network", "gpu", ""]


def test_without_kinds_every_row_is_a_failure():
    assert [row.kind for row in read("time\n2026-03-01 10:00\n").rows] == ["failure"]


def test_a_kind_that_nobody_knows_is_left_out_and_can_be_explained():
    text = "time,kind\n2026-03-01 10:00,failure\n2026-03-02 10:00,kaputt\n2026-03-03 10:00,failure\n"
    found = read(text)
    assert lines(found.left_out) == [3]
    assert "'kaputt' is not known; --failures-are" in found.left_out[0].what
    assert [row.kind for row in read(text, failure_words=frozenset({"kaputt"})).rows] == ["failure"] * 3
    assert [row.kind for row in read(text, planned_words=frozenset({"failure", "kaputt"})).rows] == ["planned"] * 3


def test_dirty_rows_are_named_with_their_lines_and_left_out():
    found = read(
        "time,cause\n"
        "2026-03-01 10:00,a\n"
        "not a time,b\n"
        "2026-03-02 10:00\n"
        '2026-03-03 10:00,"c\nc"\n'
        "\n"
        "2026-02-31 10:00,d\n"
        "2099-01-01 10:00,e\n"
        "2026-03-04 10:00,f\n",
        now=utc(2026, 4, 1),
    )
    assert [row.line for row in found.rows] == [2, 5, 10]
    said = {remark.line: remark.what for remark in found.left_out}
    assert set(said) == {3, 4, 8, 9}
    assert said[3] == "'not a time' is not a time"
    assert said[4] == "the row has 1 cells, the header 2"
    assert "'2026-02-31 10:00' is not a time" in said[8]
    assert said[9] == "2099-01-01 10:00 lies in the future"
    assert found.read == 7


def test_the_same_row_again_counts_once():
    found = read("time,node\n2026-03-01 10:00,n1\n2026-03-01 10:00,n1\n2026-03-01 10:00,n2\n")
    assert [row.node for row in found.rows] == ["n1", "n2"]
    assert lines(found.notes) == [3]


def test_two_zones_in_one_file():
    text = "event_local_utc8,relaunch_utc\n2026-03-01 08:00,2026-03-01 01:30\n"
    (row,) = read(text, zone=None).rows
    assert (row.at, row.down_s) == (utc(2026, 3, 1), 5400.0)
    named = "a,b\n2026-03-01 08:00,2026-03-01 01:30\n"
    (row,) = read(named, zone=timezone(timedelta(hours=8)), end_zone=UTC, columns={"time": ("a",), "end": ("b",)}).rows
    assert row.down_s == 5400.0


def test_no_zone_no_import():
    with pytest.raises(NoZone, match="--time-zone"):
        read("time\n2026-03-01 08:00\n", zone=None)


def test_a_duration_that_cannot_be_is_unknown_and_the_event_stays():
    found = read(
        "time,end,down_time\n"
        "2026-03-01 10:00,2026-03-01 11:00,60\n"
        "2026-03-02 10:00,2026-03-02 09:58,\n"
        "2026-03-03 10:00,2026-03-03 11:00,90\n"
        "2026-03-04 10:00,2026-04-30 10:00,\n"
        "2026-03-05 10:00,,-5\n"
        "2026-03-06 10:00,,soon\n"
        "2026-03-07 10:00,later,\n"
        "2026-03-08 10:00,,30\n"
        "2026-03-09 10:00,,\n"
    )
    assert [row.down_s for row in found.rows] == [3600.0, None, None, None, None, None, None, 1800.0, None]
    assert lines(found.notes) == [3, 4, 5, 6, 7, 8]
    assert "120 s before it happens" in found.notes[0].what
    assert not found.left_out


def test_what_lies_before_the_start_is_mistyped():
    found = read(
        "time,kind\n2026-03-06 10:00,start\n2026-03-07 10:00,failure\n2026.02.03 20:00,planned\n2026-03-09 10:00,failure\n"
    )
    assert lines(found.left_out) == [4]
    assert len(found.rows) == 3


def test_disorder_is_told_where_a_log_is_in_order_otherwise():
    days = [f"2026-03-{day:02} 10:00" for day in (1, 2, 5, 4, 6)]
    found = read("time\n" + "\n".join(days) + "\n")
    assert [(note.line, note.what) for note in found.notes] == [(5, "lies before line 4; taken as it is")]
    mixed = read("time\n" + "\n".join(f"2026-03-{1 + i * 17 % 28:02} 10:00" for i in range(28)) + "\n")
    assert not mixed.notes


def test_dates_and_times_of_day_apart():
    found = read("date,time_local\n2026-03-01,13:34:34\n2026-03-02,\n2026-04-01..30,\n2026-03-03,early\n")
    assert [row.at for row in found.rows] == [utc(2026, 3, 1, 13, 34, 34), utc(2026, 3, 2, 12)]
    assert lines(found.notes) == [3]
    assert lines(found.left_out) == [4, 5]


def test_american_dates_where_the_column_shows_that_they_are():
    shown = read("time\n3/4/2026 9:00\n3/24/2026 9:00\n")
    assert [row.at for row in shown.rows] == [utc(2026, 3, 4, 9), utc(2026, 3, 24, 9)]
    hidden = read("time\n3/4/2026 9:00\n")
    assert not hidden.rows
    assert "--time-format" in hidden.left_out[0].what
    asked = read("time\n3/4/2026 9:00\n", time_format="%d/%m/%Y %H:%M")
    assert asked.rows[0].at == utc(2026, 4, 3, 9)


def test_rows_that_the_log_does_not_want():
    text = "time,system\n2026-03-01 10:00,a\n2026-03-02 10:00,b\n"
    found = read(text, only=(("System", "b"),))
    assert [row.line for row in found.rows] == [3]
    assert sum(found.passed_over.values()) == 1
    with pytest.raises(UsageError, match="no column 'site'"):
        read(text, only=(("site", "b"),))


def test_devices_have_to_be_known():
    with pytest.raises(UsageError, match="does not say how many devices were in use; give --devices"):
        read("time\n2026-03-01 10:00\n", devices=None)
    found = read("time,gpus\n2026-03-01 10:00,8\n2026-03-02 10:00,none\n2026-03-03 10:00,0\n", devices=None)
    assert lines(found.left_out) == [3, 4]


def test_counts():
    found = read("cause,count\nGPU,148\nNIC,7\nx,-1\ny,1.5\n")
    assert found.form == "counts"
    assert [(row.cause, row.count, row.span_s, row.at) for row in found.rows] == [
        ("gpu", 148, None, None),
        ("nic", 7, None, None),
    ]
    assert lines(found.left_out) == [4, 5]


def test_counts_with_their_own_time():
    by_days = read("name,gpus,days,failures\na,16,2,3\nb,,2,3\nc,16,0,3\n", devices=None, zone=None)
    assert [(row.count, row.span_s, row.devices) for row in by_days.rows] == [(3, 172_800.0, 16.0)]
    assert lines(by_days.left_out) == [3, 4]
    by_dates = read("failures,first,last\n3,2026-03-01,2026-03-03\n4,2026-03-03,2026-03-01\n")
    assert [(row.count, row.span_s, row.at) for row in by_dates.rows] == [(3, 172_800.0, utc(2026, 3, 3, 12))]
    assert lines(by_dates.left_out) == [3]


def test_what_cannot_be_chosen_is_asked():
    text = "date,failures\n2026-03-01,3\n"
    with pytest.raises(UsageError, match="name the one that matters with --time-column or --count-column"):
        read(text)
    assert read(text, columns={"date": ("date",)}).form == "events"
    assert read(text, columns={"count": ("failures",)}).form == "counts"
    with pytest.raises(UsageError, match="no column that is known to hold times or counts: foo, bar"):
        read("foo,bar\n1,2\n")


@pytest.mark.parametrize("much", ["", "x" * 200_000])
def test_a_quote_that_is_never_closed_takes_nothing_along_silently(much):
    found = read('time,note\n2026-03-01 10:00,a\n2026-03-02 10:00,"open\n' + "2026-03-03 10:00,x\n" * 3 + much)
    assert [row.line for row in found.rows] == [2]
    assert lines(found.left_out) == [3]
    assert "a quote opens here and is not closed" in found.left_out[0].what
    with pytest.raises(UsageError, match=r"log.csv:1: .*; is a quote left open\?"):
        read('time,"note\n2026-03-01 10:00,a\n')


def test_a_row_on_several_lines_at_the_end():
    found = read('time,note\r\n2026-03-01 10:00,"a\r\nb"\r\n')
    assert [row.line for row in found.rows] == [2]
    assert not found.left_out
