import math

import pytest
from any_events import any_event, times
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core import accounting
from ckptd.core import events as ev
from ckptd.core.accounting import PHASES, summary
from ckptd.core.timeline import MOST_SLICES, Timeline


def follow(*happened):
    """The account and the timeline after some events."""
    account, timeline = accounting.initial(), Timeline()
    for event in happened:
        before, account = account, accounting.apply(account, event)
        timeline.moved(before, account)
        timeline.mark(account.wall_s, event)
    return account, timeline


def check(account, timeline):
    expected = summary(account, t=-math.inf).seconds_by_phase
    found = timeline.seconds_by_phase()
    for phase in PHASES:
        assert found[phase] == pytest.approx(expected[phase], rel=1e-6, abs=1e-4), phase


def attempt(number, t, *, resume=None):
    """Launched at t, in training from t + 10 on."""
    return [
        ev.AttemptLaunched(
            t=t, attempt=number, world_size=2, devices_wanted=4, placement={"a": [0, 1]},
            resume=None if resume is None else {"step": resume, "attempt": number - 1},
        ),
        ev.WorkersStarted(t=t, attempt=number, node="a"),
        ev.WorkersInitialised(t=t, attempt=number),
        ev.StateRestored(t=t, attempt=number),
        ev.FirstStep(t=t + 10, attempt=number),
    ]  # fmt: skip


RUN = [
    ev.DaemonStarted(t=0.0),
    *attempt(1, 0.0),
    ev.SaveStaged(t=30.0, attempt=1, step=20, stall_s=2.0),
    ev.SaveCommitted(t=31.0, attempt=1, step=20, stall_s=2.0, upload_s=3.0, tier="disk"),
    ev.FailureDetected(t=40.0, detected_t=42.0, attempt=1, exitcode=-9),
    ev.AttemptEnded(t=45.0, attempt=1, node="a"),
    ev.Interrupted(t=40.0, detected_t=42.0, attempt=1, cause="signal"),
    *attempt(2, 50.0, resume=20),
    ev.Progress(t=70.0, attempt=2),
]


def spans(timeline, phase):
    """Where on the axis a phase is, in whole seconds."""
    told = timeline.document()
    return {
        int(start)
        for start, seconds in zip(told["start_s"], told["seconds_by_phase"].get(phase, []), strict=False)
        if seconds > 0
    }


def test_each_second_is_where_it_happened_and_lost_ones_where_they_were_trained():
    account, timeline = follow(*RUN)
    check(account, timeline)
    assert spans(timeline, "startup") == set(range(10))
    assert spans(timeline, "checkpoint_stall") == {28, 29}
    assert spans(timeline, "wasted_progress") == set(range(30, 40))
    assert spans(timeline, "detect") == {40, 41}
    assert spans(timeline, "stop") == {42, 43, 44}
    assert spans(timeline, "first_step") == set(range(50, 60))
    assert spans(timeline, "productive") == set(range(10, 28)) | set(range(60, 70))


def test_what_turns_out_to_be_safe_after_all_is_productive_where_it_was_trained():
    late = [
        *RUN[:7],
        ev.FailureDetected(t=40.0, detected_t=42.0, attempt=1, exitcode=-9),
        ev.SaveCommitted(t=43.0, attempt=1, step=20, stall_s=2.0),
        ev.AttemptEnded(t=45.0, attempt=1, node="a"),
    ]
    account, timeline = follow(*late)
    assert spans(timeline, "productive") == set()
    account, timeline = follow(*late, *attempt(2, 50.0, resume=20))
    check(account, timeline)
    assert spans(timeline, "productive") == set(range(10, 28))
    assert spans(timeline, "wasted_progress") == set(range(30, 40))


def test_marks_and_devices():
    _, timeline = follow(*RUN)
    told = timeline.document()
    at = {start: i for i, start in enumerate(told["start_s"])}
    assert (sum(told["failures"]), sum(told["planned"])) == (1, 0)
    assert told["failures"][at[45.0]] == 1
    assert told["saves"]["disk"]["count"][at[31.0]] == 1
    assert told["saves"]["disk"]["upload_max_s"][at[31.0]] == 3.0
    assert (told["devices"][at[20.0]], told["devices_wanted"][at[20.0]]) == (2.0, 4.0)
    assert told["devices"][at[46.0]] == 0.0


def test_a_long_run_has_no_more_slices_than_a_short_one():
    account, timeline = follow(*RUN[:-1], *(ev.Progress(t=60.0 * i, attempt=2) for i in range(2, 60_000)))
    check(account, timeline)
    told = timeline.document()
    assert MOST_SLICES / 2 < len(told["start_s"]) <= MOST_SLICES
    assert told["start_s"][-1] + told["slice_s"] >= account.wall_s


def test_a_copy_goes_its_own_way():
    account, timeline = follow(*RUN)
    before = timeline.document()
    copy = timeline.copy()
    copy.moved(account, accounting.advance(account, 100.0))
    assert timeline.document() == before
    check(accounting.advance(account, 100.0), copy)


@settings(max_examples=100, deadline=None)
@given(st.lists(any_event(st.floats(0, 1e5) | times), max_size=40))
def test_any_events_in_any_order_are_on_the_timeline_as_in_the_account(happened):
    account, timeline = follow(ev.DaemonStarted(t=0.0), *happened)
    check(account, timeline)
