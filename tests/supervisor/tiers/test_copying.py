"""A copy is whole or it is not there, and it is found out when it, or what it was made from, is not what was committed."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import uuid

import pytest
from checkpoints import commit

from ckptd.tiers import (
    Damaged,
    NoSuchFile,
    Occupied,
    Pace,
    StoreError,
    copy_checkpoint,
    open_store,
    read_marker,
    verify,
)
from ckptd.tiers.posix import PosixStore
from ckptd_shim.contract import COMMITTED, OWNER, Marker

NAME = "step_000000010.a0001"
FILES = 4


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "source", 10, 1, size=50_000, files=FILES)
    return open_store(str(tmp_path / "source"))


@pytest.fixture(params=["posix", "file", "memory"])
def target(request, tmp_path):
    return open_store(
        {"posix": f"{tmp_path}/t/job", "file": f"file://{tmp_path}/t/job", "memory": f"memory://{uuid.uuid4()}/job"}[
            request.param
        ]
    )


def damage(store, file="__2_0.distcp"):
    with open(os.path.join(store.location, NAME, file), "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))


class Interrupted(Exception):
    pass


class After(Pace):
    """Ends the copy once so many bytes have moved."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def beat(self, count=0):
        super().beat(count)
        if self.bytes > self.limit:
            raise Interrupted


def test_a_copy_that_was_cut_short_is_taken_up_where_it_was(source, target):
    with pytest.raises(Interrupted):
        copy_checkpoint(source, target, NAME, pace=After(230_000))  # each file passes twice: two are whole
    with pytest.raises(NoSuchFile):
        target.marker(NAME)
    done = copy_checkpoint(source, target, NAME)
    assert 0 < done.moved < done.bytes == FILES * 50_000
    verify(target, NAME)
    assert copy_checkpoint(source, target, NAME).moved == 0


def test_what_an_earlier_try_left_is_believed_only_by_its_digest(source, target):
    target.begin(NAME, "r")
    for file, data in (("__0_0.distcp", bytes(50_000)), ("__1_0.distcp", b"short"), ("foreign", b"x")):
        with target.writing(NAME, file) as opened:
            opened.write(memoryview(data))
    done = copy_checkpoint(source, target, NAME)
    assert done.moved == done.bytes
    assert set(target.sizes(NAME)) == {COMMITTED, OWNER, *(f"__{k}_0.distcp" for k in range(FILES))}
    verify(target, NAME)


@pytest.mark.parametrize("how", ["flip", "truncate", "longer", "missing", "marker"])
def test_a_damaged_source_is_not_copied(source, target, how):
    path = os.path.join(source.location, NAME, "__2_0.distcp")
    expected = None
    if how == "flip":
        damage(source)
    elif how == "truncate":
        os.truncate(path, 49_999)
    elif how == "longer":
        with open(path, "ab") as file:
            file.write(bytes(5_000_000))
    elif how == "missing":
        os.unlink(path)
    else:
        expected = "00000000"
    with pytest.raises(Damaged, match=r"was committed|were committed|No such file|changed"):
        copy_checkpoint(source, target, NAME, expected_crc32c=expected)
    assert target.names() == []


def test_a_target_that_gives_back_something_else_is_found_out(source, tmp_path):
    class Rotten(PosixStore):
        def copied(self, name, file):
            if file == "__3_0.distcp":
                with open(os.path.join(self._copy(name), file), "r+b") as opened:
                    opened.write(b"rot")
            return super().copied(name, file)

    target = Rotten(str(tmp_path / "t"))
    with pytest.raises(StoreError, match="right after it was written there") as caught:
        copy_checkpoint(source, target, NAME)
    assert not isinstance(caught.value, Damaged), "the source is not to blame"
    assert target.names() == []


def test_a_copy_that_rotted_is_replaced_and_another_checkpoint_of_its_name_is_not(source, target, tmp_path):
    copy_checkpoint(source, target, NAME)
    target.drop(NAME, []) if target.renames else target.drop(NAME, ["__1_0.distcp"])
    if target.renames:
        os.unlink(os.path.join(target.location, NAME, "__1_0.distcp"))
    with pytest.raises(Damaged, match="is missing"):
        verify(target, NAME)
    copy_checkpoint(source, target, NAME)
    verify(target, NAME)

    commit(tmp_path / "other", 10, 7, run_id="elsewhere")
    with pytest.raises(Occupied, match="commit 1 of run r, and this is commit 7 of run elsewhere"):
        copy_checkpoint(open_store(str(tmp_path / "other")), target, NAME)
    assert read_marker(target, NAME)[0].run_id == "r"


def test_a_partial_directory_under_its_name_makes_way(source, tmp_path):
    partial = tmp_path / "t" / NAME
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"half")
    target = open_store(str(tmp_path / "t"))
    copy_checkpoint(source, target, NAME)
    verify(target, NAME)
    assert [p.name for p in (tmp_path / "t").iterdir()] == [NAME]


def test_copies_of_others_that_nobody_will_finish_are_dropped(source, tmp_path):
    (tmp_path / "t" / ".copy-step_000000005.a0001").mkdir(parents=True)
    target = open_store(str(tmp_path / "t"))
    copy_checkpoint(source, target, NAME)
    assert [p.name for p in (tmp_path / "t").iterdir()] == [NAME]


@pytest.mark.parametrize("names", [["../a"], [""], ["a/b"], [COMMITTED]])
def test_a_marker_cannot_name_files_elsewhere(source, names):
    path = os.path.join(source.location, NAME, COMMITTED)
    marker = Marker.read(path)
    listed = [dataclasses.replace(marker.files[0], name=name) for name in names]
    dataclasses.replace(marker, files=listed).write(path)
    with pytest.raises(Damaged, match="no name of a file"):
        read_marker(source, NAME)


COPY = """
import sys
from ckptd.tiers import Pace, copy_checkpoint, open_store
class Slow(Pace):
    def beat(self, count=0):
        print(count, flush=True)
        sys.stdin.readline()
source, target, name = sys.argv[1:]
copy_checkpoint(open_store(source), open_store(target), name, pace=Slow())
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", ["", "file://"])
def test_killed_at_any_point_it_leaves_nothing_that_is_trusted_and_the_next_one_ends_it(source, tmp_path, kind):
    """A real process, killed with -9 between two pieces of its work; then the same copy again."""
    points = random.Random(5).sample(range(2 * FILES + 3), 4)
    for point in points:
        place = tmp_path / f"t{point}" / "job"
        target = open_store(f"{kind}{place}")
        with subprocess.Popen(
            [sys.executable, "-c", COPY, source.location, target.location, NAME],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                for _ in range(point):
                    process.stdout.readline()
                    process.stdin.write("\n")
                    process.stdin.flush()
                assert process.stdout.readline().strip().isdecimal(), "it was over before it was killed"
            finally:
                process.kill()
        with pytest.raises(NoSuchFile):
            target.marker(NAME)
        done = copy_checkpoint(source, target, NAME)
        whole_files = max(0, (point + 1 - 2) // 2)
        assert done.bytes - done.moved >= 50_000 * whole_files, "what the killed one had copied was copied again"
        verify(target, NAME)
        assert [p.name for p in place.iterdir()] == [NAME]
