"""Real jobs of a real Slurm: whatever it takes away, there is one attempt, from the newest commit, and nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptd.core import events as ev
from system.checks import assert_same_losses
from system.slurm.cluster import Cluster, missing
from system.slurm.jobs import SlurmJob

WHY_NOT = missing()
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(
        400
    ),  # Slurm itself waits for a minute in all: until a node is down, and before a job is queued again
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "c")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits jobs; at the end none of them is there, and no process that one of them started."""
    made = []

    def make(*args, options=(), **sections):
        job = SlurmJob(slurm, tmp_path / f"job{len(made)}", *args, **sections)
        made.append(job)
        job.submit(*options)
        return job

    yield make
    for job in made:  # that it can end in peace is shown where it is told to
        slurm.ask("scancel", "--signal=KILL", "--full", job.id, check=False)
        slurm.ask("scancel", job.id, check=False)
    slurm.wait_until(lambda: not slurm.ask("squeue", "-h", check=False), "no job is left")
    slurm.wait_until(lambda: not slurm.left_over(), "no process of a job is left", timeout=20)


def command_lines():
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                found.append(Path(f"/proc/{entry}/cmdline").read_bytes())
            except OSError:
                continue
    return found


def test_a_job_of_two_nodes_trains_as_two_workers_of_one_machine_do(submit, slurm, reference):
    job = submit("--steps", "60")
    job.wait_for(ev.FirstStep)
    secret = (job.run_dir / "secret").read_text().strip()
    assert secret and not any(secret.encode() in line for line in command_lines())
    job.wait_until(lambda: job.state() == "COMPLETED", "the job is completed")
    (launched,) = job.of(ev.AttemptLaunched)
    assert launched.placement == {"n1": [0], "n2": [0]}
    assert_same_losses(job, reference(60))
    assert list((job.run_dir / "srun").iterdir()) == []


def test_a_drain_a_dead_daemon_a_silent_controller_and_a_lost_node_cost_no_more_than_they_must(submit, slurm):
    job = submit("--steps", "100000", "--pause", "0.05")
    job.wait_for(ev.SaveCommitted)

    # The daemon dies: the batch script starts another one, to which the agents dial. Training has not noticed.
    os.kill(job.daemon().pid, signal.SIGKILL)
    job.wait_until(lambda: len(job.of(ev.AgentConnected)) == 4, "both agents have dialled in again")
    assert len(job.of(ev.DaemonStarted)) == 2 and len(job.of(ev.AttemptLaunched)) == 1

    # An agent dies: a further srun starts another one on its node.
    dead = job.agent("n2")
    os.kill(dead.pid, signal.SIGKILL)
    second = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 2)
    assert second.placement == {"n1": [0], "n2": [0]}
    assert second.resume["step"] == max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 1)
    assert job.agent("n2") != dead and job.alive_on("n2", 1) == []

    # An administrator drains a node: after a commit training is on the other one; and back, once it is free again.
    slurm.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=fan tray")
    third = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 3)
    assert third.placement == {"n1": [0]} and third.resume["step"] > second.resume["step"]
    drained = job.of(ev.DeviceDrained)[-1]
    assert drained.drained and "fan tray" in drained.source
    assert job.of(ev.Interrupted)[-1].planned and job.of(ev.Interrupted)[-1].lost_steps == 0
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 3)
    slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
    fourth = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 4)
    assert fourth.placement == {"n1": [0], "n2": [0]}
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 4)

    # The controller is away, and nothing happens; a node dies meanwhile, and Slurm cannot even say so.
    slurm.kill_controller()
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 4)
    slurm.kill_node("n2")
    fifth = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 5)
    assert fifth.placement == {"n1": [0]}
    assert fifth.resume["step"] == max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 4)
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 5)
    slurm.start_controller()
    slurm.wait_until(lambda: slurm.states().get("n2", "").startswith("down"), "n2 is down")
    assert job.state() == "RUNNING"
    slurm.start_node("n2")

    # scancel: saved within KillWait, ended for good, not queued again.
    slurm.ask("scancel", job.id)
    ended = job.wait_for(ev.RunEnded)
    assert (ended.outcome, ended.exit_status) == ("stopped", 75)
    assert job.of(ev.SaveCommitted)[-1].step == max(job.losses())
    slurm.wait_until(lambda: job.state() == "CANCELLED", "the job is cancelled")


def test_a_job_that_runs_out_of_time_or_loses_a_node_is_queued_again_and_goes_on_from_its_commit(submit, slurm):
    job = submit("--steps", "100000", "--pause", "0.05", options=["--no-kill=off"])
    job.wait_for(ev.SaveCommitted)
    job.signal("USR1")
    ended = job.wait_for(ev.RunEnded)
    assert (ended.outcome, ended.exit_status) == ("stopped", 75)
    saved = job.of(ev.SaveCommitted)[-1].step
    assert saved == max(job.losses())
    second = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert second.resume["step"] == saved
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)

    # Without --no-kill a lost node ends the job, sooner or later, and Slurm starts it again on others.
    lost = next(n for n in second.placement if n != slurm.batch_host(job.id))
    slurm.kill_node(lost)
    third = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt > 2 and len(e.placement) == 2)
    assert lost not in third.placement
    assert third.resume["step"] == max(e.step for e in job.of(ev.SaveCommitted) if e.attempt < third.attempt)
    job.wait_for(ev.FirstStep, lambda e: e.attempt == third.attempt)
    slurm.start_node(lost)
