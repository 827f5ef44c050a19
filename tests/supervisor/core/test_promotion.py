from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import promotion

RATES = {"process": 3e-5, "device": 4e-6, "node": 6e-6}
seconds = st.floats(0, 1e7)
intervals = st.floats(1e-3, 1e6)
rates = st.dictionaries(st.sampled_from(["process", "device", "node", "cluster", "code"]), st.floats(0, 1.0))
told = st.lists(st.one_of(st.none(), st.just("auto"), st.integers(1, 50)), min_size=1, max_size=5)


def test_the_multi_level_optimum_in_numbers():
    """r = 6e-6 of failures take the host: T_2 = sqrt(2 * 30 / 6e-6) = 3162 s, which is 5.27 intervals of 600 s."""
    assert promotion.best_every(1, copy_s=30.0, interval_s=600.0, rates=RATES) == 5
    # A quarter of them takes the disk as well: twice as long, before the copy's own cost.
    assert promotion.best_every(2, copy_s=30.0, interval_s=600.0, rates=RATES) == 11


def test_at_its_optimum_a_level_costs_as_much_as_it_saves():
    """C_l / T_l = r_l T_l / 2, the audit of Young's formula."""
    rate = promotion.rate_of_level(1, RATES)
    n = promotion.best_every(1, copy_s=30.0, interval_s=1.0, rates=RATES)
    assert 30.0 / n == pytest.approx(rate * n / 2, rel=1e-3)


def test_what_needs_which_level():
    assert promotion.rate_of_level(0, RATES) == pytest.approx(4e-5)
    assert promotion.rate_of_level(1, {**RATES, "cluster": 1e-6}) == pytest.approx(7e-6)
    assert promotion.rate_of_level(3, RATES) == pytest.approx(6e-6 / 16)
    with pytest.raises(ValueError, match="no level"):
        promotion.rate_of_level(-1, RATES)


def test_at_least_once_a_day_whatever_is_believed_and_never_faster_than_it_copies():
    assert promotion.best_every(1, copy_s=30.0, interval_s=600.0, rates={"node": 1e-15}) == 144
    assert promotion.best_every(1, copy_s=30.0, interval_s=600.0, rates={}) == 144
    assert promotion.best_every(1, copy_s=9000.0, interval_s=600.0, rates={"node": 1.0}) == 15


def test_a_number_counts_checkpoints_of_the_tier_before():
    assert promotion.every([None, 2, 3], [None, 1.0, 1.0], interval_s=60.0, rates=RATES) == [1, 2, 6]
    assert promotion.every([None, 4, "auto"], [None, 1.0, None], interval_s=60.0, rates=RATES) == [1, 4, 4]


def test_until_it_is_measured_every_commit_goes_on():
    assert promotion.every([None, None, "auto"], [None, None, None], interval_s=600.0, rates=RATES) == [1, 1, 1]
    assert promotion.every([None, None], [None, 30.0], interval_s=None, rates=RATES) == [1, 1]


@given(told, st.lists(st.one_of(st.none(), seconds), min_size=5, max_size=5), st.one_of(st.none(), intervals), rates)
def test_a_slower_tier_is_never_served_more_often(asked, costs, interval_s, by_severity):
    found = promotion.every(asked, costs[: len(asked)], interval_s=interval_s, rates=by_severity)
    assert found[0] == 1
    assert all(a <= b for a, b in itertools.pairwise(found))


@given(st.integers(1, 5), seconds, seconds, intervals, rates)
def test_dearer_copies_go_less_often_and_failures_make_them_go_more_often(level, a, b, interval_s, by_severity):
    cheap, dear = sorted((a, b))
    few = promotion.best_every(level, copy_s=cheap, interval_s=interval_s, rates=by_severity)
    assert 1 <= few <= promotion.best_every(level, copy_s=dear, interval_s=interval_s, rates=by_severity)
    worse = {severity: 4 * rate for severity, rate in by_severity.items()}
    assert promotion.best_every(level, copy_s=cheap, interval_s=interval_s, rates=worse) <= few


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 1000))
def test_what_is_due_last_is_due_whenever_there_is_anything_new(newest, there, n):
    assert promotion.due(newest, there, n, last=True) == (newest > there)
    assert not promotion.due(newest, there, n) or promotion.due(newest, there, n, last=True)


def test_due():
    assert promotion.due(1, 0, 10), "the first goes everywhere"
    assert not promotion.due(0, 0, 1)
    assert [promotion.due(s, 4, 3) for s in range(4, 9)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("level", "copy_s", "interval_s"),
    [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, math.nan, 1.0), (1, 1.0, 0.0), (1, 1.0, math.inf)],
)
def test_nonsense_is_refused(level, copy_s, interval_s):
    with pytest.raises(ValueError, match="no n for level"):
        promotion.best_every(level, copy_s=copy_s, interval_s=interval_s, rates=RATES)
