"""What a run does about states that the guard refuses: it goes on, goes back, or ends."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from ckptd import status
from ckptd.cli import _text
from ckptd.core import decisions, picture, run
from ckptd.core import events as ev
from ckptd.core.commands import Ask, Launch, Record, Stop
from ckptd.core.policy import Policy
from ckptd.core.state import Status
from ckptd.web.metrics import RunCollector, Tally

CHOSEN = {"step": 10, "tier": "disk", "path": "/c/10", "marker_crc32c": "0", "sequence": 1}


def training(attempt=1, resume=None, t=2.0):
    return [
        ev.AttemptLaunched(t=t, attempt=attempt, world_size=2, placement={"a": [0, 1]}, resume=resume),
        ev.WorkersStarted(t=t, attempt=attempt, node="a"),
        ev.WorkersInitialised(t=t, attempt=attempt, node="a"),
        ev.StateRestored(t=t, attempt=attempt, node="a", step=(resume or {}).get("step", 0)),
        ev.FirstStep(t=t, attempt=attempt, node="a", step=(resume or {}).get("step", 0) + 1),
    ]


def start(**policy):
    return [
        ev.DaemonStarted(t=0.0, policy=Policy(run_id="r", name="n", interval_steps=10, **policy).to_dict()),
        ev.AgentConnected(t=1.0, node="a", devices=[{"index": 0}, {"index": 1}]),
        ev.HealthReported(t=1.0, node="a"),
        ev.InventoryReported(t=1.0, node="a"),
        *training(),
    ]


def committed(step, sequence=1, attempt=1):
    return ev.SaveCommitted(t=7.0, attempt=attempt, node="a", step=step, sequence=sequence, path=f"/c/{step}")


def rejected(step, attempt=1, rank=1):
    return ev.SaveRejected(
        t=8.0, attempt=attempt, node="a", rank=rank, step=step, tier="disk", path=f"/c/{step}", why="w holds NaN"
    )


def fold(*history, state=None):
    state = state or run.RunState()
    for event in history:
        state = run.apply(state, event)
    return state


def decide(state, t=9.0):
    recorded = []
    for _ in range(10):
        commands = decisions.decide(state, t)
        if not any(isinstance(c, Record) for c in commands):
            return state, recorded, commands
        recorded.append(commands[0].event)
        state = run.apply(state, commands[0].event)
    raise AssertionError("recorded for ever")


def stopped(state, attempt=1, step=0):
    """The agent has done what it was told: nothing of the attempt is left."""
    exits = [{"rank": r, "exitcode": -9, "killed_by_us": True} for r in (0, 1)]
    return run.apply(state, ev.AttemptEnded(t=10.0, attempt=attempt, node="a", exits=exits, step=step))


def answered(state, chosen=CHOSEN, commits=1):
    state = run.apply(state, ev.HealthReported(t=11.0, node="a"))
    return run.apply(state, ev.InventoryReported(t=11.0, node="a", chosen=chosen, commits=commits))


def test_skip_trains_on_however_many_are_refused():
    state = fold(*start(on_reject="skip", rollback_after=1), committed(10), *map(rejected, (20, 30, 40, 50)))
    assert decide(state)[1:] == ([], [])
    assert (state.status, state.rejections, state.committed.step) == (Status.TRAINING, 4, 10)


def test_rollback_waits_for_its_number_in_a_row_and_goes_back_to_the_newest_commit():
    state = fold(*start(on_reject="rollback", rollback_after=2), committed(10), rejected(20))
    assert decide(state)[1:] == ([], [])
    state, recorded, orders = decide(fold(rejected(30), state=state))
    assert [(type(e), e.guard, e.rank) for e in recorded] == [(ev.FailureDetected, True, 1)]
    assert orders == [Stop(node="a", attempt=1, grace=False)], "at once, and without a save"
    state, recorded, orders = decide(stopped(state, step=32))
    found, back = recorded
    assert (back.to_step, back.path, back.sequence, back.source) == (10, "/c/10", 1, "guard")
    assert state.keeping.suspect(2), "what that attempt may still have committed"
    assert (found.cause, found.severity, found.planned, found.lost_steps) == ("guard", "code", False, 22)
    assert found.detail == "the guard refused the state at step 30: w holds NaN"
    assert orders == [Ask(node="a", what="health"), Ask(node="a", what="inventory", suspects=((2, None),))]
    state, recorded, orders = decide(answered(state), 11.0)
    assert [(e.attempt, e.resume, e.grounds) for e in recorded] == [(2, CHOSEN, "restart")]
    assert orders == [Launch(node="a", attempt=2)]
    assert state.rejections == 0
    assert not state.book.held_against(11.0), "no device is to blame"


@pytest.mark.parametrize("between", [committed(25, 2), *training(2, CHOSEN)[:1]])
def test_a_commit_or_a_launch_begins_the_count_again(between):
    history = [*start(on_reject="rollback", rollback_after=2), rejected(20), between]
    state = fold(*history, rejected(30, attempt=between.attempt))
    assert state.rejections == 1
    assert not any(isinstance(c, Record) for c in decisions.decide(state, 9.0))


def test_rollbacks_without_progress_come_to_an_end():
    state = fold(*start(on_reject="rollback", rollback_after=1, max_without_progress=2), committed(10))
    launches = []
    for attempt in range(1, 10):
        state, _, _ = decide(fold(rejected(20 + attempt, attempt), state=state))
        state, _, _ = decide(stopped(state, attempt), 11.0)
        state, recorded, _ = decide(answered(state), 60.0)
        if isinstance(recorded[-1], ev.RunEnded):
            break
        launches.append(recorded[-1].attempt)
        state = fold(*training(attempt + 1, CHOSEN, t=60.0)[1:], state=state)
    assert launches == [2, 3], "the first attempt made progress, two more did not"
    assert (recorded[-1].outcome, recorded[-1].exit_status) == ("failed", 1)
    assert "w holds NaN" in recorded[-1].detail


def test_stop_ends_the_run_at_the_first_and_says_why():
    state, recorded, orders = decide(fold(*start(on_reject="stop"), committed(10), rejected(20)))
    assert [e.guard for e in recorded] == [True]
    assert orders == [Stop(node="a", attempt=1, grace=False)]
    _, recorded, orders = decide(stopped(state))
    assert [type(e) for e in recorded] == [ev.Interrupted, ev.RunEnded]
    assert (recorded[1].outcome, recorded[1].exit_status, orders) == ("failed", 1, [])
    assert recorded[1].detail == (
        "the guard refused the state at step 20: w holds NaN (guard.on_reject: stop); the newest commit is of step 10"
    )


def test_a_run_that_was_ended_by_the_guard_can_be_started_again():
    state, _, _ = decide(fold(*start(on_reject="stop"), committed(10), rejected(20)))
    state, recorded, _ = decide(stopped(state))
    assert isinstance(recorded[-1], ev.RunEnded)
    again = [start(on_reject="stop")[1], ev.HealthReported(t=20.0, node="a")]
    state = fold(ev.DaemonStarted(t=20.0, policy=state.policy.to_dict()), *again, state=state)
    _, recorded, _ = decide(answered(state), 21.0)
    assert [(e.attempt, e.resume) for e in recorded] == [(2, CHOSEN)]


@pytest.mark.parametrize("on_reject", ["rollback", "stop"])
def test_workers_that_are_about_to_stop_on_request_are_left_to_it(on_reject):
    request = ev.Requested(t=7.0, request="stop", exit_status=75)
    state, recorded, _ = decide(
        fold(*start(on_reject=on_reject, rollback_after=1), committed(10), request, rejected(20))
    )
    assert (recorded, state.status) == ([], Status.DRAINING)
    ended = ev.WorkersFinished(t=9.0, attempt=1, node="a", step=20, stopping=True, closed=True)
    _, recorded, _ = decide(stopped(run.apply(state, ended)))
    assert (recorded[0].outcome, recorded[0].exit_status) == ("stopped", 75)
    assert "the guard refused the last state and 10 steps after it are lost" in recorded[0].detail


@pytest.mark.parametrize(("on_reject", "launches"), [("skip", True), ("rollback", True), ("stop", False)])
def test_the_last_state_of_all_may_be_refused_too(on_reject, launches):
    """`close` raises on every rank: the work since the last commit is lost, and is done again."""
    error = {"type": "ckptd_shim.errors.StateRejected", "message": "the loss is nan", "traceback": "",
             "mro": ["ckptd_shim.errors.CheckpointError", "Exception"]}  # fmt: skip
    state = fold(
        *start(on_reject=on_reject), committed(10), rejected(20),
        ev.FailureDetected(t=8.0, detected_t=8.0, attempt=1, node="a", rank=0, exitcode=1, step=20),
        ev.AttemptEnded(t=9.0, attempt=1, node="a", exits=[{"rank": 0, "exitcode": 1, "error": error, "step": 20}]),
    )  # fmt: skip
    state, recorded, _ = decide(state)
    assert (recorded[0].cause, recorded[0].severity) == ("guard", "code")
    if launches:
        recorded = decide(answered(state), 11.0)[1]
    assert isinstance(recorded[-1], ev.AttemptLaunched if launches else ev.RunEnded)


def test_it_is_shown():
    history = [*start(), committed(10), rejected(20), rejected(30, rank=None)]
    now = picture.replay(history)
    document = status.document(now, t=9.0)
    assert document["saves"] == {"committed": 1, "failed": 0, "rejected": 2}
    assert "1 checkpoints committed, 2 rejected" in _text.summary(document)
    lines = [_text.event_line(event) for event in history[-2:]]
    assert lines == [
        "SAVE REJECTED at step 20: w holds NaN (rank 1); the state is not committed, older commits are kept",
        "SAVE REJECTED at step 30: w holds NaN; the state is not committed, older commits are kept",
    ]
    tally = Tally()
    for event in history:
        tally.apply(event)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(tally, lambda: document))
    labels = {"tier": "disk", "result": "rejected"}
    assert registry.get_sample_value("ckptd_checkpoints_total", labels) == 2
    assert registry.get_sample_value("ckptd_guard_rejections_total") == 2
