"""Events, exposure and rates out of rows."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.sitelog import Log, Row, bounded_prior, summarize

HOUR = 3600.0
_numbers = itertools.count()


def row(hour, kind="failure", **values):
    at = None if hour is None else hour * HOUR
    return Row(digest=str(next(_numbers)), kind=kind, at=at, **values)


def events(*rows, **log):
    return summarize(Log(**({"name": "l", "form": "events", "devices": 10.0} | log)), rows)


def test_a_log_that_starts_with_a_row_for_it():
    found = events(row(0, "start"), row(10), row(30), row(40, "planned"), row(50, "other"))
    assert (found.failures, found.counted, found.planned, found.other) == (2, 2, 1, 2)
    assert found.exposure_device_s == 50 * HOUR * 10
    assert found.rate == pytest.approx(2 / (500 * HOUR))
    assert found.mtbf(10.0)[0] == pytest.approx(25 * HOUR)
    assert found.mtbf(20.0)[0] == pytest.approx(12.5 * HOUR)
    assert found.gaps_device_s == (100 * HOUR, 200 * HOUR)
    assert found.tail_device_s == 200 * HOUR


def test_a_failure_that_opens_the_exposure_is_its_edge():
    found = events(row(0), row(10), row(20))
    assert (found.failures, found.counted) == (3, 2)
    assert found.mtbf(10.0)[0] == pytest.approx(10 * HOUR)
    assert found.gaps_device_s == (100 * HOUR, 100 * HOUR)


def test_an_exposure_that_was_asked_for():
    found = events(row(0), row(10), row(20), from_at=5 * HOUR, to_at=15 * HOUR)
    assert (found.failures, found.counted, found.outside) == (1, 1, 2)
    assert found.mtbf(10.0)[0] == pytest.approx(10 * HOUR)
    opened = events(row(0), row(10), from_at=0.0, to_at=20 * HOUR)
    assert opened.counted == 2


def test_rows_of_one_event_are_merged_from_its_first_row_on():
    rows = [row(0, "start"), *(row(10 + minutes / 60, cause=str(minutes)) for minutes in (0, 3, 5, 6, 9, 20))]
    found = events(*rows, merge_s=300.0)
    assert (found.failures, found.merged) == (3, 3)  # at 0, 6 and 20 minutes: a chain of rows is no endless event
    assert set(found.by_cause) == {"0", "6", "20"}
    assert events(*rows, merge_s=0.0).failures == 6


def test_a_planned_stop_beside_a_failure_does_not_hide_it():
    found = events(row(0, "start"), row(10, "planned"), row(10), row(20, "other"))
    assert (found.failures, found.planned, found.merged) == (1, 1, 0)


def test_devices_that_change_are_counted_as_they_were():
    rows = [row(0, "start", devices=10.0), row(10, devices=10.0), row(20, devices=40.0)]
    found = events(*rows, devices=None)
    assert found.exposure_device_s == (10 * 10 + 10 * 40) * HOUR
    assert found.gaps_device_s == (100 * HOUR, 400 * HOUR)
    assert found.devices == pytest.approx(25.0)
    cut = events(*rows, devices=None, from_at=5 * HOUR, to_at=15 * HOUR)
    assert cut.exposure_device_s == (5 * 10 + 5 * 40) * HOUR
    longer = events(*rows, devices=None, to_at=30 * HOUR)
    assert longer.exposure_device_s == (10 * 10 + 20 * 40) * HOUR


@pytest.mark.parametrize("rows", [[], [row(5)], [row(5, "start")]])
def test_no_exposure_no_rate(rows):
    found = events(*rows)
    assert (found.exposure_device_s, found.rate, found.mtbf(1.0)) == (0.0, None, None)
    assert bounded_prior(found, 10.0) is None


def jobs(*rows):
    return summarize(Log(name="l", form="jobs"), rows)


def test_jobs_bring_their_own_time():
    found = jobs(
        row(10, job="1", span_s=10 * HOUR, devices=8.0),
        row(20, "completed", job="2", span_s=5 * HOUR, devices=16.0),
        row(30, "planned", job="3", span_s=1 * HOUR, devices=8.0),
        row(40, "running", job="4", span_s=2 * HOUR, devices=8.0),
        row(41, "launch", job="5", span_s=0.0, devices=8.0),
        row(50, job="6", span_s=0.0, devices=8.0),
    )
    assert (found.failures, found.counted, found.planned, found.completed) == (2, 2, 1, 1)
    assert (found.running, found.launch) == (1, 1)
    assert found.exposure_device_s == (80 + 80 + 8 + 16) * HOUR
    assert found.censored_s == 2 * HOUR
    assert found.devices == pytest.approx(184 / 18)
    assert sum(found.gaps_device_s) + found.tail_device_s == pytest.approx(found.exposure_device_s)
    assert found.gaps_device_s[0] == 80 * HOUR


def test_only_rows_of_the_same_job_are_one_event():
    minute = 1 / 60
    found = jobs(
        row(10, job="1", span_s=HOUR, devices=1.0),
        row(10, job="2", span_s=HOUR, devices=1.0),
        row(10 + minute, job="1", span_s=minute, devices=1.0),
    )
    assert (found.failures, found.merged) == (2, 1)


def test_counts():
    log = Log(name="l", form="counts", devices=16_384.0, span_s=54 * 86_400.0)
    found = summarize(log, [row(None, count=300, cause="a"), row(None, count=119, cause="b")])
    assert (found.failures, found.counted, found.by_cause) == (419, 419, {"a": 300, "b": 119})
    assert found.mtbf(16_384.0)[0] / 60 == pytest.approx(185.6, abs=0.05)
    own = summarize(
        Log(name="l", form="counts"),
        [row(None, count=2, span_s=10 * HOUR, devices=4.0), row(100, count=3, span_s=10 * HOUR, devices=6.0)],
    )
    assert (own.failures, own.counted) == (5, 4)  # the second runs from its first failure to its last
    assert own.exposure_device_s == 100 * HOUR
    assert own.devices == pytest.approx(5.0)


def test_a_prior_keeps_the_rate_and_loses_the_weight():
    rows = [row(0, "start"), *(row(10 * (i + 1)) for i in range(40))]
    found = events(*rows)
    prior = bounded_prior(found, 10.0)
    assert prior.failures == pytest.approx(10.0)
    assert prior.failures / prior.device_seconds == pytest.approx(found.rate)
    light = bounded_prior(events(row(0, "start"), row(10), row(20)), 10.0)
    assert (light.failures, light.device_seconds) == (2.0, 200 * HOUR)
    none = bounded_prior(events(row(0, "start"), row(20, "planned")), 10.0)
    assert (none.failures, none.device_seconds) == (1.0, 200 * HOUR)


@given(
    hours=st.lists(st.floats(0, 1e5), min_size=1, max_size=30),
    devices=st.floats(1, 1e5),
    merge_s=st.floats(0, 1e6),
)
def test_gaps_and_tail_are_the_exposure(hours, devices, merge_s):
    found = events(*(row(hour) for hour in hours), devices=devices, merge_s=merge_s)
    assert sum(found.gaps_device_s) + found.tail_device_s == pytest.approx(found.exposure_device_s)
    assert all(gap >= 0 for gap in found.gaps_device_s)
    assert found.failures + found.merged == len(hours)
    assert found.counted == len(found.gaps_device_s)
