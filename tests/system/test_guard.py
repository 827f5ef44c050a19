"""A parameter becomes NaN in the middle of training: no checkpoint ever holds it."""

from __future__ import annotations

import math

import pytest

from ckptd.core import events as ev
from ckptd_shim.contract import parse_checkpoint_dirname
from ckptd_shim.digest import verify_checkpoint
from system.checks import assert_told_once

pytestmark = pytest.mark.system


def poisoned(make_job, step, on_reject):
    """A run of 60 steps, saved every 10th, in whose first attempt a parameter of rank 0 is NaN from `step` on."""
    guard = {"on_reject": on_reject, "rollback_after": 2}
    return make_job("--steps", "60", "--pause", "0.05", "--fault", f"nan:{step}:0:1", guard=guard)


def assert_no_commit_is_poisoned(job):
    assert max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 1) == 20
    for path in job.commits():
        marker = verify_checkpoint(path)
        assert math.isfinite(marker.loss)
        assert marker.attempt > 1 or marker.step < 25
    on_disk = [parse_checkpoint_dirname(path.name) for path in (job.tier / "job").iterdir()]
    assert not [(step, attempt) for step, attempt in on_disk if attempt == 1 and step > 25], "nothing is left of it"


def test_a_run_goes_back_to_before_the_trouble_and_ends_as_if_it_had_not_been(make_job, reference):
    job = poisoned(make_job, 30, "rollback")
    assert job.run() == 0, job.output()
    refused = job.of(ev.SaveRejected)
    assert [e.step for e in refused][:2] == [30, 40]
    assert {(e.attempt, e.rank, e.tier) for e in refused} == {(1, 0, "disk")}
    assert [e.why for e in refused][:2] == ["model.0.weight holds NaN", "the loss is nan"]
    (interrupted,) = job.of(ev.Interrupted)
    assert (interrupted.cause, interrupted.severity, interrupted.planned) == ("guard", "code", False)
    assert interrupted.lost_steps >= 20
    assert [(e.resume or {}).get("step") for e in job.of(ev.AttemptLaunched)] == [None, 20]
    assert_no_commit_is_poisoned(job)
    assert_told_once(job)
    assert math.isnan(float.fromhex(first_word(job, 31))), "attempt 1 did compute NaN"
    assert job.losses() == reference(60)
    assert "SAVE REJECTED at step 30: model.0.weight holds NaN (rank 0)" in job.output()
    assert job.status()["saves"]["rejected"] == len(refused)


def first_word(job, step):
    """What the first attempt to get there had as the loss of a step."""
    lines = [line.split() for line in job.losses_path.read_text().splitlines()]
    return next(loss for at, loss in lines if int(at) == step)


def test_a_run_that_is_to_stop_says_what_it_saw_and_where_it_is_safe(make_job):
    job = poisoned(make_job, 25, "stop")
    assert job.run() == 1
    assert [e.step for e in job.of(ev.SaveRejected)][:1] == [30]
    assert len(job.of(ev.AttemptLaunched)) == 1
    assert_no_commit_is_poisoned(job)
    said = "the guard refused the state at step 30: the loss is nan (guard.on_reject: stop); the newest commit is of step 20"
    assert said in job.output()
    assert [(e.outcome, e.detail) for e in job.of(ev.RunEnded)] == [("failed", said)]
