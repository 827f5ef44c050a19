"""Hangs are seen, devices that strike are left out, doubtful checkpoints are passed over, and R is told part by part."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from ckptd.core import events as ev
from system.harness import reference_losses

HASTY = {"floor": "2s", "factor": 10, "startup": "60s"}


def test_a_read_that_never_returns_is_told_from_the_ranks_that_wait_for_it(make_job):
    # Both ranks sleep at the same step; only their stacks tell which one is not in a collective.
    job = make_job("--steps", "40", "--fault", "fifo:25:0:1", hang=HASTY)
    assert job.run() == 0, job.output()
    (interrupted,) = job.of(ev.Interrupted)
    assert (interrupted.cause, interrupted.rank) == ("hang", 0), interrupted
    assert "commit_fault" in interrupted.message


def test_collectives_out_of_step_are_a_hang_long_before_the_library_gives_up(make_job):
    job = make_job("--steps", "40", "--fault", "mismatch:25:1:1", hang=HASTY)
    job.start()
    interrupted = job.wait_for(ev.Interrupted)
    # gloo may refuse such a pair of collectives at once: then it is an exception, and as well.
    assert interrupted.cause in ("hang", "exception", "connection_lost"), interrupted
    assert job.wait() == 0, job.output()


def test_what_a_worker_leaves_behind_is_ended_and_told(make_job):
    job = make_job("--steps", "40", "--fault", "daemon:15:1:1", "--fault", "kill:25:1:1")
    assert job.run() == 0, job.output()
    ended = job.of(ev.AttemptEnded)[0]
    assert len(ended.leftovers) == 1, ended
    assert not os.path.exists(f"/proc/{ended.leftovers[0]['pid']}")
    assert "left-over" in job.output()


@pytest.mark.parametrize("kind", ["hang", "freeze"])
def test_a_rank_that_stands_is_seen_named_and_replaced(kind, make_job, tmp_path):
    job = make_job("--steps", "50", "--fault", f"{kind}:25:1:1", hang=HASTY)
    assert job.run() == 0, job.output()
    (interrupted,) = job.of(ev.Interrupted)
    assert (interrupted.cause, interrupted.rank, interrupted.planned) == ("hang", 1, False), interrupted
    stacks = job.attempt_dir(1) / "rank0.stacks"
    assert "train.py" in stacks.read_text(), "the rank that waited left no stacks"
    if kind == "hang":
        assert "faults" in (job.attempt_dir(1) / "rank1.stacks").read_text()
        assert "faults" in interrupted.message
    restarted = job.of(ev.Restarted)[-1]
    assert restarted.detect_s >= 2.0, "the silence belongs to the cost of the restart"
    assert job.losses() == reference_losses(tmp_path / "reference", "--steps", "50", "--pause", "0")


def test_a_job_that_is_done_but_does_not_end_is_finished(make_job):
    job = make_job("--steps", "15", "--linger", hang=HASTY)
    assert job.run() == 0, job.output()
    (ended,) = job.of(ev.RunEnded)
    assert ended.outcome == "finished"
    assert len(job.of(ev.AttemptLaunched)) == 1
    assert not job.left_over()


def test_a_device_that_kills_its_rank_is_left_out(make_job):
    job = make_job(
        "--steps", "40", "--fault", "device:2", devices=3,
        restart={"max_without_progress": 3}, checkpoint={"interval": {"steps": 10}},
    )  # fmt: skip
    assert job.run() == 0, job.output()
    assert [e.world_size for e in job.of(ev.AttemptLaunched)] == [3, 3, 3, 2]
    assert job.of(ev.AttemptLaunched)[-1].placement == {"local": [0, 1]}
    (left_out,) = job.status()["devices_left_out"]
    assert (left_out["index"], "failures were put down to it" in left_out["why"]) == (2, True)


def test_drain_and_undrain_while_it_trains(make_job):
    job = make_job("--steps", "100000", devices=2, checkpoint={"interval": {"steps": 20}})
    job.start()
    job.wait_for(ev.SaveCommitted)
    refused = job.ckptd("drain", "7", str(job.run_dir))
    assert refused.returncode == 64
    assert "local:0, local:1" in refused.stderr
    assert job.ckptd("drain", "1", str(job.run_dir)).returncode == 0
    shrunk = job.wait_for(ev.FirstStep, lambda e: e.attempt == 2)
    launched = job.of(ev.AttemptLaunched)[1]
    assert launched.placement == {"local": [0]}
    assert shrunk.step == launched.resume["step"] + 1 > 1, "draining lost steps"
    assert job.ckptd("undrain", "local:1", str(job.run_dir)).returncode == 0
    grown = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 3)
    assert grown.world_size == 2
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 3)
    assert [(e.planned, e.lost_steps) for e in job.of(ev.Interrupted)] == [(True, 0), (True, 0)]
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75


def test_a_checkpoint_after_which_the_same_failure_comes_twice_is_passed_over(make_job):
    job = make_job(
        "--steps", "60", "--fault", "raise:33:0:1", "--fault", "poison:30", checkpoint={"interval": {"steps": 10}}
    )
    assert job.run() == 0, job.output()
    assert [(e.resume or {}).get("step") for e in job.of(ev.AttemptLaunched)] == [None, 30, 30, 20]


def test_an_exception_that_follows_from_two_checkpoints_ends_the_run(make_job):
    job = make_job("--steps", "60", "--fault", "raise:33", restart={"max_without_progress": 20})
    assert job.run() == 1, job.output()
    assert [(e.resume or {}).get("step") for e in job.of(ev.AttemptLaunched)] == [None, 30]
    assert "planted at step 33" in job.output()


def test_the_parts_of_a_restart_sum_and_it_was_warm(make_job):
    job = make_job("--steps", "60")
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= 20)
    before = time.monotonic()
    os.kill(job.workers()[0], signal.SIGKILL)
    restarted = job.wait_for(ev.Restarted)
    assert restarted.total_s <= time.monotonic() - before + 0.2
    parts = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s")
    assert sum(getattr(restarted, part) for part in parts) == pytest.approx(restarted.total_s)
    assert restarted.warm
    assert job.wait() == 0
    told = json.loads(job.ckptd("report", str(job.run_dir), "--json").stdout)
    assert [row["total_s"] for row in told["restarts"]] == [pytest.approx(restarted.total_s)]
    assert "rank 0 was killed by SIGKILL" in job.ckptd("report", str(job.run_dir), "--text").stdout
    status = job.status()
    assert status["last_restart"]["total_s"] == pytest.approx(restarted.total_s)


def test_a_preload_that_starts_threads_means_a_cold_start_that_says_why(make_job, tmp_path):
    directory = tmp_path / "job0"
    directory.mkdir()
    (directory / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    job = make_job("--steps", "12", restart={"preload": ["threaded"]}, workdir=str(directory))
    # The module is looked for beside the script and in PYTHONPATH, as the script itself would find it.
    assert (job.start(env={"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}), job.wait())[1] == 0
    assert not job.of(ev.WorkersStarted)[0].warm
    notes = [e.what for e in job.of(ev.Noted)]
    assert any("cold" in what and "threaded" in what for what in notes), notes
    assert json.loads(job.ckptd("events", str(job.run_dir), "--json").stdout)
