"""What can be resumed from, as long as every file of it is held by somebody who lives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import decisions, holdings, picture, run
from ckptd.core import events as ev
from ckptd.core.commands import Ask, Gather, Launch, OpenStore, Record
from ckptd.core.policy import Policy

NODES = ("a", "b", "c")


def holding(sequence, held, *, files=6, tier="memory", run_id="r", crc=None):
    name = f"step_{10 * sequence:09d}.a0001"
    return {
        "tier": tier, "name": name, "path": f"/{tier}/{name}", "step": 10 * sequence, "attempt": 1, "sequence": sequence,
        "run_id": run_id, "created": float(sequence), "samples_seen": 120 * sequence, "world_size": 3, "comparable": True,
        "marker_crc32c": crc or f"{sequence:08x}", "files": files, "held": holdings.as_ranges(held),
    }  # fmt: skip


def mirrored(sequence, nodes=NODES, **more):
    """Each node's own two files and those of the node before it."""
    count = len(nodes)
    return {
        node: [holding(sequence, [2 * k, 2 * k + 1, 2 * ((k - 1) % count), 2 * ((k - 1) % count) + 1], **more)]
        for k, node in enumerate(nodes)
    }


def choose(reports, tiers=("memory",), **more):
    return holdings.choose(reports, tiers, run_id="r", **more)


@given(st.sets(st.integers(0, 40)))
def test_ranges_say_what_they_were_made_of(places):
    ranges = holdings.as_ranges(places)
    assert holdings.from_ranges(ranges) == places
    assert all(first <= last for first, last in ranges)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(ranges))


def test_any_one_node_may_be_lost_and_of_three_no_two():
    reports = mirrored(4)
    assert choose(reports).sequence == 4
    for lost in NODES:
        left = {node: held for node, held in reports.items() if node != lost}
        found = choose(left)
        assert found.sequence == 4
        assert list(found.holders) == list(left)
        assert found.commit["path"].endswith("step_000000040.a0001")
    for one in NODES:
        assert choose({one: reports[one]}) is None


def test_what_is_not_all_there_gives_way_to_an_older_one_that_is():
    reports = {"a": [holding(5, [0, 1]), *mirrored(4)["a"]], "b": [holding(5, [2, 3]), *mirrored(4)["b"]]}
    assert choose(reports).sequence == 4
    assert holdings.seen(reports, run_id="r") == (2, 5)


def test_two_commits_under_one_name_are_not_put_together():
    reports = {"a": [holding(4, [0, 1, 2], crc="aaaaaaaa")], "b": [holding(4, [3, 4, 5], crc="bbbbbbbb")]}
    assert choose(reports) is None


def test_of_one_commit_the_fastest_tier_and_what_is_held_against_one_counts():
    both = {"a": [holding(4, range(6), tier="disk"), holding(4, range(6))]}
    assert choose(both, ("memory", "disk")).commit["tier"] == "memory"
    assert choose(both, ("disk", "memory")).commit["tier"] == "disk"
    newer = {"a": [holding(5, range(6)), holding(4, range(6))]}
    assert choose(newer, avoid={"step_000000050.a0001"}).sequence == 4
    assert choose({"a": newer["a"][:1]}, avoid={"step_000000050.a0001"}).sequence == 5
    assert choose(newer, suspects=[(5, None)]).sequence == 4


def test_commits_of_an_earlier_run_serve_where_this_one_has_none():
    reports = {"a": [holding(9, range(6), run_id="old"), holding(2, range(6))]}
    assert choose(reports).sequence == 2
    assert choose({"a": reports["a"][:1]}).commit["run_id"] == "old"


# --- what the run's state machine makes of it -------------------------------------------------------------------------


def policy(*tiers):
    return Policy(run_id="r", nodes=NODES, tiers=[{"name": n, "promote": None, "shared": s} for n, s in tiers])


MEMORY_ONLY = policy(("memory", False))
WITH_DISK = policy(("memory", False), ("disk", True))


def until_asked(policy, nodes=NODES):
    state = run.apply(run.RunState(), ev.DaemonStarted(t=0.0, policy=policy.to_dict()))
    for k, node in enumerate(nodes):
        state = run.apply(state, ev.AgentConnected(t=1.0, node=node, pid=k + 1, devices=[{"index": 0}], address=node))
        state = run.apply(state, ev.HealthReported(t=1.0, node=node))
    return state


def report(state, reports):
    for node, held in reports.items():
        state = run.apply(state, ev.HoldingsReported(t=2.0, node=node, holdings=held, port=1000))
    return state


def settle(state, t=3.0):
    """Carry out records until there is something else to do."""
    while len(commands := decisions.decide(state, t)) == 1 and isinstance(commands[0], Record):
        state = run.apply(state, commands[0].event)
    return state, commands


def test_every_node_is_asked_what_it_holds_before_anything_is_chosen():
    state = until_asked(MEMORY_ONLY)
    assert decisions.decide(state, 2.0) == [Ask(node=node, what="holdings") for node in NODES]
    state = report(state, {node: held for node, held in mirrored(4).items() if node != "c"})
    assert decisions.decide(state, 2.0) == [Ask(node="c", what="holdings")]


def test_files_are_gathered_before_any_worker_starts():
    state, commands = settle(report(until_asked(MEMORY_ONLY), mirrored(4)))
    assert state.attempt == 1
    assert (state.resume["sequence"], state.resume["tier"]) == (4, "memory")
    assert commands == [Gather(node=node, attempt=1) for node in NODES]
    for node in NODES[:2]:
        state = run.apply(state, ev.FilesGathered(t=4.0, node=node, attempt=1))
    assert decisions.decide(state, 4.0) == [Gather(node="c", attempt=1)]
    state = run.apply(state, ev.FilesGathered(t=4.0, node="c", attempt=1))
    assert decisions.decide(state, 4.0) == [OpenStore(node="a", attempt=1)]
    state = run.apply(state, ev.StoreOpened(t=5.0, node="a", attempt=1, host="a", port=1))
    assert decisions.decide(state, 5.0) == [Launch(node=node, attempt=1) for node in NODES]


def test_nothing_held_by_anybody_is_a_fresh_start_and_only_then():
    state, commands = settle(report(until_asked(MEMORY_ONLY), {node: [] for node in NODES}))
    assert state.resume is None
    assert commands == [OpenStore(node="a", attempt=1)]
    lost, _ = settle(report(until_asked(MEMORY_ONLY), {"a": [holding(4, [0])], "b": [], "c": []}))
    assert lost.outcome is not None
    assert lost.outcome.outcome == "failed"


def test_the_next_tier_is_asked_only_where_it_may_have_something_newer():
    state, commands = settle(report(until_asked(WITH_DISK), mirrored(4)))
    assert state.resume["sequence"] == 4, "nothing newer than what is all there is known of"

    torn = {"a": [holding(5, [0, 1]), *mirrored(4)["a"]], "b": mirrored(4)["b"], "c": mirrored(4)["c"]}
    state, commands = settle(report(until_asked(WITH_DISK), torn))
    (ask,) = commands
    assert (ask.node, ask.what, ask.floor) == ("a", "inventory", 4)
    older, _ = settle(run.apply(state, ev.InventoryReported(t=4.0, node="a")))
    assert (older.resume["tier"], older.resume["sequence"]) == ("memory", 4)
    disk = {**holding(5, [], tier="disk"), "tier": "disk"}
    newer, commands = settle(run.apply(state, ev.InventoryReported(t=4.0, node="a", chosen=disk, commits=1)))
    assert (newer.resume["tier"], newer.resume["sequence"]) == ("disk", 5)
    assert commands == [OpenStore(node="a", attempt=1)], "everybody sees it"


def test_what_one_node_brought_from_an_object_store_the_others_get_from_it():
    state, _ = settle(report(until_asked(WITH_DISK), {node: [] for node in NODES}))
    fetched = {**holding(5, []), "fetched_from": {"tier": "far", "path": "s3://x"}}
    state, commands = settle(run.apply(state, ev.InventoryReported(t=4.0, node="a", chosen=fetched, commits=1)))
    assert commands == [Gather(node=node, attempt=1) for node in NODES]
    assert holdings.holders(state.held, "memory", fetched["marker_crc32c"]) == {"a": [[0, 5]]}


def test_a_node_that_dials_in_while_the_others_wait_is_asked_too():
    state = report(until_asked(MEMORY_ONLY, NODES[:2]), {"a": [holding(4, [0, 1])], "b": [holding(4, [2, 3])]})
    state, _ = settle(state, t=2.5)
    state = run.apply(state, ev.AgentConnected(t=3.0, node="c", pid=9, devices=[{"index": 0}], address="c"))
    state = run.apply(state, ev.HealthReported(t=3.0, node="c"))
    assert Ask(node="c", what="holdings") in decisions.decide(state, 3.0)
    state, _ = settle(report(state, {"c": [holding(4, [4, 5])]}))
    assert state.resume["sequence"] == 4


@pytest.mark.parametrize(("told", "complete"), [(["a"], None), (["a", "b"], None), (["a", "b", "c"], 40)])
def test_a_commit_is_mirrored_when_every_nodes_part_has_a_second_copy(told, complete):
    now = picture.apply(picture.Picture(), ev.DaemonStarted(t=0.0, policy=MEMORY_ONLY.to_dict()))
    for source in told:
        event = ev.CheckpointMirrored(t=1.0, node="x", source=source, tier="memory", step=40, sequence=4, nodes=3)
        now = picture.apply(now, event)
    (tier,) = now.tiers
    assert tier.mirrored_step == complete


# --- who sees what ----------------------------------------------------------------------------------------------------

UNKNOWN = policy(("memory", None))


def see(state, seen, nodes=NODES):
    for node, others in seen.items():
        event = ev.SharingReported(t=2.0, node=node, nodes=list(nodes), seen={"memory": list(others)})
        state = run.apply(state, event)
    return state


def test_where_nobody_says_it_is_found_out_first_and_one_decides_for_all():
    state = until_asked(UNKNOWN)
    asked = decisions.decide(state, 2.0)
    assert asked == [Ask(node=n, what="sharing", nodes=NODES, tiers=("memory",)) for n in NODES]
    assert decisions.decide(see(state, {"a": NODES}), 2.0) == asked[1:]

    together, commands = settle(see(state, dict.fromkeys(NODES, NODES)))
    assert together.own_tiers == ()
    assert [(c.node, c.what) for c in commands] == [("a", "inventory")]

    apart, commands = settle(see(state, {node: (node,) for node in NODES}))
    assert apart.own_tiers == ("memory",)
    assert [(c.node, c.what) for c in commands] == [(node, "holdings") for node in NODES]


def test_what_not_all_see_is_nobodys_in_common():
    state, _ = settle(see(until_asked(UNKNOWN), {"a": NODES, "b": NODES, "c": ("a", "c")}))
    assert state.sharing == {"memory": False}


def test_a_node_that_comes_meanwhile_is_asked_with_the_others_again():
    state = see(until_asked(UNKNOWN, NODES[:2]), {"a": ("a", "b"), "b": ("a", "b")}, nodes=NODES[:2])
    state = run.apply(state, ev.AgentConnected(t=3.0, node="c", pid=9, devices=[{"index": 0}], address="c"))
    state = run.apply(state, ev.HealthReported(t=3.0, node="c"))
    assert [(c.node, c.what) for c in decisions.decide(state, 3.0)] == [(node, "sharing") for node in NODES]
