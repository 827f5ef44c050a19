import functools
import math

import pytest
from any_events import any_event, times
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core import accounting
from ckptd.core import events as ev
from ckptd.core.accounting import PHASES, pending_restart, summary


def fold(*happened, account=None):
    return functools.reduce(accounting.apply, happened, account or accounting.initial())


def seconds(account, t=-math.inf):
    now = summary(account, t=t)
    assert math.fsum(now.seconds_by_phase.values()) == pytest.approx(now.wall_s, rel=1e-9)
    return {phase: pytest.approx(s) for phase, s in now.seconds_by_phase.items() if s > 1e-9}


def launched(t, attempt=1, *, resume=None, world=2, wanted=2, nodes=("a",)):
    return ev.AttemptLaunched(
        t=t,
        attempt=attempt,
        world_size=world,
        devices_wanted=wanted,
        placement={n: [0] for n in nodes},
        resume=None if resume is None else {"step": resume[0], "attempt": resume[1]},
    )


def up(t, attempt=1, **keywords):
    """An attempt that is launched at t and trains from t + 10 on: launch 1, init 2, restore 3, first step 4."""
    return [
        launched(t, attempt, **keywords),
        ev.WorkersStarted(t=t + 1, attempt=attempt, node="a", warm=True),
        ev.WorkersInitialised(t=t + 3, attempt=attempt),
        ev.StateRestored(t=t + 6, attempt=attempt),
        ev.FirstStep(t=t + 10, attempt=attempt),
    ]


def staged(t, step, stall=0.0, attempt=1):
    return ev.SaveStaged(t=t, attempt=attempt, step=step, stall_s=stall)


def committed(t, step, stall=0.0, attempt=1, upload=0.0):
    return ev.SaveCommitted(t=t, attempt=attempt, step=step, stall_s=stall, upload_s=upload)


def died(t, detected=None, attempt=1):
    return ev.FailureDetected(t=t, detected_t=t if detected is None else detected, attempt=attempt, exitcode=-9)


def ended(t, attempt=1, node="a"):
    return ev.AttemptEnded(t=t, attempt=attempt, node=node)


START = ev.DaemonStarted(t=0.0)


def test_nothing_before_the_run_begins():
    account = fold(launched(5.0), ev.Noted(t=9.0))
    now = summary(account, t=50.0)
    assert (now.wall_s, now.goodput) == (0.0, 0.0)
    assert set(now.seconds_by_phase) == set(PHASES)
    assert set(now.device_seconds_by_phase) == {*PHASES, "degraded"}


def test_first_attempt_is_startup_until_its_first_step():
    account = fold(START, *up(5.0))
    assert seconds(account, 30.0) == {"startup": 15.0, "productive": 15.0}
    assert summary(account, t=30.0).goodput == pytest.approx(0.5)


def test_a_failure_and_the_restart_after_it():
    account = fold(
        START, *up(0), staged(30, step=20), committed(31, step=20), died(40, 42), ended(45), *up(50, 2, resume=(20, 1))
    )
    assert seconds(account, 75) == {
        "startup": 10,
        "productive": 20 + 15,
        "wasted_progress": 10,
        "detect": 2,
        "stop": 3,
        "wait_for_devices": 5,
        "launch": 1,
        "init": 2,
        "restore": 3,
        "first_step": 4,
    }


def test_lost_time_is_known_when_the_failure_is():
    account = fold(START, *up(0), staged(30, step=20), committed(31, step=20), died(40))
    assert account.lost_s == pytest.approx(10)
    assert seconds(account) == {"startup": 10, "productive": 20, "wasted_progress": 10}


def test_a_save_that_was_not_committed_saves_nothing():
    account = fold(START, *up(0), staged(30, step=20), died(40))
    assert seconds(account) == {"startup": 10, "wasted_progress": 30}


def test_a_commit_that_arrives_after_the_death_gives_time_back():
    account = fold(START, *up(0), staged(30, step=20), died(40), committed(41, step=20), ended(42))
    assert seconds(account)["wasted_progress"] == 30
    account = fold(launched(43, 2, resume=(20, 1)), account=account)
    assert seconds(account)["wasted_progress"] == 10
    assert seconds(account)["productive"] == 20


def test_an_older_checkpoint_costs_more():
    account = fold(
        START, *up(0), staged(20, 10), committed(20, 10), staged(30, 20), committed(30, 20), died(40), ended(40)
    )
    assert seconds(account)["productive"] == 20
    assert seconds(fold(launched(40, 2, resume=(10, 1)), account=account))["productive"] == 10
    assert "productive" not in seconds(fold(launched(40, 2), account=account))
    # a checkpoint that was never seen: the newest one before it is what is known to be in it
    assert seconds(fold(launched(40, 2, resume=(15, 1)), account=account))["productive"] == 10


def test_the_same_step_of_two_attempts_is_told_apart():
    first = [*up(0), staged(20, 10), committed(20, 10), died(25), ended(25)]
    second = [*up(25, 2), staged(65, 10, attempt=2), committed(65, 10, attempt=2), died(66, attempt=2), ended(66, 2)]
    account = fold(START, *first, *second)
    assert seconds(fold(launched(70, 3, resume=(10, 1)), account=account))["productive"] == 10
    assert seconds(fold(launched(70, 3, resume=(10, 2)), account=account))["productive"] == 30


def test_a_second_failure_falls_back_to_where_its_attempt_came_from():
    """The newest commit in the ledger was rejected: it must not count as safe for the attempt after it."""
    account = fold(
        START, *up(0), staged(20, 10), committed(20, 10), staged(30, 20), committed(30, 20), died(40), ended(40),
        *up(40, 2, resume=(10, 1)), died(55, attempt=2),
    )  # fmt: skip
    assert seconds(account)["productive"] == 10
    assert seconds(account)["wasted_progress"] == 20 + 5


def test_stalls_are_booked_once_at_the_slowest_rank():
    account = fold(START, *up(0), staged(32, 20, stall=2.0))
    assert seconds(account)["checkpoint_stall"] == 2
    account = fold(committed(40, 20, stall=2.5), account=account)
    assert seconds(account) == {"startup": 10, "productive": 27.5, "checkpoint_stall": 2.5}
    account = fold(committed(45, 20, stall=2.5), committed(50, 20, stall=0.0), account=account)  # slower tiers
    assert seconds(account)["checkpoint_stall"] == 2.5
    account = fold(staged(60, 30, stall=1.0), ev.SaveFailed(t=61, attempt=1, step=30, stall_s=3.0), account=account)
    assert seconds(account)["checkpoint_stall"] == pytest.approx(2.5 + 2.0)  # only 1 s has passed since it was staged


def test_a_failed_save_is_no_safe_place():
    account = fold(START, *up(0), staged(30, 20), ev.SaveFailed(t=31, attempt=1, step=20), died(40))
    assert seconds(account)["wasted_progress"] == 30


def test_a_rejected_save_costs_its_stall_and_is_no_safe_place():
    rejected = ev.SaveRejected(t=31, attempt=1, step=20, stall_s=0.75)
    account = fold(START, *up(0), staged(30, 20, stall=0.5), rejected)
    assert seconds(account)["checkpoint_stall"] == 0.75
    refused = ev.FailureDetected(t=40, detected_t=40, attempt=1, guard=True, step=20)
    assert seconds(fold(refused, account=account))["wasted_progress"] == 29.25


def test_a_save_that_a_slower_tier_lost_is_still_safe():
    lost = ev.SaveFailed(t=32, attempt=1, step=20, tier="durable")
    account = fold(START, *up(0), staged(30, 20), committed(31, 20), lost, died(40))
    assert seconds(account)["productive"] == 20


def test_a_stall_is_never_more_than_the_time_there_was():
    account = fold(START, *up(0), staged(12, 1, stall=1e9), staged(13, 2, stall=math.nan), staged(14, 3, stall=-5.0))
    assert seconds(account) == {"startup": 10, "checkpoint_stall": 2, "productive": 2}


def test_a_graceful_stop_loses_only_what_came_after_the_save():
    stop = [ev.Requested(t=40, request="stop"), staged(43, 30, stall=1), committed(44, 30, stall=1)]
    account = fold(START, *up(0), *stop, ended(46), ev.RunEnded(t=47, outcome="stopped"))
    assert seconds(account, 900) == {"startup": 10, "productive": 30, "drain": 6, "other": 1}
    account = fold(ev.DaemonStarted(t=47), *up(48, 2, resume=(30, 1)), account=account)
    assert seconds(account, 68)["productive"] == 40
    assert "wasted_progress" not in seconds(account)


def test_a_save_on_request_is_no_drain():
    account = fold(START, *up(0), ev.Requested(t=20, request="save"))
    assert seconds(account, 30) == {"startup": 10, "productive": 20}


def test_the_clock_stands_still_between_runs():
    account = fold(START, *up(0), ev.WorkersFinished(t=30, attempt=1, closed=True), ended(31), ev.RunEnded(t=31))
    assert summary(account, t=5000).wall_s == pytest.approx(31)
    account = fold(ev.DaemonStarted(t=1000), account=account)
    assert summary(account, t=1007).wall_s == pytest.approx(38)
    assert seconds(account, 1007) == {"startup": 17, "productive": 20, "drain": 1}


def test_another_daemon_changes_nothing():
    account = fold(START, *up(0), ev.DaemonStarted(t=20))
    assert seconds(account, 30) == {"startup": 10, "productive": 20}


def test_a_death_that_the_daemon_learns_of_late_is_booked_from_when_it_was():
    account = fold(START, *up(0), staged(20, 5), committed(20, 5), ev.DaemonStarted(t=60), died(50, 52), ended(53))
    assert seconds(account) == {
        "startup": 10, "productive": 10, "wasted_progress": 30, "detect": 2, "stop": 8
    }  # fmt: skip


def test_an_attempt_is_over_on_its_last_node():
    account = fold(START, *up(0, nodes=("a", "b")), died(20), ended(22, node="a"), ended(25, node="b"))
    assert seconds(account, 30) == {"startup": 10, "wasted_progress": 10, "stop": 5, "wait_for_devices": 5}


def test_launch_lasts_until_the_last_node_has_its_workers():
    account = fold(START, *up(0), died(20), ended(20), launched(20, 2, nodes=("a", "b")))
    account = fold(ev.WorkersStarted(t=21, attempt=2, node="a"), account=account)
    account = fold(ev.WorkersStarted(t=24, attempt=2, node="b"), account=account)
    assert seconds(account, 26)["launch"] == 4
    assert seconds(account, 26)["init"] == 2


def test_late_words_of_an_older_attempt_change_nothing():
    account = fold(START, *up(0), died(20), ended(20), launched(20, 2))
    assert fold(ended(20), ev.FirstStep(t=20, attempt=1), died(20), account=account) == account


def test_degraded_time_is_the_devices_that_are_missing():
    account = fold(START, *up(0, world=4, wanted=4), died(20), ended(22), *up(25, 2, world=3, wanted=4))
    now = summary(account, t=45)
    assert now.seconds_by_phase["productive"] == pytest.approx(10)
    assert now.device_seconds_by_phase["productive"] == pytest.approx(30)
    assert now.device_seconds_by_phase["wasted_progress"] == pytest.approx(40)
    assert now.device_seconds_by_phase["wait_for_devices"] == pytest.approx(12)
    assert now.device_seconds_by_phase["startup"] == pytest.approx(40)
    assert now.device_seconds_by_phase["degraded"] == pytest.approx(20)
    assert math.fsum(now.device_seconds_by_phase.values()) == pytest.approx(4 * 45)


def test_waiting_before_the_first_launch_is_device_time_too():
    account = fold(START, launched(30, world=2, wanted=2))
    assert summary(account, t=40).device_seconds_by_phase["startup"] == pytest.approx(80)


# --- restarts

PARTS = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s")


def parts(payload):
    assert payload["total_s"] == pytest.approx(math.fsum(payload[p] for p in PARTS))
    assert all(payload[p] >= 0 for p in PARTS)
    return tuple(pytest.approx(payload[p]) for p in PARTS)


def test_parts_of_a_restart():
    account = fold(START, *up(0), died(20, 21), ended(23))
    interrupted = ev.Interrupted(t=20, attempt=1, severity="node")
    account = fold(interrupted, *up(27, 2)[:-1], account=account)
    before = pending_restart(account, 37)
    after = pending_restart(fold(ev.FirstStep(t=37, attempt=2), account=account), 37)
    assert before == after
    assert parts(before) == (1, 2, 4, 1, 2, 3, 4)
    assert (before["interrupted_attempt"], before["warm"], before["planned"], before["severity"]) == (
        1,
        True,
        False,
        "node",
    )
    ev.Restarted(t=37, **before)  # its own fields, no others


def test_a_restart_is_due_until_it_is_recorded():
    account = fold(START, *up(0))
    assert pending_restart(account, 10) is None
    account = fold(died(20), ended(20), *up(20, 2), account=account)
    assert pending_restart(account, 500)["total_s"] == pytest.approx(10)
    account = fold(ev.Restarted(t=30), account=account)
    assert pending_restart(account, 500) is None


def test_no_restart_is_due_while_an_attempt_ends():
    """Neither at the end of training nor on the way down: a restart is due once something trains again."""
    finished = [ev.WorkersFinished(t=30, attempt=1, closed=True), ended(31)]
    for happened in (finished, [ev.WorkersFinished(t=30, attempt=1), ended(31)], [died(30), ended(31)]):
        account = fold(START, *up(0))
        for event in happened:
            account = fold(event, account=account)
            assert pending_restart(account, 40) is None
    account = fold(launched(32, 2), account=account)
    assert pending_restart(account, 40)["total_s"] == pytest.approx(10)


def test_lost_time_is_that_of_this_attempt():
    account = fold(START, *up(0), died(20), ended(21), *up(21, 2))
    assert account.lost_s == 0


def test_a_restart_goes_on_over_attempts_that_never_trained():
    account = fold(
        START, *up(0), died(20), ended(21), *up(21, 2)[:3], died(25, 26, attempt=2), ended(27, 2), *up(27, 3)
    )
    payload = pending_restart(account, 37)
    assert payload["interrupted_attempt"] == 1
    assert payload["total_s"] == pytest.approx(17)
    assert parts(payload) == (1, 1 + 1, 0, 2, 4, 4, 4)


def test_a_relaunch_on_request_is_a_planned_restart():
    account = fold(
        START, *up(0), ev.Requested(t=20, request="relaunch"), staged(22, 9), committed(23, 9),
        ev.WorkersFinished(t=24, attempt=1, stopping=True), ended(24),
        ev.Interrupted(t=20, attempt=1, planned=True, severity="device"), *up(25, 2, resume=(9, 1)),
    )  # fmt: skip
    payload = pending_restart(account, 35)
    assert (payload["planned"], payload["severity"], payload["total_s"]) == (True, "device", pytest.approx(15))
    assert parts(payload)[:3] == (0, 4, 1)
    assert seconds(account, 40)["productive"] == 15
    assert seconds(account)["wait_for_devices"] == 1


def test_a_failure_while_draining_is_a_failure():
    account = fold(START, *up(0), ev.Requested(t=20, request="relaunch"), died(25), ended(26), *up(26, 2))
    payload = pending_restart(account, 36)
    assert (payload["planned"], payload["total_s"]) == (False, pytest.approx(11))


# --- whatever happens


def check(account, t):
    now = summary(account, t=t)
    assert set(now.seconds_by_phase) == set(PHASES)
    assert all(s >= 0 for s in now.seconds_by_phase.values())
    assert all(s >= 0 for s in now.device_seconds_by_phase.values())
    assert math.fsum(now.seconds_by_phase.values()) == pytest.approx(now.wall_s, rel=1e-6, abs=1e-6)
    assert 0 <= now.goodput <= 1
    payload = pending_restart(account, t)
    if payload is not None:
        assert all(payload[p] >= 0 for p in PARTS)
        assert payload["total_s"] == pytest.approx(math.fsum(payload[p] for p in PARTS))
        ev.Restarted(t=0.0, **payload)
    return now


@settings(max_examples=400, deadline=None)
@given(st.lists(any_event(times), max_size=40), times)
def test_any_events_in_any_order_sum_to_the_wall_clock(happened, t):
    account = accounting.initial()
    wall = 0.0
    for event in happened:
        account = accounting.apply(account, event)
        now = check(account, t=-math.inf)
        assert now.wall_s >= wall
        wall = now.wall_s
    check(account, t)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), any_event(st.just(0.0))), max_size=40))
def test_a_running_clock_misses_nothing(happened):
    """Events in order, no end: the account's wall-clock is the run's, and its device time that of the devices wanted."""
    account = accounting.apply(accounting.initial(), START)
    t, wanted_s = 0.0, 0.0
    for gap, event in happened:
        if isinstance(event, ev.RunEnded):
            continue
        t += gap
        values = {"t": t, "detected_t": t} if isinstance(event, ev.FailureDetected) else {"t": t}
        before = account
        account = accounting.apply(account, ev.from_parts(event.kind, ev.data_of(event) | values, **_where(event, t)))
        # Until the first launch nobody knows how many devices wait; then all of them have, from the beginning.
        wanted_s = wanted_s + before.wanted * gap if before.wanted else account.wanted * t
        check_devices(account, wanted_s)
    now = check(account, t=t + 5)
    assert now.wall_s == pytest.approx(t + 5)


def check_devices(account, wanted_s):
    """Each second of each wanted device is in one phase, or missing: to the rounding of a sum, and none is lost."""
    spent = summary(account, t=-math.inf).device_seconds_by_phase
    assert set(spent) == {*PHASES, "degraded"}
    assert math.fsum(spent.values()) == pytest.approx(wanted_s, rel=1e-9, abs=1e-6)


def _where(event, t):
    return {"t": t, "attempt": event.attempt, "node": event.node}


def test_state_is_bounded():
    account = fold(START, *up(0), *(e for i in range(5000) for e in (staged(20 + i, i), committed(20 + i, i))))
    assert len(account.marks) <= 256
    account = fold(died(6000), ended(6000), launched(6000, 2, resume=(4998, 1)), account=account)
    assert seconds(account)["productive"] == 10 + 4998
