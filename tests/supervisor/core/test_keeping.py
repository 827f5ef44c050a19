"""Pins and branches that a run went back from, as the fold of the run has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import decisions, events, picture, run
from ckptd.core.commands import Ask, Record, Stop
from ckptd.core.keeping import Keeping, is_suspect, launched, name_of, rolled_back
from ckptd.core.policy import Policy
from ckptd.core.state import Status


def commit(sequence, step=None, attempt=1, t=5.0):
    step = sequence * 10 if step is None else step
    return events.SaveCommitted(
        t=t, attempt=attempt, node="a", step=step, samples=12 * step, sequence=sequence, tier="disk",
        path=f"/c/step_{step:09d}.a{attempt:04d}",
    )  # fmt: skip


def back_to(sequence, *, t=9.0, source="ckptd rollback", **values):
    return events.RolledBack(
        t=t,
        to_step=sequence * 10,
        path=f"/c/step_{sequence * 10:09d}.a0001",
        sequence=sequence,
        source=source,
        **values,
    )


def started(**policy):
    return [
        events.DaemonStarted(t=0.0, policy=Policy(run_id="r", name="n", interval_steps=10, **policy).to_dict()),
        events.AgentConnected(t=1.0, node="a", devices=[{"index": 0}]),
        events.HealthReported(t=1.0, node="a"),
        events.InventoryReported(t=1.0, node="a"),
        *attempt(1),
    ]


def attempt(number, resume=None):
    return [
        events.AttemptLaunched(t=2.0, attempt=number, world_size=1, placement={"a": [0]}, resume=resume),
        events.WorkersStarted(t=2.0, attempt=number, node="a"),
        events.WorkersInitialised(t=2.0, attempt=number, node="a"),
        events.StateRestored(t=2.0, attempt=number, node="a"),
        events.FirstStep(t=2.0, attempt=number, node="a", step=1),
    ]


def fold(*history, state=None):
    state = state or run.RunState()
    for event in history:
        state = run.apply(state, event)
    return state


def test_a_living_attempt_is_stopped_without_a_save_and_the_question_says_what_is_suspect():
    state = fold(*started(), commit(1), commit(2), commit(3), back_to(1, why="odd"))
    assert state.status is Status.STOPPING
    assert decisions.decide(state, 9.0) == [Stop(node="a", attempt=1, grace=False)]
    # A save that was under way is of the branch that is left.
    state = fold(commit(4), state=state)
    assert (state.committed.sequence, state.commit_sequence) == (1, 4)
    state = fold(events.AttemptEnded(t=10.0, attempt=1, node="a", step=45), state=state)
    (record,) = decisions.decide(state, 10.0)
    found = record.event
    assert (found.cause, found.planned, found.lost_steps) == ("rollback", True, 35)
    assert "odd" in found.detail
    state = fold(found, state=state)
    assert state.failures == 0
    asked = [c for c in decisions.decide(state, 10.0) if isinstance(c, Ask) and c.what == "inventory"]
    assert [c.suspects for c in asked] == [((2, None),)]


def test_an_answer_from_before_is_no_answer():
    state = fold(*started(), commit(1), commit(2), events.AttemptEnded(t=8.0, attempt=1, node="a", step=20))
    state = fold(events.Interrupted(t=8.0, attempt=1, planned=True), back_to(1), state=state)
    late = events.InventoryReported(t=9.0, node="a", commits=2, newest_sequence=2, chosen={
        "step": 20, "tier": "disk", "path": "/c/2", "sequence": 2, "marker_crc32c": "0"})  # fmt: skip
    state = fold(late, state=state)
    assert state.inventory is None
    assert not state.nodes["a"].inventory_known


def test_progress_counts_from_the_target_on():
    chosen = {"step": 10, "path": "/c/step_000000010.a0001", "sequence": 1}
    state = fold(*started(), commit(1), commit(2), commit(3), back_to(1), *attempt(2, chosen))
    assert (state.keeping.leaving, state.keeping.left) == (None, ((2, 3),))
    assert state.attempts_without_progress == 1
    state = fold(commit(4, step=20, attempt=2), state=state)
    assert (state.committed.step, state.attempts_without_progress, state.rollback) == (20, 0, None)
    assert [state.keeping.suspect(n) for n in (1, 2, 3, 4)] == [False, True, True, False]


def test_the_budget_begins_afresh_when_a_person_goes_back_and_not_when_the_guard_does():
    history = [*started(), commit(1), *attempt(2), *attempt(3)]
    assert fold(*history, back_to(1)).attempts_without_progress == 0
    assert fold(*history, back_to(1, source="guard")).attempts_without_progress == 2


def test_a_finished_run_that_is_rolled_back_can_train_again():
    over = events.RunEnded(t=8.0, outcome="finished", exit_status=0)
    state = fold(*started(), commit(1), commit(2), over, back_to(1))
    assert (state.status, state.outcome.outcome) == (Status.ENDED, "stopped")
    assert "step 10" in state.outcome.detail
    state = fold(events.DaemonStarted(t=9.0, policy=state.policy.to_dict()), state=state)
    assert state.status in (Status.STARTING, Status.STOPPING)


def test_the_guard_goes_back_to_the_newest_commit_and_passes_the_data_over_if_it_is_to():
    refused = events.SaveRejected(t=8.0, attempt=1, node="a", rank=0, step=30, why="NaN", position=360)
    ended = events.AttemptEnded(t=10.0, attempt=1, node="a", step=32)
    for skip, to in ((False, None), (True, 360)):
        state = fold(*started(on_reject="rollback", rollback_after=1, skip_data=skip), commit(1), commit(2), refused)
        recorded = []
        for after in (None, ended):
            state = state if after is None else fold(after, state=state)
            while isinstance((commands := decisions.decide(state, 10.0))[0], Record):
                recorded.append(commands[0].event)
                state = fold(recorded[-1], state=state)
        back = recorded[-1]
        assert [type(e).__name__ for e in recorded] == ["FailureDetected", "Interrupted", "RolledBack"]
        assert (back.to_step, back.sequence, back.samples, back.skip_to, back.source) == (20, 2, 240, to, "guard")


def test_pins_come_and_go_whatever_attempt_they_are_told_of():
    pin = events.CheckpointPinned(t=1.0, attempt=1, step=10, path="/fast/step_000000010.a0001", label="x", at=7.0)
    state = fold(*started(), *attempt(2), pin)
    assert list(state.keeping.pins) == ["step_000000010.a0001"]
    off = events.CheckpointPinned(t=2.0, step=10, path="s3://slow/step_000000010.a0001/", pinned=False)
    assert not fold(off, state=state).keeping.pins


@pytest.mark.parametrize("path", ["/a/step_1.a1", "/a/step_1.a1/", "s3://b/c/step_1.a1"])
def test_a_checkpoint_is_known_by_its_name(path):
    assert name_of(path) == "step_1.a1"


@given(st.lists(st.tuples(st.sampled_from(["commit", "back", "launch"]), st.integers(0, 30)), max_size=40))
def test_no_commit_of_a_branch_that_was_left_is_ever_trusted_again_and_no_other_is_suspected(story):
    """Against a model: the history as a tree, in which going back abandons what hangs behind."""
    keeping, sequence = Keeping(), 0
    trusted, suspects, going = [], set(), False
    for what, number in story:
        if what == "commit":
            sequence += 1
            (suspects.add if going else trusted.append)(sequence)
        elif what == "back" and trusted:
            target = trusted[number % len(trusted)]
            keeping = rolled_back(keeping, events.RolledBack(t=0.0, sequence=target))
            suspects |= {s for s in trusted if s > target}
            trusted = [s for s in trusted if s <= target]
            going = True
        elif what == "launch":
            keeping, going = launched(keeping, sequence), False
    assert {s for s in range(1, sequence + 1) if keeping.suspect(s)} == suspects
    as_json = [list(each) for each in keeping.suspects()]
    assert {s for s in range(1, sequence + 1) if is_suspect(as_json, s)} == suspects


def test_both_branches_are_in_the_picture_and_the_lost_time_is_wasted():
    chosen = {"step": 10, "path": "/c/step_000000010.a0001", "sequence": 1, "attempt": 1}
    history = [*started(), commit(1, t=10.0), commit(2, t=20.0), back_to(1, t=30.0)]
    history += [
        events.AttemptEnded(t=31.0, attempt=1, node="a", step=25),
        events.Interrupted(t=30.0, attempt=1, planned=True),
    ]
    before = picture.replay(history)
    after = picture.apply(before, events.AttemptLaunched(t=31.0, attempt=2, world_size=1, resume=chosen))
    assert before.account.useful.seconds == pytest.approx(28.0)
    assert after.account.useful.seconds == pytest.approx(8.0), "what commit 1 holds"
