"""An end with status 0 that was not the end of training is told apart from one that was."""

import pytest

from ckptd.core import decisions, run
from ckptd.core import events as ev
from ckptd.core.commands import Record
from ckptd.core.policy import Policy

COMMIT = {"step": 10, "tier": "disk", "path": "/c", "marker_crc32c": "0", "sequence": 1}


def launched(attempt=1, resume=None, *, shim=True, step=0):
    """An attempt that got as far as a resume, and to `step` if that is above 0."""
    history = [
        ev.AttemptLaunched(t=2.0, attempt=attempt, world_size=1, placement={"a": [0]}, resume=resume),
        ev.WorkersStarted(t=3.0, attempt=attempt, node="a"),
    ]
    begun = (resume or {}).get("step", 0)
    if shim:
        history += [
            ev.WorkersInitialised(t=4.0, attempt=attempt, node="a"),
            ev.StateRestored(t=5.0, attempt=attempt, node="a", step=begun),
        ]
    if step > begun:
        history.append(ev.FirstStep(t=6.0, attempt=attempt, node="a", step=begun + 1))
    return history


def ended(attempt=1, *, step, closed=True, stopping=False, total_steps=None):
    return [
        ev.WorkersFinished(
            t=7.0, attempt=attempt, node="a", step=step, closed=closed, stopping=stopping, total_steps=total_steps
        ),
        ev.AttemptEnded(t=7.0, attempt=attempt, node="a", step=step),
    ]


def killed(attempt=1, *, step):
    return [
        ev.FailureDetected(t=7.0, attempt=attempt, node="a", step=step, exitcode=-9),
        ev.AttemptEnded(t=7.0, attempt=attempt, node="a", step=step),
        ev.Interrupted(t=7.0, attempt=attempt, step=step),
    ]


def outcome(*history):
    state = run.RunState()
    begin = [
        ev.DaemonStarted(t=0.0, policy=Policy(run_id="r", name="n").to_dict()),
        ev.AgentConnected(t=1.0, node="a", devices=[{"index": 0}]),
    ]
    for event in begin + [each for part in history for each in part]:
        state = run.apply(state, event)
    commands = decisions.decide(state, 8.0)
    assert len(commands) == 1 and isinstance(commands[0], Record), commands
    event = commands[0].event
    assert isinstance(event, ev.RunEnded)
    assert event.exit_status == (0 if event.outcome == "finished" else 1)
    return event.outcome, event.detail


@pytest.mark.parametrize(
    "history, words",
    [
        ([launched(), ended(step=0)], "is there anything to train on, and is shim.step() called?"),
        ([launched(), ended(step=0, total_steps=50)], "the target is 50"),
        ([launched(resume=COMMIT), ended(step=10, total_steps=50)], "the target is 50"),
        ([launched(step=15), ended(step=15, closed=False)], "without shim.close()"),
        ([launched(), ended(step=0, closed=False)], "without shim.close()"),
        (
            [launched(step=13), killed(step=13), launched(2, COMMIT), ended(2, step=10)],
            "an earlier attempt went on to step 13",
        ),
        (
            [launched(step=10), ended(step=10, stopping=True), launched(2, COMMIT), ended(2, step=10)],
            "total_steps=10",
        ),
    ],
)
def test_an_end_without_a_step_where_training_was_to_go_on(history, words):
    what, detail = outcome(*history)
    assert what == "ended early"
    assert words in detail


@pytest.mark.parametrize(
    "history",
    [
        [launched(step=15), ended(step=15)],
        [launched(resume=COMMIT, step=15), ended(step=15)],
        # Killed between the last commit and its exit, it has nothing left to do.
        [launched(step=10), killed(step=10), launched(2, COMMIT), ended(2, step=10)],
        [launched(resume=COMMIT), ended(step=10)],
        [launched(step=10), ended(step=10, stopping=True), launched(2, COMMIT), ended(2, step=10, total_steps=10)],
        # Nothing is known of a script without a shim.
        [launched(shim=False), ended(step=0, closed=False)],
    ],
)
def test_a_real_end_is_one(history):
    assert outcome(*history)[0] == "finished"


def test_a_script_without_a_shim_is_told_that_nothing_was_saved():
    assert "made no TrainerShim" in outcome(launched(shim=False), ended(step=0, closed=False))[1]
    assert outcome(launched(step=15), ended(step=15))[1] == "training finished at step 15"


def test_what_no_restart_cures_is_not_tried_again():
    setup = ev.Interrupted(t=7.0, attempt=1, cause="setup_error", severity="code", detail="5 samples, a batch of 12")
    what, detail = outcome([*launched()[:2], *killed(step=0)[:2], setup])
    assert what == "failed"
    assert detail == "no restart cures this: 5 samples, a batch of 12"
