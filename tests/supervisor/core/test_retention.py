import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.retention import Held, Rules, judge, plan


def held(sequence, **values):
    defaults = {"path": f"/c/{sequence}", "step": 10 * sequence, "sequence": sequence, "created_t": 60.0 * sequence}
    return Held(**(defaults | values))


def doomed(inventory, rules, **keywords):
    return [d.path for d in plan(inventory, rules, **{"protected": (), **keywords})]


def test_keeps_the_newest_and_deletes_from_the_oldest():
    inventory = [held(i) for i in (3, 1, 5, 2, 4)]
    assert doomed(inventory, Rules(keep_last=2)) == ["/c/1", "/c/2", "/c/3"]


def test_order_is_the_commit_sequence_not_step_or_time():
    stale = held(1, step=9_999_999, created_t=1e9)
    assert doomed([stale, held(2), held(3)], Rules(keep_last=2)) == ["/c/1"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_nothing_is_refused(keep_last):
    with pytest.raises(ValueError, match="at least 1"):
        Rules(keep_last=keep_last)


@pytest.mark.parametrize("rules", [{"keep_every_steps": 0}, {"keep_every_seconds": -1.0}])
def test_periods_must_be_positive(rules):
    with pytest.raises(ValueError, match="above zero"):
        Rules(**rules)


def test_uncommitted_ones_take_no_slot():
    inventory = [held(1), held(0, path="/c/partial", committed=False, step=99, attempt=7)]
    assert doomed(inventory, Rules(keep_last=1), live_attempt=7) == []


def test_partial_ones_go_when_their_attempt_is_dead():
    inventory = [held(1), *(held(0, path=f"/c/p{a}", committed=False, attempt=a) for a in (2, 3, 4))]
    assert doomed(inventory, Rules(), live_attempt=3) == ["/c/p2"]
    assert doomed(inventory, Rules(), live_attempt=None) == ["/c/p2", "/c/p3", "/c/p4"]


def test_a_pin_takes_no_slot_and_unpinned_it_is_an_old_one():
    inventory = [held(1), held(2, pinned=True), held(3), held(4), held(5, pinned=True)]
    assert doomed(inventory, Rules(keep_last=2)) == ["/c/1"]
    inventory[1] = held(2)
    assert doomed(inventory, Rules(keep_last=2)) == ["/c/1", "/c/2"]


def test_newest_verified_stays_however_old():
    inventory = [held(1), held(2, verified=True), held(3), held(4, verified=False), held(5)]
    assert doomed(inventory, Rules(keep_last=1)) == ["/c/1", "/c/3", "/c/4"]


def test_a_bad_commit_fills_no_slot():
    inventory = [held(1), held(2), held(3, verified=False), held(4, verified=False)]
    assert doomed(inventory, Rules(keep_last=1)) == ["/c/1"]


def test_all_bad_keeps_the_newest():
    inventory = [held(i, verified=False) for i in (1, 2, 3)]
    assert doomed(inventory, Rules(keep_last=1)) == ["/c/1", "/c/2"]


def test_keep_every_steps_keeps_the_first_after_each_multiple():
    inventory = [held(i, step=s) for i, s in enumerate((50, 90, 105, 150, 198, 230, 310, 390, 400), start=1)]
    kept = {h.path for h in inventory} - set(doomed(inventory, Rules(keep_last=1, keep_every_steps=100)))
    assert {h.step for h in inventory if h.path in kept} == {105, 230, 310, 400}


def test_keep_every_does_not_change_its_mind():
    rules = Rules(keep_last=2, keep_every_steps=100)
    inventory = []
    for i in range(1, 60):
        inventory.append(held(i, step=i * 17))
        gone = set(doomed(inventory, rules))
        inventory = [h for h in inventory if h.path not in gone]
    firsts = {min(s for s in range(17, 60 * 17, 17) if s // 100 == b) for b in range(1, 11)}
    assert {h.step for h in inventory} == firsts | {58 * 17, 59 * 17}


def test_keep_every_seconds_keeps_the_first_of_each_period():
    inventory = [held(i, created_t=c) for i, c in enumerate((10, 50, 120, 130, 290, 310), start=1)]
    assert doomed(inventory, Rules(keep_last=1, keep_every_seconds=100)) == ["/c/2", "/c/4"]


def test_after_a_rollback_the_newer_save_of_a_step_is_kept():
    inventory = [held(1, step=100), held(2, step=150), held(3, step=100, attempt=2), held(4, step=160, attempt=2)]
    assert doomed(inventory, Rules(keep_last=1, keep_every_steps=100)) == ["/c/1", "/c/2"]


def test_tiers_are_planned_each_for_itself():
    inventory = [held(i, tier=t, path=f"/{t}/{i}") for i in (1, 2) for t in ("disk", "memory")]
    assert sorted(doomed(inventory, Rules(keep_last=1))) == ["/disk/1", "/memory/1"]


inventories = st.lists(
    st.builds(
        Held,
        path=st.just(""),
        tier=st.sampled_from(["a", "b"]),
        step=st.integers(0, 60),
        sequence=st.integers(0, 30),
        attempt=st.integers(1, 5),
        committed=st.booleans(),
        verified=st.sampled_from([True, False, None]),
        created_t=st.floats(0, 1000),
        pinned=st.booleans(),
        in_use=st.booleans(),
    ),
    max_size=25,
)
some_rules = st.builds(
    Rules,
    keep_last=st.integers(1, 5),
    keep_every_steps=st.none() | st.integers(1, 30),
    keep_every_seconds=st.none() | st.floats(0.5, 500),
)


@given(inventories, some_rules, st.none() | st.integers(1, 5), st.sets(st.integers(0, 24)), st.randoms())
def test_what_is_never_deleted(raw, rules, live_attempt, protected, random):
    inventory = [Held(**{f: getattr(h, f) for f in h.__slots__} | {"path": f"/{i}"}) for i, h in enumerate(raw)]
    keep = {f"/{i}" for i in protected}
    result = plan(inventory, rules, protected=keep, live_attempt=live_attempt)
    gone = {d.path for d in result}
    assert len(gone) == len(result)
    assert all(d.why for d in result)
    assert not gone & keep
    for h in inventory:
        if h.path in gone:
            assert not h.pinned
            assert not h.in_use
            assert h.committed or live_attempt is None or h.attempt < live_attempt
        elif not h.committed:
            dead = live_attempt is None or h.attempt < live_attempt
            assert not dead or h.pinned or h.in_use or h.path in keep
    for tier in ("a", "b"):
        commits = [h for h in inventory if h.tier == tier and h.committed]
        for group in (commits, [h for h in commits if h.verified]):
            if group:
                newest = max(h.sequence for h in group)
                assert any(h.path not in gone for h in group if h.sequence == newest)
        good = sorted((h.sequence for h in commits if h.verified is not False and not h.pinned), reverse=True)
        survivors = [h for h in commits if h.verified is not False and not h.pinned and h.path not in gone]
        assert len(survivors) >= min(rules.keep_last, len(good))
        if rules.keep_every_steps is rules.keep_every_seconds is None and len(good) >= rules.keep_last:
            oldest_slot = good[rules.keep_last - 1]
            for h in survivors:
                assert h.sequence >= oldest_slot or h.in_use or h.path in keep or h.verified
    shuffled = list(inventory)
    random.shuffle(shuffled)
    assert {d.path for d in plan(shuffled, rules, protected=keep, live_attempt=live_attempt)} == gone


# --- suspects, and why each stays -------------------------------------------------------------------------------------


def test_a_suspect_fills_no_slot_and_goes_when_it_is_no_longer_among_the_newest():
    inventory = [held(1), held(2), held(3, suspect=True), held(4, suspect=True)]
    assert doomed(inventory, Rules(keep_last=2)) == []
    inventory += [held(5), held(6)]
    assert doomed(inventory, Rules(keep_last=2)) == ["/c/1", "/c/2", "/c/3", "/c/4"]


def test_where_only_suspects_are_newer_the_last_good_one_stays():
    inventory = [held(1, verified=True), *(held(i, suspect=True, verified=True) for i in (2, 3, 4))]
    assert "/c/1" not in doomed(inventory, Rules(keep_last=1))


def test_keep_every_does_not_keep_what_the_run_went_back_from():
    inventory = [held(1, step=100, suspect=True), held(2, step=110), held(3, step=300), held(4, step=310)]
    assert doomed(inventory, Rules(keep_last=1, keep_every_steps=100)) == ["/c/1"]


def test_each_is_told_why_it_stays():
    inventory = [
        held(1, pinned=True), held(2, in_use=True), held(3), held(4, step=100), held(5), held(6), held(7, suspect=True),
        held(8, verified=True), held(0, path="/c/p", committed=False, attempt=9),
    ]  # fmt: skip
    rules = Rules(keep_last=2, keep_every_steps=100)
    fates = judge(inventory, rules, protected={"/c/3": "attempt 2 resumed from it"}, live_attempt=9)
    assert {fate.path: fate.why for fate in fates if not fate.doomed} == {
        "/c/p": "attempt 9 may be writing it",
        "/c/1": "pinned",
        "/c/2": "in use",
        "/c/3": "attempt 2 resumed from it",
        "/c/4": "keep_every {steps: 100}: the first of its period",
        "/c/6": "one of the newest 2 (keep_last)",
        "/c/7": "not to be resumed from, kept while it is among the newest",
        "/c/8": "the newest that is verified",
    }
    assert [fate.path for fate in fates if fate.doomed] == ["/c/5"]


@given(inventories, st.data(), some_rules)
def test_suspects_never_push_out_what_may_be_resumed_from(raw, data, rules):
    """Whatever is suspect, the same good ones stay as if the suspects were not there."""
    inventory = [Held(**{f: getattr(h, f) for f in h.__slots__} | {"path": f"/{i}"}) for i, h in enumerate(raw)]
    suspect = {h.path for h in inventory if h.committed and data.draw(st.booleans())}
    marked = [Held(**{f: getattr(h, f) for f in h.__slots__} | {"suspect": h.path in suspect}) for h in inventory]
    kept = {f.path for f in judge(marked, rules) if not f.doomed}
    alone = {f.path for f in judge([h for h in marked if h.path not in suspect], rules) if not f.doomed}
    good = {h.path for h in inventory if h.verified is not False}  # a suspect is better than what is known to be bad
    assert alone & good - suspect <= kept
    assert {f.path for f in judge(marked, rules)} == {h.path for h in inventory}, "each has a fate"
