import dataclasses
import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import costs, estimates
from ckptd.core import events as ev
from ckptd.core.estimates import estimate
from ckptd.core.policy import Policy


def fold(*happened):
    return functools.reduce(estimates.apply, happened, estimates.initial())


def started(**policy):
    return ev.DaemonStarted(t=0.0, policy=Policy(**policy).to_dict())


def launched(t, world, attempt=1, nodes=("a",)):
    return ev.AttemptLaunched(t=t, attempt=attempt, world_size=world, placement={n: [0] for n in nodes})


def ended(t, attempt=1, node="a"):
    return ev.AttemptEnded(t=t, attempt=attempt, node=node)


def saved(step, stall, upload=1.0, tier="disk", attempt=1):
    return ev.SaveCommitted(t=0.0, attempt=attempt, step=step, stall_s=stall, upload_s=upload, tier=tier)


def test_prior_alone():
    state = fold(started(prior_failures=1.0, prior_device_seconds=1.8e8))
    now = estimate(state, t=0.0, world_size=8)
    assert now.mtbf_s == pytest.approx(1.8e8 / 8)
    assert now.mtbf_low_s == pytest.approx(1.8e8 / 8 / 2.995732273554)
    assert now.mtbf_high_s == pytest.approx(1.8e8 / 8 / 0.05129329438755)
    assert (now.stall_s, now.restart_s, now.upload_s, now.step_s) == (None, None, None, None)


def test_mtbf_halves_on_twice_the_devices():
    state = fold(started(), launched(0, 512), ev.Interrupted(t=5000.0), ended(5000.0))
    small = estimate(state, t=5000.0, world_size=512)
    large = estimate(state, t=5000.0, world_size=1024)
    assert small.mtbf_s == pytest.approx(2 * large.mtbf_s)
    assert small.mtbf_low_s == pytest.approx(2 * large.mtbf_low_s)


def test_posterior_of_failures_and_exposure():
    happened = [started(prior_failures=1.0, prior_device_seconds=1000.0)]
    for i in range(4):
        happened += [
            launched(100.0 * i, 4, attempt=i),
            ev.Interrupted(t=100.0 * i + 60, attempt=i),
            ended(100.0 * i + 60, attempt=i),
        ]
    now = estimate(fold(*happened), t=1000.0, world_size=2)
    assert now.exposure_device_s == pytest.approx(4 * 60 * 4)
    assert now.failures == 4
    assert now.mtbf_long_run_s == pytest.approx((1000 + 960) / 5 / 2)
    assert now.mtbf_s == pytest.approx(now.mtbf_long_run_s, rel=0.1)
    assert now.mtbf_low_s == pytest.approx(1960 / 9.153519026638 / 2, rel=0.15)
    assert now.mtbf_high_s == pytest.approx(1960 / 1.97014956806 / 2, rel=0.15)


def test_planned_stops_and_launch_failures_are_no_failures():
    state = fold(
        started(),
        launched(0, 2),
        ev.Interrupted(t=10.0, planned=True),
        ev.Interrupted(t=20.0, severity="launch"),
        ev.Interrupted(t=30.0, severity="node"),
    )
    now = estimate(state, t=40.0, world_size=2)
    assert (now.failures, now.planned) == (1, 1)


def crash(t, attempt, *, up=True, severity="process", world=4):
    """An interruption, and the attempt after it; `up`: which comes to its first step."""
    after = [ev.FirstStep(t=t + 0.2, attempt=attempt + 1)] if up else []
    return [
        ev.Interrupted(t=t, attempt=attempt, severity=severity),
        ended(t, attempt=attempt),
        launched(t + 0.1, world, attempt=attempt + 1),
        *after,
    ]


def test_interruptions_close_together_are_one_event():
    begun = [started(), launched(0, 4), ev.FirstStep(t=1.0, attempt=1)]
    state = fold(*begun, *crash(1000.0, 1, severity="node"), *crash(1010.0, 2), *crash(1029.0, 3), *crash(1031.0, 4))
    assert (state.failures.count, state.failures.merged) == (2, 2)
    assert state.failures.by_severity == {"node": 1, "process": 1}


def test_a_crash_before_the_first_step_is_part_of_the_restart():
    begun = [started(), launched(0, 4), ev.FirstStep(t=1.0, attempt=1)]
    state = fold(*begun, *crash(1000.0, 1, up=False), *crash(5000.0, 2, up=False), *crash(9000.0, 3))
    assert (state.failures.count, state.failures.merged) == (1, 2)
    assert fold(*begun, *crash(1000.0, 1), *crash(5000.0, 2)).failures.count == 2


def test_rates_by_severity_sum_to_the_rate():
    state = fold(started(), launched(0, 4), *crash(1e5, 1, severity="node"), *crash(2e5, 2, severity="odd"))
    rates = estimates.rates_by_severity(state, t=3e5, world_size=8)
    assert math.fsum(rates.values()) == pytest.approx(1 / estimate(state, t=3e5, world_size=8).mtbf_s)
    assert rates["node"] / rates["device"] == pytest.approx(1.1 / 0.1)
    assert set(rates) == {*estimates.SEVERITY_PRIOR, "odd"}


def test_the_prior_of_job_yaml_counts_until_the_first_failure():
    other = ev.DaemonStarted(t=0.0, policy=Policy(prior_failures=5.0, prior_device_seconds=1000.0).to_dict())
    assert estimate(fold(started(), other), t=0, world_size=1).mtbf_s == pytest.approx(200.0)
    learnt = fold(started(), launched(0, 4), *crash(1e5, 1))
    assert estimates.apply(learnt, other).failures == learnt.failures


def test_no_failure_one_failure_and_twenty_in_ten_minutes_then_a_quiet_week():
    day = 86_400.0
    state = fold(started(), launched(0, 512), ev.FirstStep(t=10.0, attempt=1))
    m = [estimate(state, t=7 * day, world_size=512).mtbf_s]
    assert m[0] > estimate(state, t=0, world_size=512).mtbf_s  # a week without a failure is news
    happened = [event for i in range(20) for event in crash(7 * day + 30.0 * i, i + 1, world=512)]
    state = functools.reduce(estimates.apply, happened[:4], state)
    m.append(estimate(state, t=7 * day, world_size=512).mtbf_s)
    state = functools.reduce(estimates.apply, happened[4:], state)
    m.append(estimate(state, t=7 * day + 600.0, world_size=512).mtbf_s)
    m += [estimate(state, t=(7 + d) * day, world_size=512).mtbf_s for d in (1, 3, 7)]
    assert m[0] > m[1] > m[2]
    assert m[2] < 3600.0  # twenty in ten minutes, after none in a week
    assert m[2] < m[3] < m[4] < m[5]
    assert m[5] > 0.25 * day
    assert all(0 < each < math.inf for each in m)


def test_exposure_counts_only_while_an_attempt_is_up():
    state = fold(started(), launched(10, 3))
    assert estimate(state, t=25.0, world_size=3).exposure_device_s == pytest.approx(45)
    state = estimates.apply(state, ended(30.0))
    assert estimate(state, t=1000.0, world_size=3).exposure_device_s == pytest.approx(60)
    state = estimates.apply(state, launched(1000.0, 2, attempt=2))
    state = estimates.apply(state, ev.RunEnded(t=1010.0))
    assert estimate(state, t=5000.0, world_size=3).exposure_device_s == pytest.approx(80)


def test_exposure_lasts_until_the_last_node_is_done():
    state = fold(started(), launched(0, 2, nodes=("a", "b")), ended(10.0, node="a"))
    assert estimate(state, t=20.0, world_size=2).exposure_device_s == pytest.approx(40)
    state = estimates.apply(state, ended(30.0, node="b"))
    assert estimate(state, t=99.0, world_size=2).exposure_device_s == pytest.approx(60)


def test_end_of_an_older_attempt_changes_nothing():
    state = fold(started(), launched(0, 2, attempt=5), ended(10.0, attempt=4))
    assert estimate(state, t=20.0, world_size=2).exposure_device_s == pytest.approx(40)


def test_the_cold_first_save_of_each_attempt_is_left_out():
    cold = fold(saved(1, 9.0, upload=80.0))
    assert estimate(cold, t=0, world_size=1).stall_s == 9.0  # until there is another one
    state = fold(saved(1, 9.0, upload=80.0), saved(2, 1.0, upload=8.0), saved(3, 1.2, upload=9.0))
    state = estimates.apply(state, saved(3, 7.0, upload=70.0, attempt=2))
    now = estimate(state, t=0, world_size=1)
    assert (now.stall_s, now.upload_s, now.stall_count) == (pytest.approx(1.1), pytest.approx(8.5), 4)


def test_the_slowdown_of_the_steps_during_the_upload_is_part_of_the_price():
    slow = [
        dataclasses.replace(saved(i, 1.0), slowdown_s=s) for i, s in enumerate((0.0, 2.0, 2.0, 2.0, -1.0, math.nan))
    ]
    state = fold(*slow)
    assert estimate(state, t=0, world_size=1).stall_s == 3.0
    assert state.costs.slowdown_total_s == 5.0
    quick = [dataclasses.replace(saved(i, 1.0), slowdown_s=s) for i, s in enumerate((0.0, -0.2, 0.1, -0.3))]
    assert estimate(fold(*quick), t=0, world_size=1).stall_s == 1.0  # noise makes no save cheaper


def test_an_outlier_does_not_move_the_medians():
    usual = [saved(i, 1.0, upload=10.0) for i in range(9)]
    odd = saved(99, 500.0, upload=9000.0)
    now = estimate(fold(*usual, odd), t=0, world_size=1)
    assert (now.stall_s, now.upload_s) == (1.0, 10.0)


def test_medians_follow_a_change():
    happened = [saved(i, 1.0) for i in range(100)] + [saved(100 + i, 3.0) for i in range(9)]
    assert estimate(fold(*happened), t=0, world_size=1).stall_s == 3.0


def test_a_save_counts_once_on_however_many_tiers():
    state = fold(saved(1, 2.0, tier="memory"), saved(1, 0.0, tier="disk"), saved(2, 2.0, tier="memory"))
    now = estimate(state, t=0, world_size=1)
    assert (now.stall_s, now.stall_count) == (2.0, 2)


def test_restart_cost_is_that_of_unplanned_restarts():
    state = fold(
        ev.Restarted(t=0, total_s=4.0), ev.Restarted(t=0, total_s=90.0, planned=True), ev.Restarted(t=0, total_s=6.0)
    )
    assert estimate(state, t=0, world_size=1).restart_s == 5.0


def test_restart_cost_is_kept_by_kind_and_by_phase():
    quick = [ev.Restarted(t=0, total_s=20.0, warm=True, init_s=15.0, detect_s=5.0)] * 30
    slow = [ev.Restarted(t=0, total_s=600.0, severity="node", wait_s=600.0)] * 10
    state = fold(*quick, ev.Restarted(t=0, total_s=9000.0, warm=True), *slow)
    kinds = state.costs.restart_by_kind()
    assert kinds == {"process/warm": (20.0, 31), "node/cold": (600.0, 10)}
    now = estimate(state, t=0, world_size=1)
    assert now.restart_s == pytest.approx(
        (31 * 20 + 10 * 600) / 41
    )  # what a failure costs on average, not the usual one
    phases = state.costs.restart_by_phase()
    assert (phases["wait_s"], phases["init_s"]) == (pytest.approx(600 * 10 / 16), pytest.approx(15 * 5 / 16))
    assert fold().costs.restart_by_phase() == {}


def test_step_time_of_another_world_serves_until_there_is_a_new_one():
    state = fold(launched(0, 4), *[ev.Progress(t=0, step_s=1.0) for _ in range(16)])
    state = estimates.apply(state, launched(0, 4, attempt=2))
    state = estimates.apply(state, ev.Progress(t=0, step_s=1.2))
    assert estimate(state, t=0, world_size=4).step_s == 1.0
    state = estimates.apply(state, launched(0, 2, attempt=3))
    assert estimate(state, t=0, world_size=2).step_s == 1.0
    state = estimates.apply(state, ev.Progress(t=0, step_s=2.0))
    assert estimate(state, t=0, world_size=2).step_s == 2.0


def test_unusable_step_times_are_ignored():
    state = fold(*(ev.Progress(t=0, step_s=s) for s in (None, 0.0, -1.0, math.nan, math.inf)))
    assert estimate(state, t=0, world_size=1).step_s is None


def test_state_is_bounded():
    state = fold(*(saved(i, float(i)) for i in range(500)))
    state = functools.reduce(estimates.apply, [saved(i, 1.0, attempt=i) for i in range(2, 99)], state)
    found = state.costs
    assert len(found.stalls) == len(found.uploads) == len(found.cold_stalls) == costs.WINDOW
    assert state.costs.stalls[-1] == 499.0


anything = st.floats(allow_nan=True, allow_infinity=True)
times = st.floats(-1e9, 1e9) | anything
sizes = st.integers(-2, 2000)
random_events = st.lists(
    st.one_of(
        st.builds(
            ev.DaemonStarted,
            t=times,
            policy=st.builds(
                lambda k, s: {"prior_failures": k, "prior_device_seconds": s}, st.floats(0, 1e6), st.floats(0, 1e12)
            ),
        ),
        st.builds(ev.AttemptLaunched, t=times, attempt=st.integers(1, 3), world_size=sizes),
        st.builds(ev.AttemptEnded, t=times, attempt=st.none() | st.integers(1, 3), node=st.sampled_from([None, "a"])),
        st.builds(ev.RunEnded, t=times),
        st.builds(ev.Interrupted, t=times, planned=st.booleans(), severity=st.sampled_from(["launch", "node"])),
        st.builds(ev.Restarted, t=times, total_s=anything),
        st.builds(ev.FirstStep, t=times),
        st.builds(
            ev.SaveCommitted, t=times, step=st.integers(0, 5), stall_s=anything, slowdown_s=anything, upload_s=anything
        ),
        st.builds(ev.Progress, t=times, step_s=st.none() | anything),
    ),
    max_size=30,
)


@given(random_events, times, sizes)
def test_any_events_give_finite_ordered_estimates(happened, t, world_size):
    state = fold(*happened)
    now = estimate(state, t=t, world_size=world_size)
    assert 0 < now.mtbf_low_s <= now.mtbf_high_s < math.inf
    assert 0 < now.mtbf_s < math.inf
    assert 0 <= now.exposure_device_s < math.inf
    for value in (now.stall_s, now.restart_s, now.upload_s, now.step_s):
        assert value is None or 0 <= value < math.inf
