from __future__ import annotations

import json

from ckptd.core import events as ev
from ckptd.core import picture, tierbook
from ckptd.core.policy import Policy

TIERS = [{"name": "memory", "promote": None}, {"name": "disk", "promote": 2}, {"name": "far", "promote": "auto"}]


def started(tiers=TIERS, **changes):
    policy = json.loads(json.dumps(Policy(run_id="r", name="n", tiers=tiers, **changes).to_dict()))
    return ev.DaemonStarted(t=0.0, policy=policy)


def saved(sequence, at=100.0, **changes):
    return ev.SaveCommitted(t=1.0, at=at, step=10 * sequence, tier="memory", sequence=sequence, **changes)


def copied(sequence, tier="disk", seconds=2.0, at=101.0):
    return ev.CheckpointCopied(t=2.0, at=at, step=10 * sequence, tier=tier, sequence=sequence, seconds=seconds)


def fold(*history):
    book = ()
    for event in history:
        book = tierbook.apply(book, event)
    return book


def test_each_tier_knows_its_newest():
    book = fold(started(), saved(1), copied(1), saved(2), saved(3), copied(3), copied(1, "far"))
    assert [(t.name, t.newest_step, t.newest_sequence, t.copies) for t in book] == [
        ("memory", 30, 3, 3), ("disk", 30, 3, 2), ("far", 10, 1, 1),
    ]  # fmt: skip
    assert tierbook.newest_sequences(book) == {"memory": 3, "disk": 3, "far": 1}


def test_news_of_an_older_copy_takes_nothing_back():
    book = fold(started(), copied(3), copied(2))
    assert (book[1].newest_sequence, book[1].copies) == (3, 2)


def test_a_tier_fails_until_it_has_a_commit_again():
    failed = ev.CopyFailed(t=3.0, step=10, tier="far", error="forbidden", attempts=4, retry_s=16.0)
    book = fold(started(), failed)
    assert [t.failing for t in book] == [False, False, True]
    assert (book[2].error, book[2].attempts) == ("forbidden", 4)
    assert not fold(started(), failed, copied(1, "far"))[2].failing
    assert fold(started(), ev.SaveFailed(t=1.0, tier="memory", error="full"))[0].error == "full"


def test_tiers_are_those_of_the_newest_job_file_and_keep_what_is_known_of_them():
    book = fold(started(), saved(1), copied(1), started([TIERS[0], TIERS[2]]), saved(2))
    assert [(t.name, t.newest_sequence) for t in book] == [("memory", 2), ("far", 0)]
    assert fold(started(), started([*TIERS[:2]]), started())[2].newest_sequence == 0


def test_a_policy_of_an_older_ledger_has_no_tiers():
    assert fold(ev.DaemonStarted(t=0.0, policy={"run_id": "r", "name": "n"}), saved(1), copied(1)) == ()


def test_the_picture_says_how_often_and_moves_only_when_it_is_worth_it():
    """n of `far` follows the time of its copies; `disk` is told."""
    history = [
        started(interval_s=600.0, prior_device_seconds=2e5),
        ev.IntervalDecided(t=0.5, interval_s=600.0),
        saved(1),
        copied(1),
    ]
    shown = picture.replay(history)
    assert [t.every for t in shown.tiers] == [1, 2, 2], "far was not measured yet"
    shown = picture.apply(shown, copied(1, "far", seconds=100.0))
    often = shown.tiers[2].every
    assert often > 2
    shown = picture.apply(shown, copied(2, "far", seconds=100.5))
    assert shown.tiers[2].every == often
    for sequence in range(3, 20):
        shown = picture.apply(shown, copied(sequence, "far", seconds=5.0))
    assert shown.tiers[2].every < often
