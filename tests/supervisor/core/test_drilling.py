import math

import pytest

from ckptd.core import drilling, events
from ckptd.core.commands import Rehearse
from ckptd.core.drilling import Drills, judge
from ckptd.core.policy import Policy
from ckptd.core.state import RunState, Status


def training(**policy):
    return RunState(policy=Policy(**policy), status=Status.TRAINING)


def fold(*happened):
    drills = Drills()
    for event in happened:
        drills = drilling.apply(drills, event)
    return drills


def test_nothing_is_due_before_the_first_commit_or_without_a_period():
    hourly = training(drill_every_s=3600.0, drill_tier="disk")
    assert drilling.decide(fold(), hourly, 1e6) == []
    saved = fold(events.SaveCommitted(t=100.0, step=1))
    assert drilling.decide(saved, hourly, 3699.0) == []
    assert drilling.decide(saved, hourly, 3700.0) == [Rehearse(tier="disk")]
    assert drilling.decide(saved, training(), 1e9) == []


def test_a_failed_drill_is_not_tried_again_at_once():
    drills = fold(events.SaveCommitted(t=0.0, step=1), events.Drilled(t=50.0, tier="disk", ok=False))
    hourly = training(drill_every_s=3600.0)
    assert drilling.decide(drills, hourly, 3000.0) == []
    assert drilling.decide(drills, hourly, 3650.0) == [Rehearse(tier=None)]


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.TRAINING])
def test_drills_wait_for_training(status):
    drills = fold(events.SaveCommitted(t=0.0, step=1))
    state = RunState(policy=Policy(drill_every_s=1.0), status=status)
    assert drilling.decide(drills, state, 1e6) == []


def test_a_bad_drill_leaves_the_last_good_one_known():
    drills = fold(
        events.Drilled(t=1.0, at=10.0, tier="disk", step=5, ok=True),
        events.Drilled(t=2.0, at=20.0, tier="durable", step=4, ok=True),
        events.Drilled(t=3.0, at=30.0, tier="disk", step=9, ok=False, problem="flipped"),
    )
    assert {tier: d.at for tier, d in drills.last_good.items()} == {"disk": 10.0, "durable": 20.0}
    assert {tier: d.ok for tier, d in drills.last.items()} == {"disk": False, "durable": True}
    assert drills.newest.problem == "flipped"


@pytest.mark.parametrize(
    ("loss", "expected", "compared", "fine"),
    [
        (1.0, 1.0, "validation", True),
        (1.09, 1.0, "validation", True),
        (1.11, 1.0, "validation", False),
        (0.2, 1.0, "validation", True),  # better is never wrong
        (4.9, 1.0, "training", True),
        (5.1, 1.0, "training", False),
        (-0.95, -1.0, "validation", True),
        (-0.5, -1.0, "validation", False),
        (7.0, None, "training", True),
        (None, 1.0, "validation", False),
        (math.nan, None, "training", False),
    ],
)
def test_a_loss_is_good_enough_or_the_reason_is_given(loss, expected, compared, fine):
    assert (judge(loss=loss, expected=expected, compared=compared, tolerance=0.1) == "") is fine


def test_a_training_loss_is_held_against_how_much_such_losses_differ():
    def verdict(loss):
        return judge(loss=loss, expected=1.0, compared="training", tolerance=0.1, deviation=0.05)

    assert verdict(1.39) == ""
    assert "training" in verdict(1.41)
