"""What leaves a tier and what stays, on real directories."""

from __future__ import annotations

import os
import threading

import pytest

from ckptd.errors import UsageError
from ckptd.node import lookup, retire
from ckptd.node.inuse import InUse
from ckptd.node.retire import Holdings
from ckptd.node.tiers import Tier
from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, FileDigest, Marker
from ckptd_shim.digest import crc32c_file


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "job").mkdir()
    return Tier(name="disk", directory=str(tmp_path / "job"), keep_last=2)


def begin(tier, step, *, attempt=1, run_id="r"):
    path = os.path.join(tier.directory, contract.checkpoint_dirname(step, attempt))
    os.mkdir(path)
    if run_id is not None:
        with open(os.path.join(path, contract.OWNER), "w") as file:
            file.write(run_id)
    return path


def commit(tier, step, sequence, *, attempt=1, run_id="r"):
    path = begin(tier, step, attempt=attempt, run_id=run_id)
    name = os.path.join(path, "__0_0.distcp")
    with open(name, "wb") as file:
        file.write(f"weights at {step}".encode() * 50)
    size, crc = crc32c_file(name)
    marker = Marker(
        format=contract.FORMAT, run_id=run_id, sequence=sequence, step=step, samples_seen=12 * step, epoch=0,
        attempt=attempt, world_size=2, global_batch=12, loss=None, created=float(sequence), comparable=True,
        files=[FileDigest(name="__0_0.distcp", size=size, crc32c=crc)],
    )  # fmt: skip
    marker.write(os.path.join(path, COMMITTED))
    return path


def names(tier):
    return sorted(os.listdir(tier.directory))


def known_by(*paths):
    return sorted(map(os.path.basename, paths))


MINE = Holdings(run_id="r")


def test_pruning_keeps_the_newest_and_what_cannot_be_read(tier):
    made = [commit(tier, step, step // 10) for step in (10, 20, 30, 40)]
    with open(os.path.join(made[0], COMMITTED), "w") as file:
        file.write("{")
    assert [item.path for item in retire.prune(tier, MINE)] == [made[1]]
    assert names(tier) == known_by(made[0], *made[2:])


def test_what_another_run_made_and_what_nobody_signed_is_not_touched(tier):
    """Another run of the same name trains into the same directory: neither its commits nor what it is writing go."""
    foreign = [commit(tier, step, step, attempt=1, run_id="other") for step in (1, 2, 3)]
    writing = begin(tier, 4, attempt=1, run_id="other")
    unsigned = begin(tier, 5, attempt=1, run_id=None)
    (strange := os.path.join(tier.directory, "step_12")) and os.mkdir(strange)
    own = [commit(tier, step, step, attempt=7) for step in (10, 20, 30)]
    dead = begin(tier, 15, attempt=6)
    gone = retire.prune(tier, Holdings(run_id="r", live_attempt=7))
    assert [item.path for item in gone] == [dead, own[0]]
    assert names(tier) == known_by(*foreign, writing, unsigned, strange, *own[1:])
    reasons = {item.path: item.why for item in retire.survey(tier, MINE)}
    assert reasons[foreign[0]] == "of another run (other)"
    assert reasons[writing] == "begun by another run (other)"
    assert reasons[unsigned].startswith("nothing says which run began it")


def test_pinned_protected_used_suspect(tier):
    made = [commit(tier, step, step) for step in (1, 2, 3, 4, 5, 6, 7)]
    using = InUse()
    holdings = Holdings(
        run_id="r", pinned=(os.path.basename(made[0]),), protected={os.path.basename(made[1]): "resumed from"},
        suspects=((6, 6),),
    )  # fmt: skip
    with using.hold(f"/elsewhere/{os.path.basename(made[2])}"):
        fates = {item.step: item.why for item in retire.survey(tier, holdings, in_use=using)}
        gone = retire.prune(tier, holdings, in_use=using)
    assert [item.step for item in gone] == [4]
    assert fates[1] == "pinned"
    assert fates[2] == "resumed from"
    assert fates[3] == "in use"
    assert fates[5] == "one of the newest 2 (keep_last)", "the suspect in between takes no slot"
    assert "not to be resumed from" in fates[6]
    assert fates[7] == "the newest"
    assert [item.step for item in retire.prune(tier, holdings, in_use=using)] == [3], "nobody uses it any more"


def test_one_known_to_be_bad_does_not_stand_in_for_a_good_one(tier):
    made = [commit(tier, step, step) for step in (1, 2, 3, 4)]
    verified = {made[0]: True, made[3]: False, made[2]: False}
    assert [item.path for item in retire.prune(tier, MINE, verified=verified)] == []
    assert [item.path for item in retire.prune(tier, MINE)] == made[:2]


def test_five_kept_before_a_restart_and_five_saved_after_it_are_five_in_all(tier):
    five = Tier(name="disk", directory=tier.directory, keep_last=5)
    for step in range(1, 6):
        commit(five, step, step, attempt=1)
        retire.prune(five, Holdings(run_id="r", live_attempt=1))
    for step in range(6, 11):
        commit(five, step, step, attempt=2)
        retire.prune(five, Holdings(run_id="r", live_attempt=2))
    assert [contract.parse_checkpoint_dirname(name)[0] for name in names(five)] == [6, 7, 8, 9, 10]


def test_a_pin_in_the_middle_of_a_deletion_is_kept_or_refused(tier):
    """Whatever the moment: either the pin is taken and the checkpoint is there afterwards, or it is gone and refused."""
    outcomes = set()
    for round_ in range(60):
        made = [commit(tier, step, step) for step in range(1, 9)]
        using, wanted = InUse(), made[round_ % 6]
        begun, said = threading.Barrier(2), []

        def pin(using=using, wanted=wanted, begun=begun, said=said):
            begun.wait()
            with using.lock:
                if os.path.exists(os.path.join(wanted, COMMITTED)):
                    using.pinned.add(os.path.basename(wanted))
                    said.append("pinned")
                else:
                    said.append("refused")

        thread = threading.Thread(target=pin)
        thread.start()
        items = retire.survey(tier, MINE, in_use=using)
        begun.wait()
        gone = {item.path for item in retire.delete(tier, items, in_use=using)}
        thread.join()
        assert (wanted in gone) is (said == ["refused"]) is not os.path.exists(wanted)
        outcomes |= set(said)
        for path in made:
            retire.delete(tier, [i for i in retire.survey(tier, MINE) if i.path == path])
            if os.path.exists(path):
                retire.delete(tier, [retire.Item(path=path, tier="disk", step=1, what="committed", goes=True, why="")])
    assert "pinned" in outcomes


def test_garbage_is_collected_and_a_dry_run_only_says_so(tier):
    made = [commit(tier, step, step) for step in (1, 2, 3)]
    partial = begin(tier, 9, attempt=2)
    doomed = os.path.join(tier.directory, ".doomed-step_000000000.a0001")
    stale_copy = os.path.join(tier.directory, ".copy-step_000000099.a0001")
    live_copy = os.path.join(tier.directory, ".copy-" + os.path.basename(made[2]))
    strange = os.path.join(tier.directory, ".doomed-my notes")
    for path in (doomed, stale_copy, live_copy, strange):
        os.mkdir(path)
    before = names(tier)
    dry = retire.collect([tier], MINE, dry_run=True)
    assert names(tier) == before
    going = [item["path"] for item in dry["items"] if item["goes"]]
    assert going == [partial, made[0], stale_copy, doomed]
    assert not any(item["gone"] for item in dry["items"])
    wet = retire.collect([tier], MINE, dry_run=False)
    assert [item["path"] for item in wet["items"] if item["gone"]] == going
    assert names(tier) == sorted(set(before) - {os.path.basename(path) for path in going})
    assert wet["problems"] == []


def test_what_cannot_be_read_is_a_problem_and_its_copies_stay(tier, tmp_path):
    (tmp_path / "file").write_text("")
    os.mkdir(copy := os.path.join(tier.directory, ".copy-step_000000099.a0001"))
    found = retire.collect([Tier(name="far", directory=str(tmp_path / "file")), tier], MINE, dry_run=False)
    assert "tier 'far' cannot be read" in found["problems"][0]
    assert os.path.isdir(copy), "what it is a copy of may be on the tier that cannot be read"


# --- which one is meant -------------------------------------------------------------------------------------------------


def test_a_step_that_was_committed_twice_means_the_newer_commit_or_the_one_that_is_named(tier):
    old, new = commit(tier, 10, 1, attempt=1), commit(tier, 10, 5, attempt=2)
    assert lookup.find([tier], "r", step=10).path == new
    assert lookup.find([tier], "r", step=10, path=old).path == old
    assert lookup.find([tier], "r", step=10, path=os.path.basename(old)).path == old
    with pytest.raises(UsageError, match="is of step 10, not 11"):
        lookup.find([tier], "r", step=11, path=old)


def test_what_is_not_committed_is_refused_and_what_is_committed_is_listed(tier):
    for step in (10, 20, 30):
        commit(tier, step, step // 10)
    partial = begin(tier, 40)
    commit(tier, 50, 9, attempt=3, run_id="other")
    broken = commit(tier, 60, 6)
    with open(os.path.join(broken, COMMITTED), "w") as file:
        file.write("{")
    listed = "committed are, newest first: 30, 20, 10"
    for step, why in (
        (11, "there is no checkpoint of step 11"),
        (40, f"{partial} is not committed"),
        (50, "of another run"),
        (60, "cannot be trusted"),
    ):
        with pytest.raises(UsageError) as refused:
            lookup.find([tier], "r", step=step)
        assert why in str(refused.value)
        assert listed in str(refused.value)
    with pytest.raises(UsageError, match="on the tiers of this run"):
        lookup.find([tier], "r", step=10, path="/nowhere/step_000000010.a0001")


def test_going_back_to_a_damaged_one_is_refused(tier):
    path = commit(tier, 10, 1)
    assert lookup.verified([tier], "r", step=10).path == path
    with open(os.path.join(path, "__0_0.distcp"), "r+b") as file:
        file.write(b"X")
    with pytest.raises(UsageError, match="step 10 is damaged"):
        lookup.verified([tier], "r", step=10)
