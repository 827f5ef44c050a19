"""Checkpoints in the memory of hosts that have nothing else in common: what a host without power held, its neighbour has."""

from __future__ import annotations

import pytest

from ckptd.core import events as ev
from system.checks import assert_told_once
from system.hosts.checks import STEPS, TRAINING, assert_losses_so_far, stop

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_the_memory_of_a_host_without_power_lives_on_at_its_neighbour(make_run, cluster, reference):
    # Nobody says whether the hosts share it: they find out.
    memory = {"name": "memory", "path": "/dev/shm/ckptd", "shared": None, "keep_last": 2}
    job = make_run(*TRAINING, hosts=("h1", "h2", "h3"), cluster={"spares": 1}, checkpoint={"tiers": [memory]})

    def whole():
        """The newest step of which every part is on two hosts."""
        copies = [(e.step, e.source) for e in job.of(ev.CheckpointMirrored)]
        return max((step for step, source in copies if source == "h1" and (step, "h2") in copies), default=0)

    job.start()
    job.wait_until(lambda: whole() >= 20, "two commits have a second copy")
    at_least = whole()
    assert [e.shared for e in job.of(ev.SharingFound)] == [{"memory": False}]
    cluster["h2"].power_off()
    saved = job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    launched = job.launched(2)
    assert set(launched.placement) == {"h1", "h3"}
    assert launched.resume["step"] >= at_least, job.story()
    assert saved.step > launched.resume["step"]
    fetched = [e for e in job.of(ev.FilesGathered) if e.attempt == 2 and e.node == "h3" and e.fetched]
    assert fetched, "the spare had nothing of its own"
    stop(job)
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))
