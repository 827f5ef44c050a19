"""What a store does, on every kind of store: directories, object stores in a directory and in memory."""

from __future__ import annotations

import errno
import os
import subprocess
import uuid

import pytest
from checkpoints import commit

from ckptd.tiers import NoSuchFile, Pace, StoreError, copy_checkpoint, open_store, verify
from ckptd.tiers.objects import why_unusable
from ckptd_shim.contract import COMMITTED

NAME = "step_000000010.a0001"


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "source", 10, 1, size=3000, files=2)
    return open_store(str(tmp_path / "source"))


@pytest.fixture(params=["posix", "file", "memory"])
def store(request, tmp_path):
    return open_store(
        {"posix": f"{tmp_path}/t/job", "file": f"file://{tmp_path}/t/job", "memory": f"memory://{uuid.uuid4()}/job"}[
            request.param
        ]
    )


def test_an_empty_store_holds_nothing_and_says_what_is_missing(store):
    assert store.names() == []
    with pytest.raises(NoSuchFile, match="COMMITTED"):
        store.marker(NAME)
    store.clear()


def test_a_copy_is_there_whole_with_the_same_marker(store, source):
    done = copy_checkpoint(source, store, NAME)
    assert (done.bytes, done.moved) == (6000, 6000)
    assert store.names() == [NAME]
    assert store.marker(NAME) == source.marker(NAME)
    assert store.sizes(NAME) == source.sizes(NAME)
    assert verify(store, NAME).step == 10
    with store.reading(NAME, "__1_0.distcp") as mine, source.reading(NAME, "__1_0.distcp") as other:
        a, b = memoryview(bytearray(5000)), memoryview(bytearray(5000))
        assert (mine.readinto(a), bytes(a)) == (other.readinto(b), bytes(b))


def test_what_is_deleted_is_gone_and_what_is_gone_cannot_be_deleted_twice_by_accident(store, source):
    copy_checkpoint(source, store, NAME)
    store.delete(NAME)
    assert store.names() == []
    with pytest.raises(NoSuchFile):
        store.marker(NAME)


def test_only_names_of_checkpoints_are_seen(store, source, tmp_path):
    copy_checkpoint(source, store, NAME)
    store.begin("step_000000020.a0001", "r")
    with store.writing("step_000000020.a0001", "x") as file:
        file.write(memoryview(b"half"))
    seen = store.names()
    assert seen == ([NAME] if store.renames else [NAME, "step_000000020.a0001"])
    for name in seen[1:]:
        with pytest.raises(NoSuchFile):
            store.marker(name)


def test_a_marker_that_was_not_the_last_thing_written_is_no_marker(store, source):
    """While a copy is under way nothing of it looks committed."""
    store.begin(NAME, "r")
    with store.writing(NAME, "__0_0.distcp") as file:
        file.write(memoryview(b"x"))
        with pytest.raises(NoSuchFile):
            store.marker(NAME)
    with pytest.raises(NoSuchFile):
        store.marker(NAME)


def test_an_exception_in_the_middle_of_a_file_is_not_hidden(store):
    store.begin(NAME, "r")
    with pytest.raises(ZeroDivisionError), store.writing(NAME, "a") as file:
        file.write(memoryview(b"x"))
        raise ZeroDivisionError
    store.abandon(NAME)
    assert store.names() == []


def test_errors_name_the_file_and_carry_the_number(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"{tmp_path}/file.*Not a directory") as caught:
        open_store(str(tmp_path / "file" / "job")).begin(NAME, "r")
    assert caught.value.errno == errno.ENOTDIR
    with pytest.raises(StoreError, match=f"file://{tmp_path}/file/job"):
        copy_checkpoint(
            open_store(os.path.dirname(commit(tmp_path / "s", 10, 1))),
            open_store(f"file://{tmp_path}/file/job"),
            NAME,
        )


def test_a_pipe_under_a_file_s_name_holds_nobody_up(tmp_path):
    path = commit(tmp_path, 10, 1)
    os.unlink(f"{path}/__0_0.distcp")
    os.mkfifo(f"{path}/__0_0.distcp")
    with pytest.raises(StoreError, match="is no regular file"), open_store(str(tmp_path)).reading(NAME, "__0_0.distcp"):
        pass
    with pytest.raises(StoreError, match="is no regular file"):
        verify(open_store(str(tmp_path)), NAME)


def test_schemes_that_cannot_be_used_say_what_to_do():
    assert "no object store 'nonsense'" in why_unusable("nonsense://a/b")
    assert why_unusable("file:///a") is None
    try:
        import s3fs  # noqa: F401
    except ImportError:
        assert 'pip install "ckptd[s3]"' in why_unusable("s3://bucket/a")
    else:
        assert why_unusable("s3://bucket/a") is None


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root can mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_tier_keeps_what_it_has(small, tmp_path):
    commit(tmp_path / "s", 10, 1, size=300_000)
    commit(tmp_path / "s", 20, 2, size=900_000)
    source, target = open_store(str(tmp_path / "s")), open_store(str(small / "job"))
    copy_checkpoint(source, target, NAME)
    with pytest.raises(StoreError, match=r"\.copy-step_000000020.*No space left") as caught:
        copy_checkpoint(source, target, "step_000000020.a0001")
    assert caught.value.errno == errno.ENOSPC
    target.abandon("step_000000020.a0001")
    assert os.listdir(small / "job") == [NAME]
    verify(target, NAME, pace=Pace())


def test_a_committed_checkpoint_is_one_whatever_is_left_beside_it(tmp_path):
    commit(tmp_path, 10, 1)
    (tmp_path / ".copy-step_000000020.a0001").mkdir()
    (tmp_path / ".doomed-step_000000005.a0001").mkdir()
    (tmp_path / "notes").mkdir()
    store = open_store(str(tmp_path))
    assert store.names() == [NAME]
    store.clear()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".copy-step_000000020.a0001", "notes", NAME]
    assert (tmp_path / NAME / COMMITTED).exists()
