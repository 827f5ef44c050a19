from __future__ import annotations

import pytest

from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.commands import Record
from ckptd.core.policy import Policy
from ckptd.core.state import Status

POLICY = Policy(run_id="r", name="n", max_interval_s=7200.0)


def training(policy=POLICY):
    """A run with one restart behind it, in training."""
    return [
        ev.DaemonStarted(t=0.0, policy=policy.to_dict()),
        ev.AgentConnected(t=1.0, node="a", devices=[{"index": 0}, {"index": 1}]),
        ev.HealthReported(t=1.0, node="a"),
        ev.InventoryReported(t=1.0, node="a"),
        ev.AttemptLaunched(t=2.0, attempt=1, world_size=2, placement={"a": [0, 1]}, devices_wanted=2),
        ev.WorkersStarted(t=3.0, attempt=1, node="a", workers={}),
        ev.WorkersInitialised(t=6.0, attempt=1, node="a", world_size=2),
        ev.StateRestored(t=7.0, attempt=1, node="a", step=0),
        ev.FirstStep(t=8.0, attempt=1, node="a", step=1),
        ev.SaveStaged(t=20.0, attempt=1, node="a", step=10, stall_s=0.5),
        ev.SaveCommitted(t=22.0, attempt=1, node="a", step=10, sequence=1, stall_s=0.5, upload_s=2.0, samples=120),
        ev.Progress(t=30.0, attempt=1, node="a", step=18, samples=216, step_s=1.0),
        ev.FailureDetected(t=32.0, detected_t=33.0, attempt=1, node="a", rank=1, exitcode=-9, step=20, detail="gone"),
        ev.AttemptEnded(t=34.0, attempt=1, node="a", step=20, exits=[
            {"rank": 0, "exitcode": -9, "killed_by_us": True, "order": 1}, {"rank": 1, "exitcode": -9, "order": 0}]),
    ]  # fmt: skip


def run_on(now, t):
    """Apply what is to be recorded at `t`; returns the picture, the records, and the orders that are left."""
    records = []
    for _ in range(10):
        commands = picture.decide(now, t)
        if not any(isinstance(c, Record) for c in commands):
            return now, records, commands
        records.append(commands[0].event)
        now = picture.apply(now, commands[0].event)
    raise AssertionError("recorded for ever")


def test_an_interruption_says_what_was_lost_in_steps_and_in_seconds():
    _, records, _ = run_on(picture.replay(training()), 34.0)
    lost = next(e for e in records if isinstance(e, ev.Interrupted))
    assert (lost.cause, lost.rank, lost.lost_steps, lost.detected_t) == ("signal", 1, 10, 33.0)
    assert lost.lost_seconds == pytest.approx(12.0)  # from the save at 20 to the death at 32


def test_a_restart_is_recorded_once_and_its_parts_sum_to_it():
    now, _, _ = run_on(picture.replay(training()), 34.0)
    for event in (
        ev.HealthReported(t=35.0, node="a"),
        ev.InventoryReported(t=35.5, node="a", commits=1, newest_sequence=1, chosen={
            "step": 10, "tier": "t", "path": "/c", "marker_crc32c": "0", "sequence": 1}),
    ):  # fmt: skip
        now = picture.apply(now, event)
    now, records, _ = run_on(now, 36.0)
    assert [e.resume["step"] for e in records if isinstance(e, ev.AttemptLaunched)] == [10]
    for event in (
        ev.WorkersStarted(t=37.0, attempt=2, node="a", workers={}),
        ev.WorkersInitialised(t=39.0, attempt=2, node="a"),
        ev.StateRestored(t=40.0, attempt=2, node="a", step=10),
        ev.FirstStep(t=42.0, attempt=2, node="a", step=11),
    ):
        now = picture.apply(now, event)
    now, records, _ = run_on(now, 43.0)
    restarted = [e for e in records if isinstance(e, ev.Restarted)]
    assert len(restarted) == 1
    parts = sum(getattr(restarted[0], f"{name}_s") for name in (
        "detect", "stop", "wait", "launch", "init", "restore", "first_step"))  # fmt: skip
    assert restarted[0].total_s == pytest.approx(parts) == pytest.approx(10.0)  # death at 32, first step at 42
    assert (restarted[0].detect_s, restarted[0].init_s, restarted[0].first_step_s) == pytest.approx((1.0, 2.0, 2.0))
    assert not [e for e in run_on(now, 44.0)[1] if isinstance(e, ev.Restarted)]


def test_an_interval_is_decided_when_it_is_first_known_and_not_again_for_nothing():
    now = picture.replay(training()[:9])
    now, records, _ = run_on(now, 8.0)
    decided = [e for e in records if isinstance(e, ev.IntervalDecided)]
    assert len(decided) == 1
    assert now.decision is not None
    assert now.proposal is None
    assert run_on(now, 9.0)[1] == []
    now = picture.apply(now, ev.Progress(t=10.0, attempt=1, node="a", step=3))
    assert not [e for e in run_on(now, 10.0)[1] if isinstance(e, ev.IntervalDecided)]


def test_every_prefix_of_a_history_can_be_shown():
    history = training()
    for n in range(len(history) + 1):
        now = picture.replay(history[:n])
        assert now.world >= 1
        assert now.estimate.mtbf_s > 0


def test_replaying_is_folding():
    now = picture.Picture()
    for event in training():
        now = picture.apply(now, event)
    assert now == picture.replay(training())
    assert now.run.status is Status.STOPPING
    assert (now.saves, now.last_save.step) == (1, 10)
