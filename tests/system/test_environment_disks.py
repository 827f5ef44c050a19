"""A disk is full or cannot be written: training goes on, says so, and saves again when it can."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from ckptd.core import events as ev

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")]


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs of so many KiB at `tmp_path/disk`."""
    path = tmp_path / "disk"

    def mount(kib):
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "ckptd-test", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            path.rmdir()
            pytest.skip(f"no disk can be mounted here: {done.stderr}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(directory):
    """Take the last byte of room there is; returns the file that has it."""
    path = directory / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (65536, 1024, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return path


def checkpoints(tier):
    return {path.name for path in (tier / "job").iterdir()}


def test_a_tier_without_room_and_one_that_is_read_only_cost_saves_and_nothing_else(make_job, small_disk, reference):
    tier = small_disk(4096)
    job = make_job(
        "--steps", "3000", "--pause", "0.05", devices=1,
        checkpoint={"interval": {"steps": 10}, "tiers": [{"name": "disk", "path": str(tier), "keep_last": 2}]},
    )  # fmt: skip
    job.start()
    first = job.wait_for(ev.SaveCommitted)

    filler = fill(tier)
    failed = job.wait_for(ev.SaveFailed)
    assert failed.errno == 28, failed
    assert f"the save of step {failed.step} needs" in failed.error, "it was not even begun"
    assert failed.stall_s == 0
    assert os.path.basename(failed.path) not in checkpoints(tier), "the partial one is gone"
    kept = [e for e in job.of(ev.SaveCommitted) if e.step < failed.step][-1]
    assert os.path.exists(os.path.join(kept.path, "COMMITTED"))
    assert "No space left" in job.ckptd("events", str(job.run_dir)).stdout
    job.wait_until(lambda: f"SAVE FAILED at step {failed.step}" in job.output(), "the terminal says so")
    assert job.status()["saves"]["failed"] >= 1

    step = job.status()["step"]
    job.wait_until(lambda: job.status()["step"] > step + 30, "training goes on")
    assert len(job.of(ev.SaveFailed)) == 1, "said once, and not at every step"
    asked = job.ckptd("save", str(job.run_dir))
    assert (asked.returncode, "the save failed" in asked.stderr) == (64, True)

    filler.unlink()
    room = job.wait_for(ev.SaveCommitted, lambda e: e.step > failed.step)
    assert room.step >= first.step

    job.wait_until(lambda: read_only(tier), "a moment when nothing is being written")
    refused = job.wait_for(ev.SaveFailed, lambda e: e.errno == 30)
    assert "Read-only" in refused.error
    subprocess.run(["mount", "-o", "remount,rw", str(tier)], check=True)
    job.wait_for(ev.SaveCommitted, lambda e: e.step > refused.step)

    assert job.status()["attempt"] == 1
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    steps = max(job.losses())
    assert job.losses() == reference(steps, world=1)


def read_only(path):
    return subprocess.run(["mount", "-o", "remount,ro", str(path)], capture_output=True, check=False).returncode == 0


def test_a_run_directory_without_room_does_not_stop_training_and_its_ledger_catches_up(make_job, small_disk):
    disk = small_disk(2048)
    job = make_job("--steps", "100000", "--pause", "0.05", devices=1, run_dir=str(disk / "run"))
    job.run_dir = disk / "run"
    job.start()
    job.wait_for(ev.SaveCommitted)
    filler = fill(disk)
    written = len(job.events())
    job.wait_until(lambda: "no room for the ledger" in job.output(), "the terminal says so")
    last = job.status()["last_committed"]["step"]
    job.wait_until(lambda: job.status()["last_committed"]["step"] > last, "saves go on, and the daemon knows")
    assert len(job.events()) == written, "nothing can have been written"
    assert any("no room for the ledger" in note["what"] for note in job.status()["notes"])

    filler.unlink()
    job.wait_for(ev.Noted, lambda e: "the ledger is written again" in e.what)
    job.wait_for(ev.Noted, lambda e: e.level == "error" and "no room for the ledger" in e.what)
    steps = [e.step for e in job.of(ev.SaveCommitted)]
    assert steps == list(range(10, 10 + 10 * len(steps), 10)), "each of them once, those of the dark hour too"
    assert "no room for the ledger" in job.ckptd("events", str(job.run_dir)).stdout
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1]
