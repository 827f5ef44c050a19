import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core import accounting
from ckptd.core import events as ev
from ckptd.core.whatif import Costs, Cycles, Stretch, Stretches, happened, replay, strike


def failure(up_s, restart_s=30.0):
    return Stretch(up_s=up_s, end="failure", restart_s=restart_s)


def test_a_failure_loses_what_the_newest_commit_before_it_does_not_hold():
    """Saves begin at 100 and 210, and are committed 20 s later; T = 100, C = 10."""
    costs = Costs(interval_s=100.0, stall_s=10.0, upload_s=20.0)
    told = [strike(up, costs) for up in (50.0, 105.0, 119.0, 121.0, 225.0, 231.0)]
    assert [kept for kept, _ in told] == [0.0, 0.0, 0.0, 100.0, 100.0, 200.0]
    assert [stalled for _, stalled in told] == [0.0, 5.0, 10.0, 10.0, 20.0, 20.0]


def test_over_many_failures_half_an_interval_and_the_upload_are_lost():
    """About the model's T/2 + U, of training: the stall in U is none. When in its cycle a failure strikes does not matter."""
    costs = Costs(interval_s=100.0, stall_s=10.0, upload_s=30.0)
    for up in (10_000.0, 10_037.0, 10_081.0):
        told = replay([failure(up)] * 10, costs, outside_s=0.0)
        assert told.rework / 10 == pytest.approx((80 * 60 + 10 * 100 + 20 * 110) / 110, rel=0.05)
        assert told.save / told.productive == pytest.approx(10 / 100, rel=0.02)
        assert told.restart == pytest.approx(300.0)


def test_a_failure_before_the_first_commit_leaves_nothing():
    told = replay([failure(20.0)], Costs(interval_s=100.0, stall_s=10.0), outside_s=0.0)
    assert (told.productive, told.save, told.rework) == (0.0, 0.0, pytest.approx(20.0))


def test_planned_stops_and_the_present_stretch_lose_nothing():
    costs = Costs(interval_s=100.0, stall_s=10.0)
    told = replay([Stretch(up_s=250.0, end="planned"), Stretch(up_s=50.0, end="open")], costs, outside_s=7.0)
    assert (told.productive, told.save, told.rework, told.restart) == (280.0, 20.0, 0.0, 0.0)
    assert (told.wall_s, told.goodput) == (307.0, pytest.approx(280 / 307))


def test_restarts_are_what_they_were_or_what_is_asked():
    run = [failure(500.0, 60.0), failure(500.0, None), failure(500.0, 40.0), Stretch(up_s=10.0, end="open")]
    costs = Costs(interval_s=100.0, stall_s=10.0)
    assert replay(run, costs, outside_s=0.0).restart == 100.0
    assert replay(run, Costs(interval_s=100.0, stall_s=10.0, restart_s=0.0), outside_s=0.0).restart == 0.0
    assert replay(run, Costs(interval_s=100.0, stall_s=10.0, restart_s=5.0), outside_s=0.0).restart == 10.0


def test_an_interval_must_be_above_zero():
    with pytest.raises(ValueError, match="above zero"):
        replay([], Costs(interval_s=0.0, stall_s=1.0), outside_s=0.0)


seconds = st.floats(0, 1e6)


@settings(deadline=None)
@given(
    st.lists(st.builds(Stretch, up_s=seconds, end=st.sampled_from(["failure", "planned", "open"]), restart_s=seconds)),
    st.builds(Costs, interval_s=st.floats(1e-3, 1e6), stall_s=seconds, upload_s=seconds),
)
def test_no_second_is_lost_or_made(stretches, costs):
    told = replay(stretches, costs, outside_s=3.0)
    assert min(told.productive, told.save, told.rework, told.restart) >= -1e-6
    up = sum(s.up_s for s in stretches)
    assert told.productive + told.save + told.rework == pytest.approx(up, abs=1e-6)
    assert 0 <= told.goodput <= 1 + 1e-9


def test_stretches_are_those_of_the_account():
    history = [
        ev.DaemonStarted(t=0.0),
        ev.AttemptLaunched(t=0.0, attempt=1, world_size=1, placement={"a": [0]}),
        ev.FirstStep(t=10.0, attempt=1),
        ev.SaveCommitted(t=50.0, attempt=1, step=9, stall_s=4.0),
        ev.FailureDetected(t=110.0, detected_t=111.0, attempt=1),
        ev.AttemptEnded(t=112.0, attempt=1, node="a"),
        ev.Interrupted(t=110.0, attempt=1),
        ev.AttemptLaunched(t=115.0, attempt=2, world_size=1, placement={"a": [0]}, resume={"step": 9, "attempt": 1}),
        ev.FailureDetected(t=118.0, detected_t=118.0, attempt=2),
        ev.AttemptEnded(t=118.0, attempt=2, node="a"),
        ev.Interrupted(t=118.0, attempt=2),
        ev.AttemptLaunched(t=120.0, attempt=3, world_size=1, placement={"a": [0]}, resume={"step": 9, "attempt": 1}),
        ev.FirstStep(t=130.0, attempt=3),
        ev.Restarted(t=130.0, attempt=3, interrupted_attempt=1, total_s=20.0),
        ev.Progress(t=170.0, attempt=3),
    ]
    account, stretches = accounting.initial(), Stretches()
    for event in history:
        account = accounting.apply(account, event)
        stretches.saw(account, event)
    found = stretches.all(account)
    assert [(s.up_s, s.end, s.restart_s) for s in found] == [
        (100.0, "failure", 20.0), (0.0, "failure", None), (40.0, "open", None)
    ]  # fmt: skip
    was = happened(account, found)
    assert (was.productive, was.save, was.rework, was.restart) == (36.0 + 40.0, 4.0, 60.0, 20.0)
    assert was.wall_s == pytest.approx(170.0)
    assert was.outside == pytest.approx(10.0)  # before the first step


def test_a_restart_under_way_is_a_restart_already():
    account = accounting.initial()
    for event in (
        ev.DaemonStarted(t=0.0),
        ev.AttemptLaunched(t=0.0, attempt=1, world_size=1, placement={"a": [0]}),
        ev.FirstStep(t=10.0, attempt=1),
        ev.FailureDetected(t=20.0, detected_t=21.0, attempt=1),
        ev.AttemptEnded(t=25.0, attempt=1, node="a"),
    ):
        account = accounting.apply(account, event)
    assert happened(accounting.advance(account, 40.0), []).restart == pytest.approx(20.0)


def test_a_cycle_lies_between_two_saves_of_an_attempt():
    cycles = Cycles()
    assert cycles.mean_s is None
    for attempt, step, up in ((1, 10, 50.0), (1, 10, 55.0), (1, 20, 150.0), (2, 15, 400.0), (2, 30, 600.0)):
        cycles.committed(ev.SaveCommitted(t=0.0, attempt=attempt, step=step), up)
    assert cycles.mean_s == pytest.approx(150.0)  # 100 and 200: the copy of step 10 is no save
