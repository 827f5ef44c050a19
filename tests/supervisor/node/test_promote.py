"""Commits go on to slower tiers: real directories, a real promoter, and tiers that fail in every way."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid

import pytest
from checkpoints import commit

from ckptd.node import promote, retire
from ckptd.node.inuse import InUse
from ckptd.node.inventory import Question, inventory
from ckptd.node.promote import Promoter, retry_after
from ckptd.node.tiers import Tier
from ckptd.tiers import Crew, open_store, posix, verify

PATIENCE_S = 30.0


class Told:
    """Events that a promoter told."""

    def __init__(self):
        self.events = []
        self._news = threading.Condition()

    def __call__(self, kind, **data):
        with self._news:
            self.events.append((kind, data))
            self._news.notify_all()

    def of(self, kind, tier=None):
        return [data for k, data in self.events if k == kind and tier in (None, data["tier"])]

    def wait_for(self, kind, count=1, tier=None):
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind, tier)) >= count, PATIENCE_S), self.events
            return self.of(kind, tier)[count - 1]


@pytest.fixture
def place(tmp_path):
    return [
        Tier(name="memory", directory=str(tmp_path / "memory" / "job")),
        Tier(name="disk", directory=str(tmp_path / "disk" / "job")),
        Tier(name="far", directory=f"file://{tmp_path}/far/job"),
    ]


@pytest.fixture
def promoting(monkeypatch):
    """Starts promoters; they end with the test."""
    monkeypatch.setattr(promote, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(promote, "DRAIN_RETRY_S", 0.05)
    made = []

    def start(tiers, *, stall_s=20.0, every=None, crew=None, uses=None):
        told = Told()
        promoter = Promoter(
            tiers=tiers, run_id="r", crew=crew or Crew(), in_use=uses or InUse(), tell=told, stall_s=stall_s
        )
        promoter.set_every(every or {})
        made.append(promoter)
        return promoter, told

    yield start
    for promoter in made:
        promoter.close()


def save(promoter, tier, step, sequence, **options):
    path = commit(tier, step, sequence, **options)
    promoter.committed(sequence)
    return path


def held(tier):
    return sorted(int(name[5:14]) for name in tier.store().names())


def test_what_is_there_when_it_starts_goes_to_every_tier(place, promoting):
    commit(place[0], 10, 1, run_id="another")
    commit(place[0], 20, 2)
    commit(place[0], 30, 3)
    _, told = promoting(place)
    for tier in ("disk", "far"):
        done = told.wait_for("checkpoint_copied", tier=tier)
        assert (done["step"], done["sequence"], done["attempt"], done["bytes"]) == (30, 3, 1, 700)
    assert [held(tier) for tier in place[1:]] == [[30], [30]], "one that was overtaken, or is another run's, was copied"
    assert verify(place[2].store(), "step_000000030.a0001", done["marker_crc32c"]).step == 30


def test_every_nth_and_the_last(place, promoting):
    promoter, told = promoting(place[:2], every={"disk": 3})
    save(promoter, place[0], 10, 1)
    assert told.wait_for("checkpoint_copied")["step"] == 10, "the first goes at once"
    for sequence in (2, 3):
        save(promoter, place[0], 10 * sequence, sequence)
    save(promoter, place[0], 40, 4)
    assert told.wait_for("checkpoint_copied", 2)["step"] == 40
    save(promoter, place[0], 50, 5)
    assert promoter.behind
    assert promoter.drain(PATIENCE_S) == []
    assert [done["step"] for done in told.of("checkpoint_copied")] == [10, 40, 50]
    assert not promoter.behind


def test_an_agent_that_starts_again_goes_on_where_the_tiers_are(place, promoting):
    promoter, told = promoting(place[:2], every={"disk": 2})
    save(promoter, place[0], 10, 1)
    told.wait_for("checkpoint_copied")
    promoter.close()
    commit(place[0], 20, 2)
    again, told = promoting(place[:2], every={"disk": 2})
    commit(place[0], 30, 3)
    again.committed(3)
    assert told.wait_for("checkpoint_copied")["step"] == 30
    assert held(place[1]) == [10, 30]


def test_a_tier_that_fails_delays_no_other_is_tried_again_and_gets_the_newest(place, promoting, tmp_path):
    blocked = tmp_path / "disk"
    blocked.write_text("not a directory")
    promoter, told = promoting(place)
    save(promoter, place[0], 10, 1)
    assert told.wait_for("checkpoint_copied", tier="far")["step"] == 10
    failed = told.wait_for("copy_failed", 3, tier="disk")
    assert "Not a directory" in failed["error"]
    assert (failed["attempts"], failed["step"]) == (3, 10)
    assert failed["retry_s"] > 0
    save(promoter, place[0], 20, 2)
    told.wait_for("checkpoint_copied", 2, tier="far")
    blocked.unlink()
    assert told.wait_for("checkpoint_copied", tier="disk")["step"] == 20
    assert held(place[1]) == [20]


def test_a_damaged_copy_is_not_spread_another_one_or_an_older_one_is(place, promoting):
    promoter, told = promoting(place[:2])
    save(promoter, place[0], 10, 1)
    told.wait_for("checkpoint_copied")
    promoter.close()
    for step in (20, 30):
        commit(place[0], step, step // 10)
    shutil.copytree(os.path.join(place[0].directory, "step_000000020.a0001"),
                    os.path.join(place[1].directory, "step_000000020.a0001"))  # fmt: skip
    for step in (20, 30):
        with open(os.path.join(place[0].directory, f"step_{step:09d}.a0001", "__0_0.distcp"), "r+b") as file:
            file.write(b"rot")
    _, told = promoting([place[0], place[1], place[2]])
    done = told.wait_for("checkpoint_copied", tier="far")
    assert (done["step"], done["source"]) == (20, os.path.join(place[1].directory, "step_000000020.a0001"))


def test_a_copy_that_does_not_move_is_given_up_left_behind_once_and_made_when_the_tier_comes_back(
    place, promoting, monkeypatch
):
    gate, hangs = threading.Event(), []
    real = posix.PosixStore.begin

    def begin(self, name, run_id):
        if "disk" in self.location:
            hangs.append(threading.current_thread())
            gate.wait(PATIENCE_S)
        return real(self, name, run_id)

    monkeypatch.setattr(posix.PosixStore, "begin", begin)
    crew, uses = Crew(), InUse()
    promoter, told = promoting(place, stall_s=0.3, crew=crew, uses=uses)
    path = save(promoter, place[0], 10, 1)
    assert told.wait_for("checkpoint_copied", tier="far")["step"] == 10
    assert "no progress" in told.wait_for("copy_failed", tier="disk")["error"]
    assert "waited for" in told.wait_for("copy_failed", 3, tier="disk")["error"]
    assert len(hangs) == 1, "threads pile up in a mount that hangs"
    assert crew.stuck == ["copy from memory to disk"]
    assert uses.held(path), "what a stuck thread has open may be deleted"
    gate.set()
    assert told.wait_for("checkpoint_copied", tier="disk")["step"] == 10
    verify(place[1].store(), "step_000000010.a0001")


def test_at_the_end_what_is_missing_is_said_and_not_waited_for_long(place, promoting, tmp_path):
    (tmp_path / "disk").write_text("not a directory")
    promoter, told = promoting(place)
    save(promoter, place[0], 10, 1)
    told.wait_for("copy_failed", tier="disk")
    (missing,) = promoter.drain(PATIENCE_S)
    assert missing.startswith("tier 'disk' lacks step 10: ")
    assert "Not a directory" in missing
    assert "nothing of this run is there" in missing
    assert held(place[2]) == [10]


def test_what_is_copied_is_not_deleted_meanwhile(place, promoting, monkeypatch):
    """Retention asks in the middle of a copy, on both tiers."""
    gate, reached = threading.Event(), threading.Event()
    real = posix.PosixStore.begin

    def begin(self, name, run_id):
        found = real(self, name, run_id)
        reached.set()
        gate.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(posix.PosixStore, "begin", begin)
    uses = InUse()
    memory = Tier(name="memory", directory=place[0].directory, keep_last=1)
    promoter, told = promoting([memory, place[1]], uses=uses)
    path = save(promoter, memory, 10, 1)
    assert reached.wait(PATIENCE_S)
    for sequence in (2, 3):
        commit(memory, 10 * sequence, sequence)
    holdings = retire.Holdings(run_id="r", live_attempt=1)
    gone = retire.prune(memory, holdings, in_use=uses)
    assert [os.path.basename(item.path)[:14] for item in gone] == ["step_000000020"]
    gate.set()
    assert told.wait_for("checkpoint_copied")["source"] == path
    while uses.held(path):
        time.sleep(0.005)
    assert [item.path for item in retire.prune(memory, holdings, in_use=uses)] == [path]


def test_a_full_tier_gives_back_what_half_a_copy_took(place, promoting, tmp_path):
    small = tmp_path / "disk"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount")
    try:
        promoter, told = promoting(place[:2])
        save(promoter, place[0], 10, 1, size=400_000)
        told.wait_for("checkpoint_copied")
        save(promoter, place[0], 20, 2, size=400_000, files=2)
        failed = told.wait_for("copy_failed")
        assert "No space left" in failed["error"]
        assert failed["errno"] == 28
        assert os.listdir(place[1].directory) == ["step_000000010.a0001"]
        place[1].store().delete("step_000000010.a0001")
        assert told.wait_for("checkpoint_copied", 2)["step"] == 20
    finally:
        promoter.close()
        subprocess.run(["umount", "-l", small], check=True)


AGENT = """
import sys
from ckptd.node.promote import Promoter
from ckptd.node.tiers import Tier
from ckptd.node.inuse import InUse
from ckptd.tiers import Crew
tiers = [Tier(name=n, directory=d) for n, d in zip(("memory", "disk", "far"), sys.argv[1:])]
Promoter(tiers=tiers, run_id="r", crew=Crew(), in_use=InUse(), tell=lambda kind, **data: print(kind, data["step"], flush=True))
sys.stdin.read()
"""


def test_killed_again_and_again_it_loses_nothing_and_ends_with_everything_everywhere(place, promoting):
    """A real process promotes; it is killed with -9 at points that nobody chose, and a next one goes on."""
    for sequence in (1, 2, 3):
        commit(place[0], 10 * sequence, sequence, size=3_000_000, files=4)
    for wait_s in (0.0, 0.03, 0.06, 0.1):
        with subprocess.Popen(
            [sys.executable, "-c", AGENT, *(tier.directory for tier in place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                for tier in place[1:]:
                    deadline = time.monotonic() + PATIENCE_S
                    where = tier.directory.removeprefix("file://")
                    while not os.path.isdir(where) and time.monotonic() < deadline:
                        time.sleep(0.001)
                time.sleep(wait_s)
            finally:
                process.kill()
        # Whatever is committed there now is whole, and a restart has something to go on from.
        answer = inventory(Question(tiers=place, run_id="r"))
        assert (answer["chosen"]["step"], answer["rejected"]) == (30, [])
    promoter, _ = promoting(place)
    assert promoter.drain(PATIENCE_S) == []
    for tier in place[1:]:
        assert verify(tier.store(), "step_000000030.a0001").sequence == 3
        listed = os.listdir(tier.directory.removeprefix("file://"))
        assert all(name.startswith("step_") for name in listed), listed


def test_an_object_store_in_memory(place, promoting):
    promoter, told = promoting([place[0], Tier(name="far", directory=f"memory://{uuid.uuid4()}/job")])
    save(promoter, place[0], 10, 1)
    path = told.wait_for("checkpoint_copied")["path"]
    assert path.startswith("memory://")
    verify(open_store(os.path.dirname(path)), os.path.basename(path))


def test_waits_grow_to_some_minutes_and_are_spread():
    assert [retry_after(k, jitter=0) for k in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert retry_after(1000, jitter=0) == promote.MAX_RETRY_S
    assert retry_after(1, jitter=-1) < 2.0 < retry_after(1, jitter=1)


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB and a few inodes where the disk tier lies; `small.remount` changes it."""
    at = tmp_path / "disk"
    at.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", at], capture_output=True, check=False)

    if mount("size=4m,nr_inodes=8").returncode != 0:
        pytest.skip("only root can mount")
    yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", at], check=True)
    subprocess.run(["umount", "-l", at], check=True)


def test_a_tier_without_inodes_gives_them_back_and_gets_the_next_copy_when_there_are_some(place, promoting, small):
    promoter, told = promoting(place)
    save(promoter, place[0], 10, 1)
    told.wait_for("checkpoint_copied", tier="disk")
    save(promoter, place[0], 20, 2, files=6)
    failed = told.wait_for("copy_failed", tier="disk")
    assert (failed["errno"], failed["step"]) == (28, 20)
    assert "No space left on device" in failed["error"]
    assert ".copy-step_000000020.a0001" in failed["error"], "it does not say which file"
    assert told.wait_for("checkpoint_copied", 2, tier="far")["step"] == 20, "another tier had to wait"
    assert os.path.isdir(os.path.join(place[1].directory, "step_000000010.a0001"))
    verify(place[1].store(), "step_000000010.a0001")
    small("nr_inodes=100")
    assert told.wait_for("checkpoint_copied", 2, tier="disk")["step"] == 20
    assert sorted(os.listdir(place[1].directory)) == ["step_000000010.a0001", "step_000000020.a0001"]


def test_a_tier_that_was_made_read_only_says_so_and_is_served_when_it_is_writable(place, promoting, small):
    promoter, told = promoting(place)
    save(promoter, place[0], 10, 1)
    told.wait_for("checkpoint_copied", tier="disk")
    small("ro")
    save(promoter, place[0], 20, 2)
    failed = told.wait_for("copy_failed", tier="disk")
    assert (failed["errno"], "Read-only file system" in failed["error"]) == (30, True)
    assert told.wait_for("checkpoint_copied", 2, tier="far")["step"] == 20
    rules = retire.Holdings(run_id="r")
    assert retire.prune(Tier(name="disk", directory=place[1].directory, keep_last=1), rules) == []
    answer = inventory(Question(tiers=place[1:], run_id="r", expected={"disk": 2, "far": 2}))
    assert answer["chosen"]["step"] == 10, "the newest that workers can read: nothing can be brought there"
    assert "Read-only" in answer["rejected"][0]["problem"]
    small("rw,nr_inodes=100")
    assert told.wait_for("checkpoint_copied", 2, tier="disk")["step"] == 20


def failing(monkeypatch, call, number, where):
    """Have an operating system's call fail for descriptors of files under `where`, for as long as the list has an entry."""
    real, left = getattr(os, call), [True]

    def fails(fd, *args):
        if left and where in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        return real(fd, *args)

    monkeypatch.setattr(os, call, fails)
    return left


def test_a_quota_that_is_used_up_is_told_and_half_a_copy_is_taken_back(place, promoting, monkeypatch):
    left = failing(monkeypatch, "write", errno.EDQUOT, "/disk/job/.copy-step_000000010.a0001/__1")
    promoter, told = promoting(place)
    save(promoter, place[0], 10, 1, files=2)
    failed = told.wait_for("copy_failed", tier="disk")
    assert (failed["errno"], "quota exceeded" in failed["error"].lower()) == (errno.EDQUOT, True)
    assert told.wait_for("checkpoint_copied", tier="far")["step"] == 10
    left.clear()
    assert told.wait_for("checkpoint_copied", tier="disk")["step"] == 10
    assert os.listdir(place[1].directory) == ["step_000000010.a0001"]


def test_a_disk_that_reads_badly_is_passed_over_for_another_copy(place, promoting, monkeypatch):
    promoter, told = promoting(place[:2])
    save(promoter, place[0], 10, 1)
    told.wait_for("checkpoint_copied")
    promoter.close()
    failing(monkeypatch, "readv", errno.EIO, "/memory/job/step_000000010.a0001")
    _, told = promoting(place)
    done = told.wait_for("checkpoint_copied", tier="far")
    assert done["source"].startswith(place[1].directory)
    answer = inventory(Question(tiers=place, run_id="r"))
    assert (answer["chosen"]["step"], answer["chosen"]["tier"]) == (10, "disk")
    assert "Input/output error" in answer["rejected"][0]["problem"]
