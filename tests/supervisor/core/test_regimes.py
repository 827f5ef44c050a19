import functools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core import regimes
from ckptd.core.regimes import begin, failed, rate

MEAN = 1e6
"""Device-seconds between failures, in the tests that have a truth."""


def after(gaps, *, failures=1.0, device_s=MEAN):
    return functools.reduce(failed, gaps, begin(failures, device_s))


def test_before_anything_is_seen_the_prior_holds():
    now = rate(begin(2.0, 1e6), 0.0)
    assert now.mean == pytest.approx(2e-6)
    assert now.long_run == pytest.approx(2e-6)
    assert now.memory == pytest.approx(regimes.PRIOR_WEIGHTS[0])


def test_the_long_memory_is_the_gamma_posterior():
    now = rate(after([1e5, 3e5, 2e5], failures=1.5, device_s=7e5), 4e5)
    assert now.long_run == pytest.approx((1.5 + 3) / (7e5 + 1e6))


@settings(max_examples=30)
@given(st.lists(st.floats(1e4, 1e7), max_size=12), st.floats(0, 1e7))
def test_the_closed_form_is_the_differential_equation(gaps, exposure):
    """What forgetting does to weights and beliefs, against small steps of the equations in the docstring."""
    bank = after(gaps)
    found = regimes._after(bank, exposure)
    n = 1000
    dx = exposure / n
    first = bank.models[0]
    for i, (model, half_life, floor) in enumerate(
        zip(bank.models[1:], regimes.HALF_LIVES, regimes.FLOORS, strict=True), 1
    ):
        a0, b0 = regimes._floor(first.a, first.b, floor)
        got = found[i]
        forget = math.log(2) / (half_life * first.b / first.a)
        if forget * dx > 0.02:  # too coarse to compare with
            continue
        a, b, hazard = model.a, model.b, 0.0
        for _ in range(n):  # the midpoint rule
            half_a, half_b = a - forget * (a - a0) * dx / 2, b + (1 - forget * (b - b0)) * dx / 2
            hazard += half_a / half_b * dx
            a -= forget * (half_a - a0) * dx
            b += (1 - forget * (half_b - b0)) * dx
        assert (got.a, got.b) == (pytest.approx(a, rel=1e-3), pytest.approx(b, rel=1e-3))
        lost = first.a * math.log1p(exposure / first.b)
        if got.weight > 1e-200:
            expected = math.log(model.weight / first.weight) - hazard + lost
            assert math.log(got.weight / found[0].weight) == pytest.approx(expected, rel=1e-3, abs=2e-2)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_exposure_in_two_parts_is_exposure_in_one(one, two):
    bank = after([2e5, 1e6, 4e4])
    models = regimes._after(bank, one)
    assert math.fsum(m.weight for m in models) == pytest.approx(1.0)
    # The floors follow the model that forgets nothing, which a failure moves and a look does not.
    forgetting = [regimes.Regimes(models=(bank.models[0]._replace(weight=1e-9), *models[1:]))]
    twice, once = regimes._after(forgetting[0], two)[1:], regimes._after(bank, one + two)[1:]
    for a, b in zip(twice, once, strict=True):
        assert (a.a, a.b) == (pytest.approx(b.a), pytest.approx(b.b))


def test_a_steady_rate_is_not_taken_for_a_change():
    dice = random.Random(3)
    errors, memories = [], []
    bank = after([dice.expovariate(1 / MEAN) for _ in range(50)])
    for _ in range(400):
        bank = failed(bank, dice.expovariate(1 / MEAN))
        now = rate(bank, 0.0)
        errors.append(math.log(now.mean * MEAN))
        memories.append(now.memory)
    # Of the interval that is half of it: a twentieth costs a thousandth of the waste.
    assert math.sqrt(statistics.fmean(e * e for e in errors)) < 0.25
    assert statistics.median(memories) > 0.5


def test_a_bad_node_raises_the_rate_at_once_and_it_comes_down_again():
    dice = random.Random(5)
    bank = after([dice.expovariate(1 / MEAN) for _ in range(200)])
    seen = []
    for _ in range(40):
        bank = failed(bank, dice.expovariate(10 / MEAN))
        seen.append(rate(bank, 0.0))
    assert seen[9].mean > 3 / MEAN  # ten failures, one mean gap of before, and a good part of the way
    assert seen[39].mean > 6 / MEAN
    assert seen[39].memory < 0.2
    assert seen[39].long_run < 3 / MEAN  # which is why one memory is not enough
    assert rate(bank, 3 * MEAN).mean < 2.5 / MEAN  # no failure is needed to see that it is over


def test_forgetting_does_not_forget_the_ordinary():
    bank = after([MEAN] * 100)
    assert rate(bank, 1e4 * MEAN).mean > 0
    quiet = failed(bank, 50 * MEAN)
    assert 0.05 / MEAN < rate(quiet, 0.0).mean < 10 / MEAN
    for _ in range(3):
        quiet = failed(quiet, MEAN)
    assert 0.3 / MEAN < rate(quiet, 0.0).mean < 2 / MEAN


@given(st.floats(0, 1e6), st.floats(0, 1e15), st.lists(st.floats(0, 1e30), max_size=30), st.floats(-1e9, 1e280))
def test_whatever_comes_the_rate_is_finite_and_above_zero(failures, device_s, gaps, exposure):
    now = rate(after(gaps, failures=failures, device_s=device_s), exposure)
    assert 0 < now.mean < math.inf
    assert 0 <= now.variance < math.inf
    assert 0 <= now.memory <= 1
