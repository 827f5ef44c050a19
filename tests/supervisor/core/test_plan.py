"""What is offered to a job that is not there yet."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.plan import Mtbf, counted_mtbf, curve, plan

LLAMA_S = 54 * 86_400 / 419
HOUR = 3600.0


def offers(**values):
    defaults = {"stall_s": 60.0, "restart_s": 600.0, "upload_s": 0.0, "fixed_s": HOUR}
    result = plan(Mtbf(seconds=LLAMA_S), **(defaults | values))
    return {offer.name: offer for offer in (*result.offers, result.fixed)}


@pytest.mark.parametrize(
    ("restart_min", "stall_min", "interval_min", "best", "hourly"),
    [
        (10, 0.25, 9.63, 10.58, 21.97),
        (10, 1, 19.27, 15.77, 23.22),
        (10, 5, 43.08, 28.60, 29.89),
        (2, 0.25, 9.63, 6.27, 17.66),
        (2, 1, 19.27, 11.46, 18.91),
        (2, 5, 43.08, 24.29, 25.58),
    ],
)
def test_the_worked_example(restart_min, stall_min, interval_min, best, hourly):
    found = offers(restart_s=restart_min * 60.0, stall_s=stall_min * 60.0)
    assert found["young"].interval_s / 60 == pytest.approx(interval_min, abs=0.0051)
    assert found["young"].waste.total * 100 == pytest.approx(best, abs=0.0051)
    assert found["fixed"].waste.total * 100 == pytest.approx(hourly, abs=0.0051)


@pytest.mark.parametrize(("mtbf_h", "daly_min", "exact_min"), [(24, 117, 116.69), (6, 57, 56.71), (0.25, 9.1, 9.17)])
def test_all_three_formulas_are_asked(mtbf_h, daly_min, exact_min):
    result = plan(Mtbf(seconds=mtbf_h * HOUR), stall_s=300.0, restart_s=0.0, upload_s=0.0, fixed_s=HOUR)
    young, daly, exact = result.offers
    assert young.interval_s == pytest.approx(math.sqrt(2 * 300 * mtbf_h * HOUR))
    assert daly.interval_s / 60 == pytest.approx(daly_min, abs=0.5 if mtbf_h > 1 else 0.05)
    assert exact.interval_s / 60 == pytest.approx(exact_min, abs=0.0051)
    assert result.best is young


def test_no_interval_is_shorter_than_an_upload():
    found = offers(upload_s=1800.0)
    for name in ("young", "daly", "exact"):
        assert (found[name].interval_s, found[name].clamped_by) == (1800.0, "upload")
        assert found[name].formula_s < 1200
    assert found["fixed"].clamped_by is None
    assert found["young"].waste.rework == pytest.approx((900 + 1800) / LLAMA_S)


def test_a_count_says_how_sure_it_is():
    many, few = counted_mtbf(419, 54 * 86_400.0), counted_mtbf(1, 86_400.0)
    assert many.seconds == pytest.approx(LLAMA_S)
    assert 0.9 < many.low_s / many.seconds < 1 < many.high_s / many.seconds < 1.1
    assert few.low_s == pytest.approx(86_400 / -math.log(0.05), rel=1e-6)
    assert few.high_s == pytest.approx(86_400 / -math.log(0.95), rel=1e-6)


@pytest.mark.parametrize(("failures", "span_s"), [(0, 1.0), (1, 0.0), (1, math.inf)])
def test_a_count_without_failures_or_time_is_refused(failures, span_s):
    with pytest.raises(ValueError, match="no M"):
        counted_mtbf(failures, span_s)


@pytest.mark.parametrize(
    "wrong", [{"stall_s": 0.0}, {"fixed_s": 0.0}, {"restart_s": -1.0}, {"upload_s": math.inf}, {"stall_s": math.nan}]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"above zero|infinite"):
        offers(**wrong)


@given(
    mtbf_s=st.floats(1e-3, 1e12),
    stall_s=st.floats(1e-3, 1e6),
    restart_s=st.floats(0, 1e6),
    upload_s=st.floats(0, 1e6),
    fixed_s=st.floats(1e-3, 1e9),
)
def test_no_interval_is_better_than_the_best(mtbf_s, stall_s, restart_s, upload_s, fixed_s):
    result = plan(
        Mtbf(seconds=mtbf_s), stall_s=stall_s, restart_s=restart_s, upload_s=upload_s, fixed_s=max(fixed_s, upload_s)
    )
    best = result.best.waste.total
    points = curve(result)
    assert len(points) == 200
    assert all(best <= w.total * (1 + 1e-9) for _, w in points)
    assert best <= result.fixed.waste.total * (1 + 1e-9)
    assert points[0][0] < points[-1][0] < math.inf
