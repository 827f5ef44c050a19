from __future__ import annotations

import dataclasses
import os

import pytest
from checkpoints import commit

from ckptd.node import tiers
from ckptd.node.inventory import Question, inventory
from ckptd.node.tiers import Tier
from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, Marker
from ckptd_shim.digest import crc32c_bytes


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "job").mkdir()
    return Tier(name="disk", directory=str(tmp_path / "job"), keep_last=2)


def ask(tier, known=None, **options):
    return inventory(Question(tiers=[tier], run_id="r", known=known or {}, **options))


def known(*paths):
    """What the ledger knows of these commits."""
    found = {}
    for path in paths:
        with open(os.path.join(path, COMMITTED), "rb") as file:
            found[tiers.marker_key("disk", path)] = crc32c_bytes(file.read())
    return found


def test_the_newest_is_the_one_committed_last_whatever_its_name_or_step(tier):
    """Steps 900 and 1000 in names of other widths, a later attempt at a lower step, and a commit sequence that decides."""
    commit(tier, 1000, 2, name="step_1000.a0001")
    commit(tier, 900, 1, name="step_000000900.a0001")
    commit(tier, 950, 3, attempt=2, name="step_0000950.a2")
    answer = ask(tier)
    assert (answer["chosen"]["step"], answer["chosen"]["sequence"], answer["commits"]) == (950, 3, 3)
    assert answer["newest_sequence"] == 3


def test_a_directory_without_a_marker_is_neither_chosen_nor_a_commit(tier):
    os.mkdir(os.path.join(tier.directory, contract.checkpoint_dirname(99, 1)))
    assert ask(tier) | {"seconds": 0} == {
        "chosen": None, "rejected": [], "unreachable": [], "commits": 0, "newest_sequence": 0, "seconds": 0, "problem": ""}  # fmt: skip


def test_a_damaged_file_sends_it_to_the_one_before(tier):
    commit(tier, 10, 1)
    path = commit(tier, 20, 2)
    with open(os.path.join(path, "__0_0.distcp"), "r+b") as file:
        file.write(b"X")
    answer = ask(tier)
    assert answer["chosen"]["step"] == 10
    assert [r["path"] for r in answer["rejected"]] == [path]
    assert "CRC-32C" in answer["rejected"][0]["problem"]
    assert (answer["commits"], answer["newest_sequence"]) == (2, 2)


def test_a_marker_that_was_changed_is_believed_only_where_the_ledger_knows_no_better(tier):
    commit(tier, 10, 1)
    path = commit(tier, 20, 2)
    before = known(path)
    changed = dataclasses.replace(Marker.read(os.path.join(path, COMMITTED)), samples_seen=241)
    changed.write(os.path.join(path, COMMITTED))
    assert ask(tier)["chosen"]["samples_seen"] == 241
    answer = ask(tier, before)
    assert answer["chosen"]["step"] == 10
    assert "its marker has CRC-32C" in answer["rejected"][0]["problem"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"step": 21}, "its marker is of step 21"), ({"attempt": 9}, "attempt 9"), ({"format": 99}, "its format is 99")],
)
def test_a_marker_of_something_else_is_rejected(tier, changed, why):
    path = commit(tier, 20, 2)
    name = os.path.join(path, COMMITTED)
    dataclasses.replace(Marker.read(name), **changed).write(name)
    answer = ask(tier)
    assert answer["chosen"] is None
    assert why in answer["rejected"][0]["problem"]
    assert answer["commits"] == 1, "it counts as a commit: no cold start"


def test_a_suspect_is_never_chosen_and_still_counts_as_a_commit(tier):
    for step in (10, 20, 30):
        commit(tier, step, step // 10)
    assert ask(tier, suspects=[[2, None]])["chosen"]["step"] == 10
    assert ask(tier, suspects=[[2, 2]])["chosen"]["step"] == 30
    answer = ask(tier, suspects=[[1, 3]])
    assert (answer["chosen"], answer["commits"], answer["newest_sequence"]) == (None, 3, 3)


def test_a_tier_that_cannot_be_read_is_a_problem_and_not_an_empty_one(tier, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    broken = dataclasses.replace(tier, directory=str(file))
    assert "cannot be read" in ask(broken)["problem"]
