"""Which checkpoint a restart takes, out of several tiers in every state."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
from checkpoints import commit

from ckptd.node import inventory as inventory_module
from ckptd.node.inventory import Question, inventory
from ckptd.node.tiers import Tier, marker_key
from ckptd.tiers import copy_checkpoint, posix, verify
from ckptd_shim.digest import verify_checkpoint


@pytest.fixture
def tiers(tmp_path):
    return [
        Tier(name="memory", directory=str(tmp_path / "memory" / "job")),
        Tier(name="disk", directory=str(tmp_path / "disk" / "job")),
        Tier(name="far", directory=f"file://{tmp_path}/far/job"),
    ]


def ask(tiers, **options):
    return inventory(Question(tiers=tiers, run_id=options.pop("run_id", "r"), **options))


def spread(tiers, step, *names):
    """Copy a commit of the first tier to others."""
    for tier in tiers:
        if tier.name in names:
            copy_checkpoint(tiers[0].store(), tier.store(), f"step_{step:09d}.a0001")


def rot(tier, step):
    with open(f"{tier.directory.removeprefix('file://')}/step_{step:09d}.a0001/__0_0.distcp", "r+b") as file:
        file.write(b"rot")


def chosen(answer):
    return answer["chosen"]["step"], answer["chosen"]["tier"]


def test_the_newest_and_of_its_copies_the_fastest(tiers):
    commit(tiers[0], 10, 1)
    spread(tiers, 10, "disk", "far")
    assert chosen(ask(tiers)) == (10, "memory")
    commit(tiers[1], 20, 2)
    answer = ask(tiers)
    assert chosen(answer) == (20, "disk")
    assert (answer["commits"], answer["newest_sequence"], answer["rejected"]) == (2, 2, [])


def test_tier_by_tier_and_then_to_older_ones(tiers, tmp_path):
    commit(tiers[0], 10, 1)
    commit(tiers[0], 20, 2)
    spread(tiers, 10, "disk")
    spread(tiers, 20, "disk", "far")
    rot(tiers[0], 20)
    assert chosen(ask(tiers)) == (20, "disk")
    rot(tiers[1], 20)
    answer = ask(tiers)
    assert chosen(answer) == (20, "memory"), "brought from the object store, over the copy that had rotted"
    assert answer["chosen"]["fetched_from"] == {
        "tier": "far",
        "path": f"file://{tmp_path}/far/job/step_000000020.a0001",
    }
    rot(tiers[0], 20)
    rot(tiers[2], 20)
    answer = ask(tiers)
    assert chosen(answer) == (10, "memory")
    assert {r["tier"] for r in answer["rejected"]} == {"memory", "disk", "far"}


def test_what_lies_on_an_object_store_only_is_fetched_whole_and_told(tiers):
    commit(tiers[0], 10, 1, files=3)
    spread(tiers, 10, "far")
    shutil.rmtree(tiers[0].directory)
    told = []
    answer = ask(tiers, fetched=lambda *what: told.append(what))
    assert chosen(answer) == (10, "memory")
    assert verify_checkpoint(answer["chosen"]["path"], answer["chosen"]["marker_crc32c"]).step == 10
    ((found, to, copied),) = told
    assert (found.tier, to.name, copied.bytes) == ("far", "memory", 2100)
    assert chosen(ask(tiers)) == (10, "memory")
    assert "fetched_from" not in ask(tiers)["chosen"]


def test_it_is_fetched_to_the_fastest_tier_with_room_and_where_there_is_none_that_is_said(tiers, monkeypatch):
    commit(tiers[0], 10, 1)
    spread(tiers, 10, "far")
    shutil.rmtree(tiers[0].directory)
    monkeypatch.setattr(posix.PosixStore, "free_bytes", lambda self: 10 if "memory" in self.location else 10**9)
    assert chosen(ask(tiers)) == (10, "disk")
    shutil.rmtree(tiers[1].directory)
    monkeypatch.setattr(posix.PosixStore, "free_bytes", lambda _self: 10)
    answer = ask(tiers)
    assert answer["chosen"] is None
    assert "700 bytes are needed, 10 are free" in answer["rejected"][0]["problem"]
    assert answer["commits"] == 1, "it counts: no cold start"


def test_slower_tiers_are_not_asked_where_the_ledger_knows_that_they_have_nothing_newer(tiers, tmp_path):
    commit(tiers[0], 20, 2)
    (tmp_path / "disk").write_text("in the way")
    (tmp_path / "far").write_text("in the way")
    answer = ask(tiers, expected={"memory": 2, "disk": 2, "far": 1})
    assert (chosen(answer), answer["unreachable"], answer["newest_sequence"]) == ((20, "memory"), [], 2)


def test_a_tier_that_cannot_be_read_is_passed_over_where_another_one_is_as_new(tiers, tmp_path):
    commit(tiers[0], 10, 1)
    spread(tiers, 10, "far")
    shutil.rmtree(tmp_path / "memory")
    (tmp_path / "disk").write_text("in the way")
    answer = ask(tiers, expected={"memory": 1, "disk": 1, "far": 1})
    assert (chosen(answer), answer["problem"]) == ((10, "memory"), "")
    (told,) = answer["unreachable"]
    assert (told["tier"], told["expected"]) == ("disk", 1)
    assert "Not a directory" in told["problem"]


def test_where_it_may_hold_a_newer_one_it_is_waited_for_but_not_for_ever(tiers, tmp_path):
    commit(tiers[0], 10, 1)
    (tmp_path / "disk").write_text("in the way")
    expected = {"memory": 1, "disk": 5}
    answer = ask(tiers, expected=expected)
    assert answer["chosen"] is None
    assert "tier 'disk' cannot be read" in answer["problem"]
    assert "a newer commit than all others, 5 and not 1" in answer["problem"]
    answer = ask(tiers, expected=expected, settle=True)
    assert (chosen(answer), answer["problem"]) == ((10, "memory"), "")
    assert answer["newest_sequence"] == 5, "the next commit would be given a number that was given before"


def test_where_nothing_else_is_there_no_patience_is_enough(tiers, tmp_path):
    (tmp_path / "far").write_text("in the way")
    for settle in (False, True):
        answer = ask(tiers, settle=settle)
        assert answer["chosen"] is None
        assert "tier 'far' cannot be read" in answer["problem"]


def test_a_tier_that_hangs_is_one_that_cannot_be_read(tiers, monkeypatch):
    commit(tiers[0], 10, 1)
    spread(tiers, 10, "far")
    gate, real = threading.Event(), posix.PosixStore.names
    monkeypatch.setattr(inventory_module, "SCAN_PATIENCE_S", 0.2)
    monkeypatch.setattr(
        posix.PosixStore, "names", lambda self: gate.wait(60) and [] if "disk" in self.location else real(self)
    )
    try:
        answer = ask(tiers)
        assert chosen(answer) == (10, "memory")
        assert "no progress" in answer["unreachable"][0]["problem"]
    finally:
        gate.set()


def test_what_is_suspect_is_avoided_on_every_tier_while_there_is_another(tiers):
    commit(tiers[0], 10, 1)
    path = commit(tiers[0], 20, 2)
    spread(tiers, 20, "disk", "far")
    assert chosen(ask(tiers, avoid=[path], expected={"memory": 2, "disk": 2})) == (10, "memory")
    shutil.rmtree(os.path.join(tiers[0].directory, "step_000000010.a0001"))
    assert chosen(ask(tiers, avoid=[path])) == (20, "memory")


def test_a_marker_that_the_ledger_knows_otherwise_is_not_believed_on_any_tier(tiers):
    commit(tiers[0], 10, 1)
    spread(tiers, 10, "far")
    known = {marker_key("memory", "step_000000010.a0001"): "00000000"}
    answer = ask(tiers, known=known)
    assert (chosen(answer), answer["chosen"]["fetched_from"]["tier"]) == ((10, "memory"), "far")
    verify(tiers[0].store(), "step_000000010.a0001")


def test_commits_of_an_earlier_run_of_the_name_are_taken_where_this_one_has_none(tiers):
    commit(tiers[0], 10, 3, run_id="before")
    spread(tiers, 10, "far")
    shutil.rmtree(tiers[0].directory)
    answer = ask(tiers, run_id="now")
    assert (chosen(answer), answer["chosen"]["run_id"]) == ((10, "memory"), "before")
    assert answer["newest_sequence"] == 3
