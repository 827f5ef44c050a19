"""Workers are killed: training goes on from the newest commit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from ckptd.core import events as ev
from ckptd.node.processes import read_stat
from system.checks import alive, assert_same_losses, assert_told_once, newest_on_disk

pytestmark = pytest.mark.system


def test_a_killed_worker_costs_nothing_but_time(make_job, reference):
    job = make_job("--steps", "60")
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= 20)
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait() == 0, job.output()
    interrupted = job.of(ev.Interrupted)
    assert [(e.cause, e.severity, e.rank, e.planned) for e in interrupted] == [("signal", "process", 1, False)]
    assert interrupted[0].detail == "rank 1 was killed by SIGKILL"  # and no guess at the memory without evidence
    newest = max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 1)
    assert job.of(ev.AttemptLaunched)[1].resume["step"] == newest
    assert_same_losses(job, reference(60))


KILLS = 20
STEPS = 700


@pytest.mark.timeout(300)
def test_twenty_kills_at_random_moments(make_job, reference):
    """Some hit imports and restores, some training, and, with a save every few steps, many hit a save or a commit.

    Killed again and again, a rank brings its device under suspicion; `min_devices` keeps it in use.
    """
    rng = random.Random(20)
    job = make_job(
        "--steps", str(STEPS), "--pause", "0.005", checkpoint={"interval": {"steps": 4}},
        restart={"max_without_progress": KILLS}, cluster={"min_devices": 2},
    )  # fmt: skip
    job.start()
    for attempt in range(1, KILLS + 1):
        kind = ev.WorkersStarted if rng.random() < 0.25 else ev.FirstStep
        job.wait_for(kind, lambda e, attempt=attempt: e.attempt == attempt)
        time.sleep(rng.uniform(0.0, 0.4))
        os.kill(job.workers(attempt)[rng.randrange(2)], signal.SIGKILL)
        launched = job.wait_for(ev.AttemptLaunched, lambda e, attempt=attempt: e.attempt == attempt + 1)
        assert not alive(job, attempt), "launched beside the attempt before"
        newest = newest_on_disk(job, before=launched.attempt)
        resumed = launched.resume and (launched.resume["sequence"], launched.resume["step"])
        assert resumed == (newest and (newest.sequence, newest.step)), job.story()
    assert job.wait(120) == 0, job.output()
    assert len(job.of(ev.Interrupted)) == KILLS, job.story()
    assert {e.cause for e in job.of(ev.Interrupted)} == {"signal"}
    assert_told_once(job)
    assert_same_losses(job, reference(STEPS))
    # The kills were worth something: at least one hit a save between its staging and its commit.
    staged = {(e.attempt, e.step) for e in job.of(ev.SaveStaged)}
    committed = {(e.attempt, e.step) for e in job.of(ev.SaveCommitted)}
    assert staged - committed
    assert job.status()["restarts"] == KILLS


def test_all_workers_and_then_the_agent_are_killed(make_job, reference):
    job = make_job("--steps", "120")
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= 10)
    for pid in job.workers().values():
        os.kill(pid, signal.SIGKILL)
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    workers, agent = job.workers(2), job.agent_pid()
    os.kill(agent, signal.SIGKILL)
    job.wait_for(ev.AgentLost)
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 3)
    assert not alive(job, 2), "the orphans live"
    assert launched.resume["sequence"] == newest_on_disk(job, before=3).sequence
    assert job.wait() == 0, job.output()
    first, second = job.of(ev.Interrupted)
    assert (first.cause, first.severity) == ("signal", "process")
    assert (second.cause, second.severity) == ("agent_lost", "node")
    ended = next(e for e in job.of(ev.AttemptEnded) if e.attempt == 2)
    assert set(workers.values()) <= {p["pid"] for p in ended.leftovers}
    assert_told_once(job)
    assert_same_losses(job, reference(120))


def test_the_daemon_is_killed_and_then_the_agent_with_it(make_job, reference):
    """Alone it changes nothing: the next daemon adopts what runs. With its agent: the orphans go, training goes on."""
    job = make_job("--steps", "260", checkpoint={"interval": {"steps": 40}})
    job.start()
    job.wait_for(ev.SaveCommitted)
    workers, agent = job.workers(), job.agent_pid()
    before = control_of(job)
    job.process.kill()
    job.process.wait()
    trained = max(job.losses())
    job.wait_until(lambda: max(job.losses()) > trained + 5, "training goes on without a daemon")
    job.start()
    job.wait_for(ev.AgentConnected, lambda e: e.running == 1)
    assert (job.workers(), job.agent_pid()) == (workers, agent)
    job.wait_until(lambda: control_of(job)["seq"] > before["seq"], "the control file is written by the new daemon")
    assert {k: control_of(job)[k] for k in ("attempt", "interval_steps")} == {"attempt": 1, "interval_steps": 40}
    saved = job.ckptd("save", str(job.run_dir))
    assert saved.returncode == 0, saved.stderr
    assert len(job.of(ev.AttemptLaunched)) == 1
    lines = job.losses_path.read_text().splitlines()
    assert len(lines) == len({line.partition(" ")[0] for line in lines}), "a step was trained twice"

    job.process.kill()
    os.kill(agent, signal.SIGKILL)
    job.process.wait()
    assert read_stat(workers[0]) is not None, "the workers should have outlived both"
    job.start()
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert not alive(job, 1), "the orphans live"
    assert launched.resume["sequence"] == newest_on_disk(job, before=2).sequence
    assert job.wait() == 0, job.output()
    assert [e.cause for e in job.of(ev.Interrupted)] == ["agent_lost"], job.story()
    assert_told_once(job)
    assert_same_losses(job, reference(260))


def control_of(job):
    return json.loads((job.run_dir / "control.json").read_text())
