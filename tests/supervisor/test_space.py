"""A tier that will be full is told of while there is time."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml

from ckptd import jobspec, space
from ckptd.space import Footprint, foresee
from ckptd_shim import contract, room
from ckptd_shim.contract import COMMITTED, FileDigest, Marker


def each(size, files=6):
    """A checkpoint that takes `size` bytes of what is free, the rounding of its files included."""
    return Footprint(bytes=max(0, size - 4096 * (files + 1)), files=files)


def test_one_more_than_is_kept_has_to_fit(tmp_path):
    free = room.room_at(str(tmp_path)).bytes
    third = each(free // 3 + (1 << 20))  # two fit and a third does not; others use this disk too, but not so much
    assert foresee("disk", str(tmp_path), keep_last=1, held=0, each=third) is None
    said = foresee("disk", str(tmp_path), keep_last=2, held=0, each=third)
    assert "tier 'disk' will be full: keep_last 2 needs room for 3 checkpoints" in said
    assert "set keep_last to 1" in said
    assert str(tmp_path) in said
    assert foresee("disk", str(tmp_path), keep_last=2, held=1, each=third) is None, "what is there already has its room"
    assert foresee("disk", str(tmp_path), keep_last=2, held=9, each=each(free * 9)) is None
    assert "give it another directory" in foresee("disk", str(tmp_path), keep_last=1, held=0, each=each(free * 2))


def test_a_directory_that_is_not_there_yet_is_where_it_will_be(tmp_path):
    assert abs(room.room_at(str(tmp_path / "a" / "b")).bytes - room.room_at(str(tmp_path)).bytes) < 1 << 30
    assert room.shortage(str(tmp_path / "a"), size=1, files=1, what="it") is None
    free = room.room_at(str(tmp_path)).bytes
    said = room.shortage(str(tmp_path), size=2 * free, files=1, what="the save of step 7")
    assert said.startswith("No space left on device: the save of step 7 needs ")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_inodes_are_counted_too(tmp_path):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=20", "ckptd-test", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    try:
        assert room.shortage(str(tmp_path), size=1000, files=5, what="it") is None
        assert "needs 31 inodes" in room.shortage(str(tmp_path), size=1000, files=30, what="it")
        assert "inodes free" in foresee("disk", str(tmp_path), keep_last=3, held=0, each=Footprint(bytes=1000, files=6))
        assert foresee("disk", str(tmp_path), keep_last=1, held=0, each=Footprint(bytes=1000, files=6)) is None
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_job_is_warned_by_the_checkpoints_that_it_has_made(tmp_path):
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "job.yaml"
    tiers = [{"name": "disk", "path": str(tmp_path / "c"), "keep_last": 3}]
    path.write_text(yaml.safe_dump({"name": "job", "command": ["train.py"], "checkpoint": {"tiers": tiers}}))
    spec = jobspec.load(path)
    assert space.notes(spec) == [], "nothing is known yet"
    here = tmp_path / "c" / "job" / contract.checkpoint_dirname(10, 1)
    here.mkdir(parents=True)
    huge = room.room_at(str(tmp_path)).bytes
    Marker(
        format=contract.FORMAT, run_id="r", sequence=1, step=10, samples_seen=1, epoch=0, attempt=1, world_size=1,
        global_batch=None, loss=None, created=1.0, comparable=True,
        files=[FileDigest(name="x", size=huge, crc32c="00000000")],
    ).write(here / COMMITTED)  # fmt: skip
    (said,) = space.notes(spec)
    assert "keep_last 3 needs room for 4 checkpoints, one of them being written, 1 are there" in said
