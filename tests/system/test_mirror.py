"""Nodes with a memory tier each and no disk in common: whichever one loses its memory, all is found."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from ckptd.core import events as ev
from ckptd.tiers import PosixStore, verify
from ckptd_shim.contract import COMMITTED
from system.checks import assert_same_losses
from system.nodes import HOSTS, Nodes

pytestmark = pytest.mark.system


@pytest.fixture
def make_nodes(tmp_path):
    made = []

    def make(*args, hosts=HOSTS, tiers=(), **sections):
        own = {"name": "memory", "path": str(tmp_path / "{node}" / "memory"), "keep_last": 2}
        job = Nodes(
            tmp_path / f"nodes{len(made)}", *args, hosts=hosts,
            checkpoint={"interval": {"steps": 10}, "tiers": [own, *tiers]}, **sections,
        )  # fmt: skip
        del job.spec["checkpoint"]["tiers"][0]["shared"]
        job._write()
        made.append(job)
        return job

    yield make
    over = [job for job in made if job.process is None or job.process.poll() is not None]
    deadline = time.monotonic() + 20
    while (left := [line for job in over for line in job.left_over()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for job in made:
        job.close()
    assert not left, f"left over: {left}"


def own_directory(tmp_path, host):
    return tmp_path / host / "memory" / "job"


def committed(tmp_path, host):
    return {path.parent.name for path in own_directory(tmp_path, host).glob(f"step_*/{COMMITTED}")}


def mirrored(job, *, nodes=2, after=0):
    """The newest commit of which every node's part has a second copy."""
    found = {}
    for event in job.of(ev.CheckpointMirrored):
        found.setdefault(event.sequence, set()).add(event.source)
    return max((s for s, sources in found.items() if len(sources) == nodes and s > after), default=0)


def test_a_node_that_loses_its_memory_gets_its_files_from_the_other_one(make_nodes, reference, tmp_path):
    # Nobody says whether all nodes see the disk: they do.
    disk = {"name": "disk", "path": str(tmp_path / "disk"), "keep_last": 2}
    job = make_nodes("--steps", "60", "--pause", "0.1", tiers=(disk,))
    job.start()
    job.wait_until(lambda: mirrored(job) >= 2, "two commits with a second copy")
    job.wait_until(lambda: committed(tmp_path, HOSTS[0]) == committed(tmp_path, HOSTS[1]), "the same commits on both")

    # Node 0, where rank 0 wrote all tensors, loses its memory, and its worker with it.
    (worker,) = job.workers_on(HOSTS[0], 1).values()
    os.kill(worker, signal.SIGKILL)
    shutil.rmtree(own_directory(tmp_path, HOSTS[0]))
    resumed = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2).resume
    assert resumed["tier"] == "memory", job.story()
    assert resumed["sequence"] >= 2
    gathered = {e.node: e for e in (job.wait_for(ev.FilesGathered, lambda e, n=n: e.node == n) for n in HOSTS)}
    assert gathered[HOSTS[0]].fetched > 0
    assert gathered[HOSTS[1]].fetched == 0
    assert job.wait() == 0, job.output() + job.story()
    assert_same_losses(job, reference(60))
    assert "step_000000060.a0002" in committed(tmp_path, HOSTS[0])
    assert [e.shared for e in job.of(ev.SharingFound)] == [{"disk": True}]
    last = job.of(ev.SaveCommitted)[-1]
    (copied,) = (tmp_path / "disk" / "job").glob("step_000000060.a*")
    verify(PosixStore(str(copied.parent)), copied.name, last.marker_crc32c)


def test_half_of_the_ranks_are_lost_with_their_node_and_the_rest_goes_on_from_memory(make_nodes, tmp_path):
    disk = {"name": "disk", "path": str(tmp_path / "disk"), "shared": True, "promote": 1, "keep_last": 2}
    hosts = tuple({"host": host, "devices": 2} for host in HOSTS)
    job = make_nodes("--steps", "60", "--pause", "0.1", hosts=hosts, tiers=(disk,), cluster={"min_devices": 2})
    job.start()
    job.wait_until(lambda: mirrored(job) >= 1, "a commit with a second copy")
    job.wait_for(ev.CheckpointCopied, lambda e: e.tier == "disk")

    # Node 0, with rank 0, is gone for good, and its memory with it.
    job.cut(HOSTS[0])
    os.kill(job.agent(HOSTS[0]).pid, signal.SIGKILL)
    for worker in job.workers_on(HOSTS[0], 1).values():
        os.kill(worker, signal.SIGKILL)
    shutil.rmtree(tmp_path / HOSTS[0])
    again = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert (again.world_size, list(again.placement)) == (2, [HOSTS[1]])
    assert again.resume["tier"] == "memory", job.story()
    assert again.resume["sequence"] >= 1
    assert job.wait() == 0, job.output() + job.story()
    last = job.of(ev.SaveCommitted)[-1]
    assert last.step == 60
    (newest,) = (tmp_path / "disk" / "job").glob("step_000000060.a*")
    verify(PosixStore(str(newest.parent)), newest.name, last.marker_crc32c)
