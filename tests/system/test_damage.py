"""Checkpoints are damaged: the newest whole one is taken, what is wrong is said, and nothing ever begins again silently."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

from ckptd.core import events as ev
from ckptd.ledger import Ledger
from ckptd_shim.contract import COMMITTED, Marker
from system.checks import assert_same_losses

pytestmark = pytest.mark.system


def newest_first(job):
    """Committed directories, the newest commit first."""
    return sorted(job.commits(), key=lambda path: Marker.read(path / COMMITTED).sequence, reverse=True)


def flip(path, where=-20):
    """One bit, with the size as it was."""
    data = bytearray(path.read_bytes())
    data[where] ^= 0x01
    path.write_bytes(data)


def shard(directory):
    """The largest: what every rank holds alike is written by one, and the others' shards may be empty."""
    return max((p for p in directory.iterdir() if p.name.startswith("__")), key=lambda p: p.stat().st_size)


def another_count(directory):
    """A flipped bit that leaves COMMITTED a marker that can be read: it only tells another number of samples."""
    text = (directory / COMMITTED).read_bytes()
    at = text.index(b",", text.index(b'"samples_seen":')) - 1  # the first digit might become a leading 0
    flip(directory / COMMITTED, at)
    assert Marker.read(directory / COMMITTED).step > 0


KINDS = {
    "a flipped bit in a shard": lambda d: flip(shard(d)),
    "a flipped bit in the metadata": lambda d: flip(d / ".metadata"),
    "a flipped bit in what a rank keeps besides": lambda d: flip(d / "extras_rank0"),
    "a flipped bit in the marker": another_count,
    "a marker that cannot be read": lambda d: flip(d / COMMITTED, 0),
    "a truncated shard": lambda d: os.truncate(shard(d), shard(d).stat().st_size - 1),
    "a missing shard": lambda d: shard(d).unlink(),
    "no marker": lambda d: (d / COMMITTED).unlink(),
}


def test_of_all_kinds_of_damage_none_is_resumed_from(make_job, reference):
    """Eight commits are damaged, each in its own way, a partial one lies on top, and only the oldest is whole."""
    job = make_job("--steps", "150", checkpoint={
        "interval": {"steps": 10}, "tiers": [{"name": "disk", "path": "ckpt", "keep_last": 20}]})  # fmt: skip
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.sequence >= len(KINDS) + 1)
    stopped = job.ckptd("stop", str(job.run_dir))
    assert stopped.returncode == 0, stopped.stderr
    assert job.wait() == 75
    *newest, spared = newest_first(job)[: len(KINDS) + 1]
    for older in newest_first(job)[len(KINDS) + 1 :]:
        damage_all([older])
    for directory, damage in zip(newest, KINDS.values(), strict=True):
        damage(directory)
    partial = job.tier / "job" / "step_000099999.a0001"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")

    verified = job.ckptd("checkpoints", str(job.run_dir), "--verify", "--json")
    assert verified.returncode == 1
    states = {row["path"]: row["state"] for row in json.loads(verified.stdout)}
    expected = {str(d): "partial" if kind == "no marker" else "damaged" for d, kind in zip(newest, KINDS, strict=True)}
    assert {path: states[path] for path in expected} == expected
    assert (states[str(partial)], states[str(spared)]) == ("partial", "verified")

    assert job.run() == 0, job.output()
    resume = job.of(ev.AttemptLaunched)[-1].resume
    assert (resume["path"], resume["step"]) == (str(spared), Marker.read(spared / COMMITTED).step)
    for directory, kind in zip(newest, KINDS, strict=True):
        if kind != "no marker":
            assert f"{directory} is not resumed from" in job.output(), kind
    # What was trained again came out as before, and its checkpoints have their own directories and later numbers.
    assert_same_losses(job, reference(150))
    sequences = [e.sequence for e in job.of(ev.SaveCommitted)]
    assert sequences == sorted(set(sequences))

    # A finished run does not train again, even though somebody asks.
    trained = job.losses_path.read_bytes()
    assert job.run() == 0
    assert "it does not train again" in job.output()
    assert job.losses_path.read_bytes() == trained


def damage_all(directories):
    for directory in directories:
        os.truncate(shard(directory), 100)


@contextlib.contextmanager
def frozen(job, attempt):
    """Nothing is saved or committed meanwhile; afterwards rank 0 is killed."""
    pids = job.workers(attempt)
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pids[0], signal.SIGKILL)


def test_a_damaged_newest_costs_one_interval_and_the_loss_of_all_ends_the_run(make_job):
    job = make_job("--steps", "100000", checkpoint={"interval": {"steps": 10}})
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.sequence >= 2)
    with frozen(job, 1):
        newest, before = newest_first(job)[:2]
        damage_all([newest])
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert launched.resume["path"] == str(before)
    assert f"{newest} is not resumed from" in job.output()

    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    with frozen(job, 2):
        damage_all(newest_first(job))
    assert job.wait() == 1, job.output()
    assert len(job.of(ev.AttemptLaunched)) == 2, "it began again"
    ended = job.of(ev.RunEnded)[-1]
    assert ended.outcome == "failed"
    assert "none of the committed checkpoints is whole" in ended.detail
    assert "does not begin again" in job.output()
    # And neither does it when it is asked once more.
    assert job.run() == 1
    assert len(job.of(ev.AttemptLaunched)) == 2, "it began again"


def test_a_tier_that_was_emptied_does_not_make_a_cold_start(make_job):
    job = make_job("--steps", "100000")
    job.start()
    job.wait_for(ev.SaveCommitted)
    with frozen(job, 1):
        os.rename(job.tier, job.directory / "away")
    assert job.wait() == 1, job.output()
    assert len(job.of(ev.AttemptLaunched)) == 1, "it began again"
    assert "none is where its tiers say" in job.output()
    os.rename(job.directory / "away", job.tier)
    with Ledger.open(job.run_dir / "ledger.db", readonly=True) as ledger:
        assert list(ledger.events())
    job.start()
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert launched.resume["step"] >= 10
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 2)
    assert job.ckptd("stop", str(job.run_dir), "--now").returncode == 0
    assert job.wait() == 75
