"""What must hold of a run on hosts, and what several tests do with one."""

from __future__ import annotations

import time

from ckptd.core import events as ev
from ckptd.errors import ExitStatus
from system.checks import assert_same_losses
from system.hosts.job import HostsJob

STEPS = 400
TRAINING = ("--steps", str(STEPS), "--pause", "0.05")


def assert_resumed_right(job: HostsJob) -> None:
    """Each attempt began at the newest commit that there was."""
    for launched in job.of(ev.AttemptLaunched):
        before = [e for e in job.of(ev.SaveCommitted) if e.attempt < launched.attempt]
        newest = max((e.sequence for e in before), default=None)
        assert (launched.resume or {}).get("sequence") == newest, job.story()


def assert_told_truly(job: HostsJob, *, attempt: int, world: int, away: set[str] | None = None) -> None:
    """`ckptd status` says how it is, and every duration in it is one of this run's own."""
    ranks = {str(rank) for rank in range(world)}
    job.wait_until(lambda: set(job.status()["ranks"]) == ranks, f"the ranks {ranks} are heard")
    status = job.status()
    assert (status["state"], status["attempt"], status["world_size"]) == ("training", attempt, world)
    assert {name for name, node in status["nodes"].items() if not node["connected"]} == (away or set())
    assert 0 < status["goodput"]["wall_s"] < 400
    assert abs(time.time() - status["heartbeat_at"]) < 60
    assert abs(time.time() - status["last_committed"]["at"]) < 60


def steps_pass(job: HostsJob, count: int) -> None:
    """Wait until so many more are trained."""
    there = max(job.losses())
    job.wait_until(lambda: max(job.losses()) >= there + count, f"{count} steps after step {there}")


def stop(job: HostsJob) -> None:
    """Enough was seen of it: it need not train to its end."""
    stopped = job.ckptd("stop", str(job.run_dir))
    assert stopped.returncode == 0, stopped.stderr
    assert job.wait() == ExitStatus.REQUEUE, job.output() + job.story()


def assert_losses_so_far(job: HostsJob, expected: dict[int, str]) -> None:
    last = max(job.losses())
    assert_same_losses(job, {step: loss for step, loss in expected.items() if step <= last})
