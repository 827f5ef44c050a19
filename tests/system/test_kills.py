"""Trainer, agent and daemon are killed in the middle of saving, committing, promoting and deleting: nothing is lost by it.

CKPTD_KILLS says how many times, CKPTD_KILLS_SEED which; `make soak` takes a hundred.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from checkpoints import commit

from ckptd.core import events as ev
from ckptd_shim.contract import COMMITTED, OWNER, ContractError, Marker
from ckptd_shim.digest import verify_checkpoint
from ckptd_shim.errors import CheckpointError
from system.checks import assert_same_losses
from system.harness import PATIENCE_S, reference_losses

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("CKPTD_KILLS", "15"))
SEED = int(os.environ.get("CKPTD_KILLS_SEED", "3"))
MOMENTS = ("write", "commit", "promote", "delete", "any")
VICTIMS = ("trainer", "trainers", "agent", "agent", "daemon", "daemon", "all")
WIDTH = "20000"
MOMENT_PATIENCE_S = 3.0
"""A moment that was not met by then was too short to be seen; the kill comes all the same."""

POLL_S = 0.1
"""Between looks into a ledger that grows long."""


@pytest.fixture
def memory():
    place = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield Path(place)
    shutil.rmtree(place, ignore_errors=True)


class Tiers:
    """What lies on the tiers of the run, looked at from outside."""

    def __init__(self, places):
        self.places = {name: place / "job" for name, place in places.items()}
        self.newest = dict.fromkeys(places, 0)
        """Highest commit sequence that was ever seen on each."""
        self.planted = {name: set() for name in places}

    def plant(self):
        """Things that ckptd did not make: in each tier, among its own."""
        for name, place in self.places.items():
            (place / "notes.txt").write_text("mine")
            (place / "step_12").mkdir()
            unsigned = place / "step_000000001.a0001"
            unsigned.mkdir()
            (unsigned / "__0_0.distcp").write_bytes(b"nobody says whose")
            foreign = commit(place, 3, 1, run_id="another")
            begun = place / "step_000000004.a0001"
            begun.mkdir()
            (begun / OWNER).write_text("another")
            self.planted[name] = {"notes.txt", "step_12", unsigned.name, os.path.basename(foreign), begun.name}

    def names(self, tier):
        return set(os.listdir(self.places[tier])) - self.planted[tier]

    def commits(self, tier):
        """name -> marker of the run's own commits; what is being deleted meanwhile is not there."""
        found = {}
        for name in self.names(tier):
            if name.startswith("step_"):
                try:
                    found[name] = Marker.read(self.places[tier] / name / COMMITTED)
                except (OSError, ContractError):
                    continue
        return found

    def look(self):
        for tier in self.places:
            there = max((m.sequence for m in self.commits(tier).values()), default=0)
            assert there >= self.newest[tier], f"{tier}: commit {self.newest[tier]} was there, {there} is the newest"
            self.newest[tier] = there

    def check_whole(self):
        """Whatever has a marker is what the marker says, or is being deleted at this very moment."""
        for tier, place in self.places.items():
            for name in self.commits(tier):
                try:
                    verify_checkpoint(place / name)
                except CheckpointError as error:
                    assert not (place / name / COMMITTED).exists(), f"{tier}: {error}"

    def partial(self):
        return {(t, n) for t in self.places for n in self.names(t) if n.startswith("step_")
                and not (self.places[t] / n / COMMITTED).exists()}  # fmt: skip

    def marked(self, prefix):
        return {(tier, name) for tier in self.places for name in self.names(tier) if name.startswith(prefix)}


def await_moment(tiers, moment):
    """Return as soon as it is seen to begin; whether it was."""
    if moment == "any":
        return True
    before = {name: set(tiers.names(name)) for name in tiers.places}
    partial, newest = tiers.partial(), max(m.sequence for m in tiers.commits("memory").values())
    end = time.monotonic() + MOMENT_PATIENCE_S
    while time.monotonic() < end:
        if moment == "write" and {n for t, n in tiers.partial() - partial if t == "memory"}:
            return True
        if moment == "promote" and (tiers.marked(".copy-") or {t for t, _ in tiers.partial() - partial} - {"memory"}):
            return True
        if moment == "commit" and max((m.sequence for m in tiers.commits("memory").values()), default=0) > newest:
            return True
        if moment == "delete" and (tiers.marked(".doomed-") or any(before[t] - tiers.names(t) for t in tiers.places)):
            return True
        time.sleep(0.002)
    return False


def kill(job, victim, chance):
    """SIGKILL to one of the run's processes, or to all; a daemon that was killed is started again."""
    workers = job.workers()
    pids = {
        "trainer": [workers[chance.choice(sorted(workers))]],
        "trainers": list(workers.values()),
        "agent": [job.agent_pid()],
        "daemon": [job.process.pid],
        "all": [job.process.pid, job.agent_pid(), *workers.values()],
    }[victim]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if job.process.pid in pids:
        job.process.wait()
        job.start()


@pytest.mark.timeout(300 + 20 * KILLS)
def test_killed_at_any_moment_nothing_that_was_committed_is_lost(make_job, memory, tmp_path):
    chance = random.Random(SEED)
    places = {"memory": memory, "disk": tmp_path / "disk", "far": tmp_path / "far"}
    tiers = Tiers(places)
    job = make_job(
        "--steps", "1000000", "--pause", "0.04", "--width", WIDTH, "--pin", "15",
        checkpoint={"interval": {"steps": 10}, "tiers": [
            {"name": "memory", "path": str(memory), "keep_last": 2},
            {"name": "disk", "path": str(places["disk"]), "keep_last": 2, "promote": 1},
            {"name": "far", "url": f"file://{places['far']}", "keep_last": 1, "promote": 1},
        ]},
        restart={"max_without_progress": 10_000},
    )  # fmt: skip
    job.start()
    for tier in ("far", "disk"):
        job.wait_for(ev.CheckpointCopied, lambda e, tier=tier: e.tier == tier)
    tiers.plant()  # not before: a run that has committed nothing goes on from an earlier run's commit
    pinned = os.path.basename(job.wait_for(ev.CheckpointPinned).path)
    done, unseen = Counter(), 0
    for number in range(KILLS):
        moment, victim = chance.choice(MOMENTS), chance.choice(VICTIMS)
        attempts = len(job.of(ev.AttemptLaunched))
        committed = max((e.sequence for e in job.of(ev.SaveCommitted)), default=0)
        tiers.look()
        seen = await_moment(tiers, moment)
        unseen += not seen
        time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.03), chance.uniform(0.0, 0.3)]))
        tiers.look()
        newest = max(tiers.newest.values())
        kill(job, victim, chance)
        done[f"{victim} at {moment}"] += 1
        story = f"kill {number} of seed {SEED}: {victim} at {moment}"
        tiers.check_whole()
        if victim == "daemon":
            before = max(committed, newest)
            job.wait_for(ev.SaveCommitted, lambda e, before=before: e.sequence > before, poll_s=POLL_S)
        else:
            launched = job.wait_for(ev.AttemptLaunched, lambda e, before=attempts: e.attempt > before, poll_s=POLL_S)
            resumed = launched.resume or {}
            assert resumed.get("sequence", newest) >= newest, f"{story}: commit {newest} was there, resumed {resumed}"
            assert resumed, f"{story}: it began again"
            job.wait_for(ev.SaveCommitted, lambda e, now=launched.attempt: e.attempt >= now, poll_s=POLL_S)
        tiers.look()
        assert pinned in tiers.commits("memory"), f"{story}: a pinned checkpoint is gone"
        tiers.check_whole()
        assert len({e.world_size for e in job.of(ev.AttemptLaunched)}) == 1, story
    print(f"{KILLS} kills, {unseen} at moments too short to be met: {dict(done)}")
    assert unseen < KILLS / 2

    assert job.ckptd("stop", str(job.run_dir), timeout=PATIENCE_S).returncode == 0, job.output()
    assert job.wait() == 75, job.output()
    tiers.look()
    tiers.check_whole()
    for tier, place in tiers.places.items():
        assert tiers.planted[tier] <= set(os.listdir(place)), f"{tier}: what ckptd did not make is gone"
        assert (place / "notes.txt").read_text() == "mine"
    last = max(tiers.newest.values())
    assert set(tiers.newest.values()) == {last}, f"the last commit is not everywhere: {tiers.newest}\n{job.output()}"
    assert not tiers.marked(".copy-"), "half a copy is left"
    assert not tiers.marked(".doomed-"), "a grave is left"
    assert not tiers.partial(), "what a dead attempt did not commit is left"
    for tier, keep_last in (("memory", 2), ("disk", 2), ("far", 1)):
        assert len(set(tiers.commits(tier)) - {pinned}) <= keep_last + 1, tiers.commits(
            tier
        )  # and the one resumed from
    steps = max(job.losses())
    arguments = ("--steps", str(steps), "--pause", "0", "--width", WIDTH)
    assert_same_losses(job, reference_losses(tmp_path / "reference", *arguments))
