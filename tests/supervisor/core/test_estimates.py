import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import estimates
from ckptd.core import events as ev
from ckptd.core.estimates import estimate, gamma_quantile
from ckptd.core.policy import Policy

QUANTILES = [
    # shape, 5 %, 95 %: computed with mpmath at 40 digits
    (0.01, 4.46553501891e-131, 0.003362623998075),
    (0.5, 0.00196607000001, 1.920729410347),
    (1, 0.05129329438755, 2.995732273554),
    (1.5, 0.1759231588746, 3.907363951626),
    (2, 0.3553615106987, 4.743864518391),
    (5, 1.97014956806, 9.153519026638),
    (20, 13.25465159835, 27.87923963944),
    (100, 84.13927721831, 116.9971344462),
    (420, 386.8685456854, 454.2683367645),
    (1e4, 9836.0851108552, 10165.051911966),
    (1e5, 99480.420746789, 100520.71628157),
]


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


@pytest.mark.parametrize(("shape", "low", "high"), QUANTILES)
def test_gamma_quantiles(shape, low, high):
    assert gamma_quantile(0.05, shape) == pytest.approx(low, rel=1e-9)
    assert gamma_quantile(0.95, shape) == pytest.approx(high, rel=1e-9)


@given(st.floats(1e-3, 1e5))
def test_gamma_quantiles_are_ordered(shape):
    low, high = gamma_quantile(0.05, shape), gamma_quantile(0.95, shape)
    assert 0 <= low < high < math.inf
    assert low <= shape <= high or shape < 1  # the mean of a very skewed variable may lie outside


@pytest.mark.parametrize(("p", "shape"), [(0, 1), (1, 1), (0.5, 0), (0.5, math.inf), (math.nan, 1)])
def test_gamma_quantile_refuses_nonsense(p, shape):
    with pytest.raises(ValueError, match="no quantile"):
        gamma_quantile(p, shape)


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
            ev.Interrupted(t=100.0 * i + 50, attempt=i),
            ended(100.0 * i + 60, attempt=i),
        ]
    now = estimate(fold(*happened), t=1000.0, world_size=2)
    assert now.exposure_device_s == pytest.approx(4 * 60 * 4)
    assert now.failures == 4
    assert now.mtbf_s == pytest.approx((1000 + 960) / 5 / 2)
    assert now.mtbf_low_s == pytest.approx(1960 / 9.153519026638 / 2)
    assert now.mtbf_high_s == pytest.approx(1960 / 1.97014956806 / 2)


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


def test_stall_leaves_the_cold_first_save_out():
    assert estimate(fold(saved(1, 9.0)), t=0, world_size=1).stall_s == 9.0
    assert estimate(fold(saved(1, 9.0), saved(2, 1.0)), t=0, world_size=1).stall_s == 5.0
    state = fold(saved(1, 9.0), saved(2, 1.0), saved(3, 1.2))
    assert estimate(state, t=0, world_size=1).stall_s == pytest.approx(1.1)
    assert estimate(state, t=0, world_size=1).stall_count == 3


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
    assert len(state.stalls) == len(state.uploads) == estimates.WINDOW
    assert state.stalls[-1] == 499.0


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
        st.builds(ev.SaveCommitted, t=times, step=st.integers(0, 5), stall_s=anything, upload_s=anything),
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
