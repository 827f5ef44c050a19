"""A run on memory, disk and an object store: what a wiped tier, a lost host, and a tier that refuses cost it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import urllib.request

import pytest

from ckptd.core import events as ev
from ckptd.ledger import Ledger
from ckptd_shim.contract import COMMITTED, Marker
from system.checks import assert_same_losses, assert_told_once

pytestmark = pytest.mark.system


@pytest.fixture
def memory():
    """A directory in host memory, where there is one."""
    place = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield place
    shutil.rmtree(place, ignore_errors=True)


def tiers(memory, tmp_path, **promote):
    return [
        {"name": "memory", "path": memory, "keep_last": 2},
        {"name": "disk", "path": str(tmp_path / "disk"), "keep_last": 3, **promote},
        {"name": "far", "url": f"file://{tmp_path}/far", "keep_last": 2, **promote},
    ]


def committed(directory):
    """step -> sequence of what a tier holds."""
    found = [Marker.read(path) for path in directory.glob(f"job/step_*/{COMMITTED}")]
    return {marker.step: marker.sequence for marker in found}


def test_fast_tiers_are_wiped_between_runs_and_training_goes_on_exactly(make_job, reference, memory, tmp_path):
    job = make_job(
        "--steps", "90", "--pause", "0.08", checkpoint={"interval": {"steps": 10}, "tiers": tiers(memory, tmp_path)}
    )
    job.start()
    job.wait_for(ev.CheckpointCopied, lambda e: e.tier == "disk" and e.sequence >= 2)

    # The host is rebooted: daemon, agent and workers die at once, and its memory is empty.
    job.close()
    shutil.rmtree(os.path.join(memory, "job"))
    newest = max(committed(tmp_path / "disk") | committed(tmp_path / "far"))
    job.start()
    resumed = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2).resume
    assert resumed["step"] == newest
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()

    # The last commit of the run is on every tier, and each keeps what its own rules say.
    last = job.of(ev.SaveCommitted)[-1]
    for directory, most in ((tmp_path / "disk", 3), (tmp_path / "far", 2)):
        found = committed(directory)
        assert max(found.values()) == last.sequence, job.story()
        assert len(set(found) - {resumed["step"]}) <= most
    status = job.status()
    assert [(t["name"], t["newest_step"], t["failing"]) for t in status["tiers"]] == [
        (name, last.step, False) for name in ("memory", "disk", "far")
    ]
    listed = json.loads(job.ckptd("checkpoints", str(job.run_dir), "--verify", "--json").stdout)
    assert {row["tier"] for row in listed if row["step"] == last.step} == {"memory", "disk", "far"}
    assert {row["state"] for row in listed} == {"verified"}
    with Ledger.open(job.run_dir / "ledger.db", readonly=True) as ledger:
        saves = [row for row in ledger.rows("saves") if row["step"] == last.step]
    assert {row["tier"]: row["outcome"] for row in saves} == dict.fromkeys(("memory", "disk", "far"), "committed")
    assert all(row["upload_s"] > 0 for row in saves)

    # The host is lost.
    for place in (memory, tmp_path / "disk"):
        for each in os.scandir(place):
            shutil.rmtree(each.path)
    assert job.run() == 0, job.output()
    resumed = job.of(ev.AttemptLaunched)[-1].resume
    assert (resumed["step"], resumed["tier"]) == (last.step, "memory")
    assert resumed["fetched_from"]["tier"] == "far"
    assert_same_losses(job, reference(90))
    assert max(committed(tmp_path / "far")) == 90, "the end of the run is not on the object store"
    sequences = [e.sequence for e in job.of(ev.SaveCommitted)]
    assert sequences == sorted(set(sequences)), job.story()


def test_a_tier_that_refuses_costs_training_nothing_and_is_told(make_job, memory, tmp_path):
    """The disk is no directory from the start of the second save on; the object store is served all the same."""
    job = make_job(
        "--steps", "60", checkpoint={"interval": {"steps": 10}, "tiers": tiers(memory, tmp_path)},
        web={"listen": "127.0.0.1:0"},
    )  # fmt: skip
    job.start()
    job.wait_for(ev.CheckpointCopied, lambda e: e.tier == "disk")
    os.rename(tmp_path / "disk", tmp_path / "away")
    (tmp_path / "disk").write_text("in the way")
    failed = job.wait_for(ev.CopyFailed, lambda e: e.tier == "disk")
    assert "Not a directory" in failed.error
    status = job.status()
    (disk,) = [t for t in status["tiers"] if t["name"] == "disk"]
    assert disk["failing"]
    if status["daemon"] is not None:
        page = urllib.request.urlopen(f"http://{status['daemon']['web']}/metrics", timeout=20).read().decode()
        assert 'ckptd_tier_failing{tier="disk"} 1.0' in page
        assert 'ckptd_tier_copies_total{result="failed",tier="disk"}' in page
    assert job.wait() == 0, job.output()
    assert_told_once(job)
    assert max(committed(tmp_path / "far")) == 60
    assert "COPY FAILED of step" in job.output()
    assert "tier 'disk' lacks step 60" in job.output()
    assert job.of(ev.RunEnded)[-1].outcome == "finished"
