import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.estimates import Estimate
from ckptd.core.interval import (
    FIRST_INTERVAL_S,
    Decision,
    daly,
    decide,
    exact,
    excess,
    silent_error_interval,
    waste,
    why_moved,
    worth_moving,
    young,
)
from ckptd.core.policy import Policy

LLAMA_MIN = 77_760 / 419
"""Minutes between the unexpected interruptions of Llama 3's 54 days."""


def known(**values):
    defaults = {"mtbf_s": 11_135.1, "mtbf_low_s": 10_000.0, "mtbf_high_s": 12_500.0, "stall_s": 5.0, "step_s": 2.0}
    return Estimate(**(defaults | values))


# --- published numbers


def test_llama_mtbf():
    assert round(LLAMA_MIN, 1) == 185.6


@pytest.mark.parametrize(("stall", "interval"), [(0.25, 9.63), (1, 19.27), (5, 43.08)])
def test_young_on_llama(stall, interval):
    assert young(stall, LLAMA_MIN) == pytest.approx(interval, abs=0.005)


@pytest.mark.parametrize(
    ("restart", "stall", "best", "hourly"),
    [
        (10, 0.25, 10.58, 21.97),
        (10, 1, 15.77, 23.22),
        (10, 5, 28.60, 29.89),
        (2, 0.25, 6.27, 17.66),
        (2, 1, 11.46, 18.91),
        (2, 5, 24.29, 25.58),
    ],
)
def test_waste_on_llama(restart, stall, best, hourly):
    def percent(interval):
        return 100 * waste(interval, stall_s=stall, mtbf_s=LLAMA_MIN, restart_s=restart).total

    assert percent(young(stall, LLAMA_MIN)) == pytest.approx(best, abs=0.0051)
    assert percent(60) == pytest.approx(hourly, abs=0.0051)


@pytest.mark.parametrize(
    ("stall", "by_young", "by_daly"), [(1, 149.2, 148.6), (5, 333.7, 330.4), (30, 817.4, 797.5), (120, 1634.8, 1555.7)]
)
def test_young_and_daly_in_seconds(stall, by_young, by_daly):
    assert young(stall, 11_135.1) == pytest.approx(by_young, abs=0.051)
    assert daly(stall, 11_135.1) == pytest.approx(by_daly, abs=0.051)


@pytest.mark.parametrize(
    ("mtbf", "by_daly", "by_exact"), [(24 * 60, 117, 116.69), (6 * 60, 57, 56.71), (15, 9.1, 9.17)]
)
def test_daly_paper(mtbf, by_daly, by_exact):
    assert daly(5, mtbf) == pytest.approx(by_daly, abs=0.5 if mtbf > 60 else 0.05)
    assert exact(5, mtbf) == pytest.approx(by_exact, abs=0.0051)


@pytest.mark.parametrize(("stall", "by_daly", "by_exact"), [(29, 13.33, 14.16), (40, 15.00, 14.61)])
def test_stall_above_mtbf(stall, by_daly, by_exact):
    assert daly(stall, 15) == pytest.approx(by_daly, abs=0.0051)
    assert exact(stall, 15) == pytest.approx(by_exact, abs=0.0051)


def test_silent_errors():
    assert silent_error_interval(30, verify_s=20, silent_mtbf_s=86_400) == pytest.approx(2078, abs=0.5)

    def overhead(t):  # a silent error is found at the end of the interval, which is then done again
        return ((t + 20) * math.exp(t / 86_400) + 30) / t

    numeric = min(range(1500, 2600), key=overhead)
    assert numeric == pytest.approx(2055, abs=3)
    assert overhead(2078) / overhead(numeric) == pytest.approx(1, abs=1e-4)


def test_silent_errors_and_crashes_together():
    both = silent_error_interval(30, verify_s=20, silent_mtbf_s=86_400, mtbf_s=43_200)
    assert both == pytest.approx(math.sqrt(50 / (1 / 86_400 + 0.5 / 43_200)))


@pytest.mark.parametrize(("nodes", "hours"), [(2048, 1.80), (16_384, 0.225)])
def test_rsc_rate(nodes, hours):
    assert 24 / (6.50 * nodes / 1000) == pytest.approx(hours, abs=0.005)


# --- the formulas as functions


def test_young_balances_saving_and_rework():
    expected = waste(young(7, 9000), stall_s=7, mtbf_s=9000, restart_s=100, upload_s=0)
    assert expected.save == pytest.approx(expected.rework)


def test_upload_counts_as_rework():
    with_upload = waste(300, stall_s=5, mtbf_s=10_000, restart_s=60, upload_s=50)
    without = waste(300, stall_s=5, mtbf_s=10_000, restart_s=60)
    assert with_upload.rework - without.rework == pytest.approx(0.005)


@given(stall=st.floats(1e-6, 1e6), mtbf=st.floats(1e-3, 1e12))
def test_exact_is_the_optimum(stall, mtbf):
    # d/dT of (exp((T + C)/M) - 1)/T is zero where (1 - T/M) exp(T/M) = exp(-C/M).
    u = exact(stall, mtbf) / mtbf
    assert 0 < u <= 1
    x = stall / mtbf
    if u < 0.9:
        gap = sum(u**k / k for k in range(2, 1200))
        assert gap == pytest.approx(x, rel=1e-9)
    else:
        assert math.exp(-u) * math.exp(-x) == pytest.approx(1 - u, rel=1e-6, abs=1e-15)


@given(stall=st.floats(1e-9, 1e-3), mtbf=st.floats(1e6, 1e12))
def test_exact_meets_young_at_the_branch_point(stall, mtbf):
    assert exact(stall, mtbf) == pytest.approx(young(stall, mtbf), rel=1e-4)


@pytest.mark.parametrize("formula", [young, daly, exact])
def test_formulas_refuse_nonsense(formula):
    assert formula(0, 100) == 0
    for stall, mtbf in [(-1, 100), (1, 0), (1, -5), (math.nan, 5), (1, math.inf)]:
        with pytest.raises(ValueError, match="MTBF"):
            formula(stall, mtbf)


def test_waste_refuses_nonsense():
    with pytest.raises(ValueError, match="above zero"):
        waste(0, stall_s=1, mtbf_s=1, restart_s=1)


# --- the decision


def test_formula_of_the_policy():
    for name, function in (("young", young), ("daly", daly), ("exact", exact)):
        decision = decide(known(), Policy(formula=name))
        assert decision.interval_s == pytest.approx(function(5.0, 11_135.1))
        assert decision.formula == name
        assert decision.clamped_by is None
        assert decision.interval_steps == round(decision.interval_s / 2.0)
        assert name in decision.reason


def test_expected_waste_is_that_of_the_interval():
    decision = decide(known(restart_s=30.0, upload_s=12.0), Policy())
    assert decision.waste == waste(decision.interval_s, stall_s=5.0, mtbf_s=11_135.1, restart_s=30.0, upload_s=12.0)


@pytest.mark.parametrize(
    ("estimate", "policy", "interval", "clamp"),
    [
        (known(upload_s=900.0), Policy(), 900.0, "upload"),
        (known(step_s=1000.0), Policy(), 1000.0, "step"),
        (known(step_s=1000.0, upload_s=900.0), Policy(), 1000.0, "step"),
        (known(step_s=900.0, upload_s=1000.0), Policy(), 1000.0, "upload"),
        (known(), Policy(min_interval_s=600.0), 600.0, "min_interval"),
        (known(), Policy(max_interval_s=60.0), 60.0, "max_interval"),
        (known(upload_s=900.0), Policy(max_interval_s=60.0), 60.0, "max_interval"),
        (known(mtbf_s=1e9), Policy(), 7200.0, "max_interval"),
        (known(mtbf_s=1e9), Policy(max_interval_s=None), daly(5.0, 1e9), None),
    ],
)
def test_clamps(estimate, policy, interval, clamp):
    decision = decide(estimate, policy)
    assert decision.interval_s == pytest.approx(interval)
    assert decision.clamped_by == clamp
    if clamp:
        assert clamp in decision.reason


def test_interval_of_the_user_wins():
    assert decide(known(), Policy(interval_s=77.0)) == Decision(
        interval_s=77.0,
        interval_steps=38,
        formula="fixed",
        clamped_by="job.yaml",
        reason="job.yaml asks for 77 s",
        waste=waste(77.0, stall_s=5.0, mtbf_s=11_135.1, restart_s=0.0),
        stall_s=5.0,
        mtbf_s=11_135.1,
        best_s=daly(5.0, 11_135.1),
    )
    steps = decide(known(upload_s=5000.0), Policy(interval_steps=500))
    assert (steps.interval_steps, steps.interval_s, steps.clamped_by) == (500, 1000.0, "job.yaml")
    untimed = decide(known(step_s=None), Policy(interval_steps=500))
    assert (untimed.interval_steps, untimed.interval_s, untimed.waste) == (500, None, None)


def test_first_save_comes_early():
    rare = decide(known(stall_s=None, mtbf_s=9e7), Policy())
    assert rare.interval_s == FIRST_INTERVAL_S
    assert "no save measured yet" in rare.reason
    assert rare.waste is None
    often = decide(known(stall_s=None, mtbf_s=2000.0), Policy())
    assert often.interval_s == pytest.approx(daly(1.0, 2000.0))
    short = decide(known(stall_s=None), Policy(max_interval_s=20.0))
    assert (short.interval_s, short.clamped_by) == (20.0, "max_interval")


@given(
    estimate=st.builds(
        Estimate,
        mtbf_s=st.floats(0, math.inf),
        mtbf_low_s=st.just(1.0),
        mtbf_high_s=st.just(1.0),
        stall_s=st.none() | st.floats(0, 1e9),
        restart_s=st.none() | st.floats(0, 1e9),
        upload_s=st.none() | st.floats(0, 1e9),
        step_s=st.none() | st.floats(0, 1e9),
    ),
    policy=st.builds(
        Policy,
        formula=st.sampled_from(["young", "daly", "exact"]),
        min_interval_s=st.none() | st.floats(1e-3, 1e6),
        max_interval_s=st.none() | st.floats(1e-3, 1e6),
    ),
)
def test_always_finite_and_positive(estimate, policy):
    decision = decide(estimate, policy)
    assert 0 < decision.interval_s < math.inf
    assert (decision.interval_steps is None) == (estimate.step_s is None)
    assert decision.interval_steps is None or decision.interval_steps >= 1
    if policy.max_interval_s is not None:
        assert decision.interval_s <= policy.max_interval_s
    elif estimate.upload_s is not None:
        assert decision.interval_s >= estimate.upload_s
    if decision.waste is not None:
        assert math.isfinite(decision.waste.total)


def test_small_changes_are_not_pushed():
    now = decide(known(), Policy())
    assert worth_moving(None, now)
    assert not worth_moving(now, now)
    assert not worth_moving(now, decide(known(stall_s=5.2), Policy()))
    assert worth_moving(now, decide(known(stall_s=6.0), Policy()))
    assert worth_moving(now, decide(known(stall_s=4.0), Policy()))
    assert worth_moving(now, decide(known(), Policy(interval_s=10.0)))


def test_a_fixed_interval_is_pushed_once():
    steps = Policy(interval_steps=100)
    assert not worth_moving(decide(known(step_s=None), steps), decide(known(), steps))
    assert not worth_moving(decide(known(step_s=1.0), steps), decide(known(step_s=9.0), steps))
    assert worth_moving(decide(known(), steps), decide(known(), Policy(interval_steps=110)))
    seconds = Policy(interval_s=100.0)
    assert not worth_moving(decide(known(step_s=1.0), seconds), decide(known(step_s=9.0), seconds))
    assert worth_moving(decide(known(), seconds), decide(known(), Policy(interval_s=101.0)))


@given(mtbf=st.floats(100, 1e8), stall=st.floats(1e-2, 20), ratio=st.floats(0.05, 20))
def test_the_excess_is_that_of_the_model(mtbf, stall, ratio):
    best = young(stall, mtbf)

    def movable(interval):
        return waste(interval, stall_s=stall, mtbf_s=mtbf, restart_s=0.0).total

    assert excess(ratio * best, best) == pytest.approx(movable(ratio * best) / movable(best) - 1, abs=1e-9)


def test_a_move_says_why():
    old = decide(known(), Policy())
    assert why_moved(None, old) == ""
    rarer = why_moved(old, decide(known(mtbf_s=40_000.0), Policy()))
    assert "M rose from 1.114e+04 to 4e+04 s" in rarer
    assert "would cost" in rarer
    assert "C fell from 5 to 2 s" in why_moved(old, decide(known(stall_s=2.0), Policy()))
    first = decide(known(stall_s=None), Policy())
    assert "C is measured now" in why_moved(first, old)
    assert why_moved(old, decide(known(), Policy(max_interval_s=20.0))) != ""
    assert why_moved(old, decide(known(), Policy(interval_s=20.0))) == ""
