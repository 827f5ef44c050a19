"""Devices fail and the world shrinks: the global batch stays, samples are counted on, and the markers say so."""

from __future__ import annotations

import os
import signal

import pytest

from ckptd.core import events as ev
from ckptd_shim.contract import COMMITTED, Marker
from system.checks import alive, assert_told_once

pytestmark = pytest.mark.system


@pytest.mark.timeout(240)
def test_four_workers_then_three_then_two(make_job, tmp_path):
    """A device is found sick after its rank died; then another is reported while all is well, and is left in time."""
    sick = tmp_path / "sick"
    sick.write_text("")
    job = make_job(
        "--steps", "100000", "--pause", "0.01", devices=4, health={"command": ["cat", str(sick)], "interval": "200ms"},
        cluster={"min_devices": 2}, checkpoint={"tiers": [{"name": "disk", "path": "ckpt", "keep_last": 1000}]},
    )  # fmt: skip
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 1)
    sick.write_text("2\n")
    os.kill(job.workers(1)[2], signal.SIGKILL)
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2, timeout=120)
    sick.write_text("0\n2\n")
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 3, timeout=120)
    assert not alive(job, 1) + alive(job, 2)
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75

    launched = job.of(ev.AttemptLaunched)
    assert [(e.world_size, e.placement["local"]) for e in launched] == [(4, [0, 1, 2, 3]), (3, [0, 1, 3]), (2, [1, 3])]
    assert [e.devices_wanted for e in launched] == [4, 4, 4]
    first, second = job.of(ev.Interrupted)
    assert (first.cause, first.rank, first.planned) == ("signal", 2, False)
    assert (second.planned, second.lost_steps) == (True, 0)
    assert "device 0 of node local reported unhealthy" in second.detail
    assert launched[2].resume["step"] == second.step, "the planned one saved first, and went on from there"

    markers = sorted((Marker.read(path / COMMITTED) for path in job.commits()), key=lambda m: m.sequence)
    assert {m.attempt: m.world_size for m in markers} == {1: 4, 2: 3, 3: 2}
    for marker in markers:
        assert (marker.global_batch, marker.samples_seen) == (12, 12 * marker.step)
        assert marker.comparable == (marker.attempt == 1)
        assert (marker.comparable_reason is None) == marker.comparable
    assert "4" in markers[-1].comparable_reason
    assert {e.comparable for e in job.of(ev.SaveCommitted) if e.attempt > 1} == {False}
    status = job.status()
    assert (status["samples_seen"], status["devices_healthy"]) == (12 * status["step"], 2)
    assert_told_once(job)


def test_too_few_devices_end_the_run_with_the_status_that_says_so(make_job, tmp_path):
    sick = tmp_path / "sick"
    sick.write_text("0\n")
    job = make_job(
        devices=2, health={"command": ["cat", str(sick)]}, cluster={"min_devices": 2, "wait_for_devices": "2s"}
    )  # fmt: skip
    assert job.run() == 69
    assert job.of(ev.AttemptLaunched) == []
    assert "1 healthy device, and cluster.min_devices is 2" in job.output()
