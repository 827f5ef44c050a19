"""Which moment is meant."""

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from ckptd.sitelogs.times import NoZone, TimeReader, check_format, day_first, is_missing, parse_elapsed, parse_zone

BERLIN = ZoneInfo("Europe/Berlin")


def utc(*parts):
    return datetime(*parts, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "offset"),
    [("UTC", 0), ("z", 0), ("+08:00", 8), ("+8", 8), ("UTC+8", 8), ("-0330", -3.5), ("GMT-5", -5)],
)
def test_fixed_zones(text, offset):
    assert parse_zone(text).utcoffset(None) == timedelta(hours=offset)


@pytest.mark.parametrize("text", ["", "PST8", "+25:00", "Mars/Olympus", "../etc/passwd", "+08:99", "local"])
def test_what_is_no_zone(text):
    with pytest.raises(ValueError, match="is not a time zone; write UTC"):
        parse_zone(text)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-03-01T10:20:30", utc(2026, 3, 1, 9, 20, 30)),
        ("2026-03-01 10:20", utc(2026, 3, 1, 9, 20)),
        (" 2026.03.01 10:20 ", utc(2026, 3, 1, 9, 20)),
        ("2026/3/1 10:20:30.5", utc(2026, 3, 1, 9, 20, 30)),
        ("2026-07-01 10:20", utc(2026, 7, 1, 8, 20)),
        ("2026-03-01T10:20:30Z", utc(2026, 3, 1, 10, 20, 30)),
        ("2026-03-01T10:20:30+08:00", utc(2026, 3, 1, 2, 20, 30)),
        ("1772360430", 1772360430.0),
        ("1772360430.25", 1772360430.25),
    ],
)
def test_what_is_a_time(text, at):
    found = TimeReader(zone=BERLIN).read(text)
    assert (found.at, found.day_only, found.twice) == (at, False, False)


def test_a_date_is_its_noon():
    found = TimeReader(zone=UTC).read("2026-03-01")
    assert (found.at, found.day_only) == (utc(2026, 3, 1, 12), True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no time"),
        ("soon", "'soon' is not a time"),
        ("2022-04-01..30", "is not a time"),
        ("2022-03-11 20:42 (11:42 PST)", "is not a time"),
        ("2026-02-30 10:00", "is not a time: day"),
        ("2026-02-03 25:00", "is not a time: hour"),
        ("3/4/2026 10:00", "can be day/month or month/day; say which with --time-format"),
        ("0001-01-01 00:30", "not of a year from 1980 to 2999"),
        ("9999-12-31 23:30-08:00", "not of a year from 1980 to 2999"),
        ("1970-01-01T00:00:00", "not of a year from 1980 to 2999"),
        ("2026-03-29 02:30", "never was in Europe/Berlin: the clocks were put forward"),
    ],
)
def test_what_is_no_time(text, said):
    with pytest.raises(ValueError, match=said):
        TimeReader(zone=BERLIN).read(text)


def test_the_hour_that_comes_twice_is_told():
    found = TimeReader(zone=BERLIN).read("2026-10-25 02:30")
    assert (found.at, found.twice) == (utc(2026, 10, 25, 0, 30), True)


def test_a_time_without_a_zone_is_refused():
    reader = TimeReader(zone=None)
    with pytest.raises(NoZone, match=r"'2026-03-01 10:20' has no zone; name it with --time-zone"):
        reader.read("2026-03-01 10:20")
    assert reader.read("2026-03-01 10:20 +00:00").at == utc(2026, 3, 1, 10, 20)
    assert reader.read("1772360430").at == 1772360430.0


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["3/4/2026", "13/4/2026"], True),
        (["3/4/2026 10:00", "3/14/2026 10:00"], False),
        (["3/4/2026", "5/6/2026"], None),
        (["13/4/2026", "4/13/2026"], None),
        (["2026-03-04"], None),
        ([], None),
    ],
)
def test_the_order_of_day_and_month_shows_in_the_column(texts, found):
    assert day_first(texts) is found


def test_a_format_of_the_users_own():
    reader = TimeReader(zone=timezone(timedelta(hours=8)), pattern="%d %b %Y, %H.%M")
    assert reader.read("1 Mar 2026, 10.20").at == utc(2026, 3, 1, 2, 20)
    with pytest.raises(ValueError, match="is not a time like %d %b"):
        reader.read("2026-03-01 10:20")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:20:00", 1200), ("2-03:04:05", 183_845), ("04:30", 270), ("00:15.057", 15.057), ("INVALID", None), ("", None)],
)
def test_elapsed(text, seconds):
    assert parse_elapsed(text) == seconds


def test_ways_to_say_nothing():
    assert all(map(is_missing, ["", "Unknown", "None", " N/A "]))
    assert not is_missing("2026")


def test_formats():
    assert check_format("%d.%m.%y %H:%M") == "%d.%m.%y %H:%M"
    for pattern in ("%Q", "%", "%d.%m.%Y %", "%H:%M", "day", ""):
        with pytest.raises(ValueError, match=r"is no format|does not give day"):
            check_format(pattern)
