"""The batch script, run by bash as slurmd does. Slurm's `scontrol` only writes down what it is asked, and `squeue` reads a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.core import events as ev

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "ckptd.sbatch"


@pytest.fixture
def batch(tmp_path):
    """Starts the script on a job; what it asks of Slurm is found in `asked`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    asked = tmp_path / "asked"
    paths = os.pathsep.join(p for p in sys.path if p.endswith(("supervisor", "trainer_shim")))
    (tmp_path / "state").write_text("RUNNING")
    for name, text in (
        ("squeue", f"cat {tmp_path / 'state'}"),
        ("ckptd", f'PYTHONPATH={paths} exec {sys.executable} -m ckptd "$@"'),
        ("scontrol", f'echo "$@" >> {asked}'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    asked.touch()

    def start(job, **env):
        with open(job.output_path, "ab") as output:
            job.process = subprocess.Popen(
                [str(SCRIPT), str(job.path)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
                env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **env},
            )  # fmt: skip
        return asked

    return start


def test_a_job_that_runs_out_of_time_saves_and_is_queued_again_and_one_that_is_stopped_by_hand_is_not(make_job, batch):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1, checkpoint={"interval": {"steps": 100000}})
    asked = batch(job)
    job.wait_for(ev.FirstStep)
    job.process.send_signal(signal.SIGUSR1)  # to the shell alone
    assert job.wait() == 75, job.output()
    assert asked.read_text() == "requeue 77\n"
    assert job.of(ev.SaveCommitted)[-1].step == max(job.losses())
    assert job.left_over() == []

    # The node broke, says Slurm, and starts it on another one: the lock names a host that cannot be asked.
    (job.run_dir / "lock").write_text(
        '{"host": "elsewhere", "pid": 1, "start_time": 1, "boot_id": "other", "since": 0.0, "version": "0"}'
    )
    asked = batch(job, SLURM_RESTART_COUNT="1")
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 2)
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75, job.output()
    assert asked.read_text() == "requeue 77\n", "once, and not again"


def test_a_job_that_is_wrong_is_not_queued_again(make_job, batch):
    job = make_job()
    job.path.write_text("version: 1\n")
    asked = batch(job)
    assert job.wait() == 78, job.output()
    assert asked.read_text() == ""


def test_a_daemon_that_is_killed_is_started_again_and_a_cancelled_job_is_not_queued_again(make_job, batch, tmp_path):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1, checkpoint={"interval": {"steps": 100000}})
    asked = batch(job)
    job.wait_for(ev.FirstStep)
    os.kill(job.of(ev.DaemonStarted)[0].pid, signal.SIGKILL)
    job.wait_until(lambda: len(job.of(ev.AgentConnected)) == 2, "the agent has dialled the next daemon")
    assert len(job.of(ev.AttemptLaunched)) == 1

    (tmp_path / "state").write_text("COMPLETING")  # as after scancel, which sends SIGTERM to all that there is
    os.kill(job.of(ev.DaemonStarted)[-1].pid, signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()
    assert job.of(ev.SaveCommitted)[-1].step == max(job.losses())
    assert asked.read_text() == ""
