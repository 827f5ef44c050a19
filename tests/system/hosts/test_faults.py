"""Whatever is killed, cut or slowed down between hosts, there is one attempt, on the right world, from the right step."""

from __future__ import annotations

import pytest

from ckptd.core import events as ev
from system.checks import assert_same_losses, assert_told_once
from system.hosts.job import HostsJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
STEPS = 200
SLOWER = ("--steps", str(STEPS), "--pause", "0.1")


def resumed_right(job: HostsJob, attempt: int) -> None:
    """It began at the newest commit that there was."""
    before = [e for e in job.of(ev.SaveCommitted) if e.attempt < attempt]
    launched = job.launched(attempt)
    assert launched.resume is not None, job.story()
    assert launched.resume["step"] == max(before, key=lambda e: e.sequence).step, job.story()


def test_a_worker_an_agent_and_a_link(make_run, cluster, reference):
    """Two hosts. A lost worker or agent costs a restart of both; a link that is cut, lossy or slow for a while nothing."""
    job = make_run(*SLOWER, hosts=("h1", "h2"))
    both = {"h1", "h2"}
    job.start()
    job.training(1, on=both)
    job.kill_worker(cluster["h2"])
    job.training(2, on=both)
    job.kill_agent(cluster["h2"])
    saved = job.training(3, on=both)

    cluster["h2"].cut()
    cluster["h2"].heal()
    assert job.wait() == 0, job.output() + job.story()
    for attempt in (2, 3):
        resumed_right(job, attempt)
    causes = [(e.cause, e.node) for e in job.of(ev.Interrupted)]
    assert causes == [("signal", "h2"), ("agent_lost", "h2")], job.story()
    assert_told_once(job)
    assert_same_losses(job, reference(STEPS))
