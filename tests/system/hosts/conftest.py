"""One cluster for the tests of a module, and the promise that a run leaves nothing on any host of it."""

from __future__ import annotations

import time

import pytest

from system.hosts.cluster import Cluster, lacking
from system.hosts.job import HostsJob

LEAVE_S = 30.0
"""An agent that was told to leave does so a moment after the daemon."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    why = lacking()
    if why is not None:
        pytest.skip(why)
    made = Cluster(tmp_path_factory.mktemp("hosts"), 3)
    yield made
    made.close()


@pytest.fixture
def make_run(cluster, request):
    """Builds runs; at the end of the test each is over, was one attempt at a time, and has left nothing alive."""
    cluster.restore()
    jobs = []

    def make(*args, **options):
        jobs.append(HostsJob(cluster, f"{request.node.name}{len(jobs)}", *args, **options))
        return jobs[-1]

    yield make
    over = all(job.process is None or job.process.poll() is not None for job in jobs)
    deadline = time.monotonic() + LEAVE_S
    while over and (left := [line for job in jobs for line in job.left_over()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for job in jobs:
        job.close()
    assert not over or not left, f"left over: {left}\n{jobs[0].story()}"
    for job in jobs:
        assert job.watcher.looks, "nobody watched"
        assert not job.watcher.overlaps, f"{job.watcher.overlaps[:3]}\n{job.story()}"
