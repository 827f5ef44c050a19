"""The status document: the same keys at every moment of a run, JSON, and no number that is not one."""

from __future__ import annotations

import json

import pytest

from ckptd import status
from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.accounting import PHASES
from ckptd.core.policy import Policy

KEYS = {
    "name", "state", "attempt", "step", "samples_seen", "world_size", "devices_healthy", "last_committed", "interval",
    "estimates", "failures", "restarts", "goodput", "last_interruption",
}  # fmt: skip
LIVE = {
    "0": {"step": 41, "samples": 492, "phase": "step", "beat_age_s": 0.0, "loss": 0.5, "step_s": 0.25, "pid": 9},
    "1": {"step": 42, "samples": 504, "phase": "step", "beat_age_s": 0.0, "loss": None, "step_s": 0.25, "pid": 10},
}


def history(**policy):
    return [
        ev.DaemonStarted(t=0.0, policy=Policy(name="job", run_id="r", **policy).to_dict()),
        ev.AgentConnected(t=0.1, node="local", devices=[{"index": 0}, {"index": 1}]),
        ev.HealthReported(t=0.2, node="local"),
        ev.InventoryReported(t=0.3, node="local"),
        ev.AttemptLaunched(t=0.4, attempt=1, world_size=2, placement={"local": [0, 1]}),
        ev.WorkersStarted(t=0.5, attempt=1, node="local"),
        ev.WorkersInitialised(t=1.0, attempt=1),
        ev.StateRestored(t=1.1, attempt=1),
        ev.FirstStep(t=1.5, attempt=1, step=1),
        ev.SaveCommitted(t=8.0, at=1.7e9, attempt=1, step=30, samples=360, tier="disk", path="/c/s", stall_s=0.1, upload_s=1.0),
        ev.FailureDetected(t=9.0, detected_t=9.1, attempt=1, node="local", rank=1, exitcode=-9, step=33),
        ev.AttemptEnded(t=9.2, attempt=1, node="local", step=33),
        ev.Interrupted(t=9.0, detected_t=9.1, attempt=1, cause="signal", rank=1, lost_steps=3, step=33),
        ev.RunEnded(t=10.0, at=1.7e9, outcome="failed", exit_status=1, detail="enough"),
    ]  # fmt: skip


@pytest.mark.parametrize("length", range(len(history()) + 1))
def test_every_moment_has_every_key(length):
    document = status.document(picture.replay(history()[:length]), t=11.0, live=LIVE)
    assert document.keys() >= KEYS
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document["goodput"]["seconds_by_phase"]) == set(PHASES)
    assert sum(document["goodput"]["seconds_by_phase"].values()) == pytest.approx(document["goodput"]["wall_s"])


def test_what_ranks_say_counts_while_they_live_and_not_afterwards():
    training, over = (picture.replay(history()[:n]) for n in (10, 14))
    live = status.document(training, t=8.5, live=LIVE)
    assert (live["step"], live["samples_seen"], live["loss"], live["state"]) == (42, 492, 0.5, "training")
    ended = status.document(over, t=11.0, live=LIVE)
    assert (ended["step"], ended["samples_seen"], ended["loss"], ended["state"]) == (33, 360, None, "ended")
    assert ended["outcome"]["exit_status"] == 1
    assert ended["last_interruption"]["rank"] == 1


def test_the_front_rank_is_the_furthest_with_the_loss_of_the_first():
    assert status.front_rank(None) is None
    assert status.front_rank({}) is None
    many = {str(rank): {**LIVE["1"], "step": rank} for rank in range(12)}
    many["0"]["loss"] = 0.25
    assert (status.front_rank(many)["step"], status.front_rank(many)["loss"]) == (11, 0.25)


def test_an_interval_in_seconds_is_shown_in_steps_as_soon_as_a_steps_time_is_known():
    past = picture.replay(history(interval_s=10.0)[:9])
    decided = picture.apply(past, picture.decide(past, 1.6)[0].event)
    assert decided.decision.interval_s == 10.0
    assert status.document(decided, t=2.0)["interval"]["steps"] is None
    assert status.document(decided, t=2.0, live=LIVE)["interval"]["steps"] == 40


def test_an_interval_in_steps_is_shown_as_it_was_asked_for():
    past = picture.replay(history(interval_steps=500)[:9])
    decided = picture.apply(past, picture.decide(past, 1.6)[0].event)
    assert status.document(decided, t=2.0, live=LIVE)["interval"]["steps"] == 500


def test_the_audit_says_what_to_do_with_what_is_known_now():
    """An interval of job.yaml is decided once, before anything is measured; the advice comes later."""
    happened = [*history(interval_s=2.0)[:9], ev.IntervalDecided(t=1.6, interval_s=2.0, reason="job.yaml asks for 2 s")]
    t = 2.0
    for attempt in range(1, 12):
        happened += [
            ev.SaveCommitted(t=t + 50, attempt=attempt, step=10 * attempt, tier="disk", stall_s=5.0, upload_s=1.0),
            ev.FailureDetected(t=t + 50.5, detected_t=t + 50.5, attempt=attempt, node="local", rank=0, exitcode=-9),
            ev.AttemptEnded(t=t + 51, attempt=attempt, node="local"),
            ev.Interrupted(t=t + 50.5, detected_t=t + 50.5, attempt=attempt, cause="signal"),
            ev.AttemptLaunched(t=t + 52, attempt=attempt + 1, world_size=2, placement={"local": [0, 1]},
                               resume={"step": 10 * attempt, "attempt": attempt}),
            ev.FirstStep(t=t + 60, attempt=attempt + 1, step=10 * attempt + 1),
        ]  # fmt: skip
        t += 60
    document = status.document(picture.replay(happened), t=t)
    audit = document["audit"]
    assert (audit["failures"], audit["saving_s"], audit["balanced"]) == (11, 55.0, False)
    assert "saves too often; let it be auto, or about" in audit["advice"]
    rates = document["estimates"]["failures_per_day_by_severity"]
    assert sum(rates.values()) == pytest.approx(86_400 / document["estimates"]["mtbf_s"])
    assert rates["process"] > 0.9 * sum(rates.values())


def test_of_a_large_world_those_that_are_behind_are_shown_and_all_are_counted():
    size = 4 * status.MOST_RANKS
    live = {str(rank): {**LIVE["0"], "step": 40 + rank % 7, "samples": rank} for rank in range(size)}
    live["777"] = {**LIVE["0"], "step": 3}
    found = status.document(picture.replay(history()[:10]), t=8.5, live=live)
    assert (found["ranks_heard"], len(found["ranks"])) == (size, status.MOST_RANKS)
    assert min(found["ranks"], key=lambda rank: found["ranks"][rank]["step"]) == "777"
    assert (found["step"], found["samples_seen"]) == (46, 0), "the furthest step, and what rank 0 says"
