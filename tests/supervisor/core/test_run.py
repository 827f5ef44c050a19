from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper_cluster import World

from ckptd.core import decisions, picture, run
from ckptd.core import events as ev
from ckptd.core.commands import Ask, Launch, OpenStore, Record, Steer, Stop
from ckptd.core.policy import Policy
from ckptd.core.state import Status

POLICY = Policy(run_id="r", name="n", interval_steps=10, wait_for_devices_s=3600.0)


def fold(*history):
    state = run.RunState()
    for event in history:
        state = run.apply(state, event)
    return state


def decide(state, t=100.0):
    """Decide as the daemon does, its records applied; returns the state, what was recorded and the orders."""
    recorded = []
    for _ in range(10):
        commands = decisions.decide(state, t)
        if not any(isinstance(c, Record) for c in commands):
            return state, recorded, commands
        assert len(commands) == 1
        recorded.append(commands[0].event)
        state = run.apply(state, commands[0].event)
    raise AssertionError("recorded for ever")


def connected(node="a", devices=2, **more):
    return ev.AgentConnected(t=1.0, node=node, devices=[{"index": i} for i in range(devices)], **more)


def chosen(step=10, sequence=1):
    return {"step": step, "tier": "disk", "path": f"/c/step_{step}", "marker_crc32c": "0", "sequence": sequence}


def until_training(policy=POLICY, node="a", resume=None):
    """The history of a run that has got to train on one node."""
    return [
        ev.DaemonStarted(t=0.0, policy=policy.to_dict()),
        connected(node),
        ev.HealthReported(t=1.0, node=node),
        ev.InventoryReported(t=1.0, node=node, chosen=resume, commits=1 if resume else 0),
        ev.AttemptLaunched(t=2.0, attempt=1, world_size=2, placement={node: [0, 1]}, resume=resume),
        ev.WorkersStarted(t=3.0, attempt=1, node=node),
        ev.WorkersInitialised(t=4.0, attempt=1, node=node),
        ev.StateRestored(t=5.0, attempt=1, node=node, step=(resume or {}).get("step", 0)),
        ev.FirstStep(t=6.0, attempt=1, node=node, step=1),
    ]


def test_a_launch_waits_for_health_and_inventory_and_takes_what_the_inventory_chose():
    history = until_training(resume=chosen(40, 4))
    assert decisions.decide(fold(*history[:2]), 1.0) == [Ask(node="a", what="health"), Ask(node="a", what="inventory")]
    assert decisions.decide(fold(*history[:3]), 1.0) == [Ask(node="a", what="inventory")]
    state, recorded, orders = decide(fold(*history[:4]))
    assert [(e.attempt, e.world_size, e.resume) for e in recorded] == [(1, 2, chosen(40, 4))]
    assert orders == [Launch(node="a", attempt=1)]
    assert state.step == 40


def test_the_states_follow_the_events():
    history = until_training()
    seen = [fold(*history[: i + 1]).status.value for i in range(4, len(history))]
    assert seen == ["launching", "initialising", "restoring", "first_step", "training"]


def test_lost_commits_never_make_a_cold_start():
    history = [*until_training()[:3], ev.InventoryReported(t=1.0, node="a", chosen=None, commits=2, rejected=[
        {"path": "/c/step_10", "problem": "truncated"}])]  # fmt: skip
    _, recorded, _ = decide(fold(*history))
    assert [(type(e), e.outcome, e.exit_status) for e in recorded] == [(ev.RunEnded, "failed", 1)]
    assert "/c/step_10: truncated" in recorded[0].detail


def test_started_again_by_hand_the_newest_checkpoint_on_disk_is_tried_first_whatever_was_held_against_it():
    history = until_training(resume=chosen(40, 4))
    for attempt in (1, 2):
        history += [
            ev.AttemptLaunched(
                t=6.0, attempt=attempt, world_size=2, placement={"a": [0, 1]}, resume=chosen(40, 4)
            ),
            ev.FailureDetected(t=7.0, detected_t=7.0, attempt=attempt, node="a", rank=0, exitcode=1),
            ev.AttemptEnded(t=8.0, attempt=attempt, node="a", exits=[{"rank": 0, "exitcode": 1}]),
            ev.Interrupted(t=7.0, detected_t=7.0, attempt=attempt, node="a", cause="exception", detail="rank 0: E"),
        ]  # fmt: skip
    doubted = fold(*history)
    assert doubted.suspects == ("/c/step_40",)
    history += [
        ev.HealthReported(t=8.0, node="a"),
        ev.InventoryReported(t=8.0, node="a", chosen=chosen(30, 3), commits=2, newest_sequence=4),
        ev.RunEnded(t=9.0, outcome="failed", exit_status=1),
        ev.DaemonStarted(t=20.0, policy=POLICY.to_dict()),
        connected(),
    ]
    assert Ask(node="a", what="inventory", avoid=()) in decisions.decide(fold(*history), 20.0)
    # What was found before is forgotten, also where less is found now.
    history += [
        ev.HealthReported(t=21.0, node="a"),
        ev.InventoryReported(t=21.0, node="a", chosen=chosen(20, 2), commits=1, newest_sequence=2),
    ]
    _, recorded, _ = decide(fold(*history), 21.0)
    assert [e.resume for e in recorded] == [chosen(20, 2)]


def test_a_commit_in_the_ledger_alone_is_reason_enough_not_to_begin_again():
    lost = [
        *until_training(), ev.SaveCommitted(t=7.0, attempt=1, step=10, sequence=1, path="/c/step_10"),
        ev.FailureDetected(t=8.0, detected_t=8.0, attempt=1, node="a", rank=0, exitcode=-9),
        ev.AttemptEnded(t=9.0, attempt=1, node="a", exits=[{"rank": 0, "exitcode": -9}]),
    ]  # fmt: skip
    state, _, _ = decide(fold(*lost), 9.0)
    state = run.apply(state, ev.HealthReported(t=9.0, node="a"))
    state = run.apply(state, ev.InventoryReported(t=9.0, node="a", chosen=None, commits=0))
    _, recorded, _ = decide(state, 9.0)
    assert [(e.outcome, e.exit_status) for e in recorded] == [("failed", 1)]
    assert "does not begin again" in recorded[0].detail
    assert "the newest, of step 10, was /c/step_10" in recorded[0].detail


def test_an_orphaned_node_is_stopped_before_anything_else_happens():
    state = fold(*until_training(), ev.AgentLost(t=7.0, node="a"))
    state, recorded, orders = decide(state)
    assert [type(e) for e in recorded] == [ev.FailureDetected]
    assert orders == []  # nobody there to tell
    state = run.apply(state, connected(running=None, pid=2))
    _, recorded, orders = decide(state)
    assert (recorded, orders) == ([], [Stop(node="a", attempt=1, grace=False)])


def test_an_adopted_agent_goes_on():
    state = fold(*until_training(), ev.DaemonStarted(t=7.0, policy=POLICY.to_dict()), connected(running=1))
    assert decide(state)[1:] == ([], [])
    assert state.status is Status.TRAINING


def test_training_that_ended_without_a_daemon_has_finished():
    state = fold(*until_training(), ev.DaemonStarted(t=7.0, policy=POLICY.to_dict()), connected(running=None))
    assert decide(state)[1:] == ([], []), "its agent has not told yet how it ended"
    state = run.apply(state, ev.WorkersFinished(t=8.0, attempt=1, node="a", step=50, closed=True))
    state = run.apply(state, ev.AttemptEnded(t=8.0, attempt=1, node="a", step=50))
    assert [(e.outcome, e.exit_status) for e in decide(state)[1]] == [("finished", 0)]


def test_an_agent_that_died_before_it_told_what_it_launched_is_not_trusted_to_have_launched_nothing():
    state = fold(*until_training()[:5], ev.DaemonStarted(t=3.0, policy=POLICY.to_dict()), connected(pid=2))
    _, recorded, orders = decide(state)
    assert [type(e) for e in recorded] == [ev.FailureDetected]
    assert orders == [Stop(node="a", attempt=1, grace=False)]


@pytest.mark.parametrize(("asked", "status"), [("stop", 75), ("stop_now", 130)])
def test_a_stop_ends_with_the_status_that_was_asked_for(asked, status):
    state = fold(*until_training(), ev.Requested(t=7.0, request=asked, exit_status=status))
    _, _, orders = decide(state, 8.0)
    if asked == "stop":
        assert orders == [Steer(attempt=1, save_request=1, stop_after_save=True, reason="")]
    else:
        assert orders == [Stop(node="a", attempt=1, grace=True)]
    state = run.apply(state, ev.AttemptEnded(t=9.0, attempt=1, node="a"))
    _, recorded, _ = decide(state, 9.0)
    assert [(e.outcome, e.exit_status) for e in recorded] == [("stopped", status)]


def test_a_save_that_does_not_come_is_not_waited_for_for_ever():
    state = fold(*until_training(), ev.Requested(t=7.0, request="stop", exit_status=75, timeout_s=60.0))
    assert decisions.next_deadline(state) == 67.0
    _, recorded, orders = decide(state, 67.0)
    assert [e.request for e in recorded] == ["stop_now"]
    assert orders == [Stop(node="a", attempt=1, grace=True)]


def test_a_commit_that_only_the_disk_tells_of_is_progress():
    """Rank 0 died between its marker and the word of it. The budget is judged by what is there."""
    policy = dataclasses.replace(POLICY, max_without_progress=1)
    crashed = [
        *until_training(policy),
        ev.FailureDetected(t=8.0, detected_t=8.0, attempt=1, node="a", rank=0, exitcode=-9, step=14),
        ev.AttemptEnded(t=9.0, attempt=1, node="a", exits=[{"rank": 0, "exitcode": -9, "step": 14}]),
    ]
    state, _, orders = decide(fold(*crashed), 9.0)
    assert {o.what for o in orders} == {"health", "inventory"}
    state = run.apply(state, ev.HealthReported(t=9.0, node="a"))
    told = run.apply(state, ev.InventoryReported(t=9.0, node="a", chosen=chosen(10, 1), commits=1))
    state, recorded, _ = decide(told, 9.0)
    assert [e.resume["step"] for e in recorded] == [10]
    assert state.committed.step == 10
    state, _, _ = decide(fold(*crashed), 9.0)
    _, recorded, _ = decide(run.apply(state, ev.InventoryReported(t=9.0, node="a")), 9.0)
    assert [(e.outcome, e.exit_status) for e in recorded] == [("failed", 1)]


def test_steps_lost_are_counted_from_where_the_attempt_resumed():
    history = [
        *until_training(resume=chosen(20, 2)), ev.Progress(t=7.0, attempt=1, node="a", step=25),
        ev.FailureDetected(t=8.0, detected_t=8.0, attempt=1, node="a", rank=0, exitcode=-9, step=25),
        ev.AttemptEnded(t=9.0, attempt=1, node="a", exits=[{"rank": 0, "exitcode": -9, "step": 25}]),
    ]  # fmt: skip
    state = fold(*history)
    # The newest commit, of an attempt before, was damaged: the attempt did not resume from it.
    state = dataclasses.replace(state, committed=ev.SaveCommitted(t=1.0, attempt=0, step=30, sequence=3))
    _, recorded, _ = decide(state, 9.0)
    assert recorded[0].lost_steps == 5


def test_what_an_old_attempt_says_changes_nothing():
    state = fold(*until_training())
    for late in (
        ev.SaveCommitted(t=7.0, attempt=0, step=99, sequence=9),
        ev.FailureDetected(t=7.0, attempt=0, node="a", rank=0, exitcode=1),
        ev.AttemptEnded(t=7.0, attempt=0, node="a"),
    ):
        assert run.apply(state, late) == dataclasses.replace(state, t=7.0)


def test_a_daemon_that_could_find_no_agent_leaves_orphans_that_the_next_one_ends_first():
    gave_up = [
        *until_training(), ev.AgentLost(t=7.0, node="a"),
        ev.FailureDetected(t=7.0, detected_t=7.0, attempt=1, node="a", detail="the agent died"),
        ev.RunEnded(t=8.0, outcome="unavailable", exit_status=69), ev.DaemonStarted(t=8.0, policy=POLICY.to_dict()),
        connected(), ev.HealthReported(t=9.0, node="a"), ev.InventoryReported(t=9.0, node="a"),
    ]  # fmt: skip
    state, recorded, orders = decide(fold(*gave_up), 9.0)
    assert (recorded, orders) == ([], [Stop(node="a", attempt=1, grace=False)])
    state = run.apply(state, ev.AttemptEnded(t=9.0, attempt=1, node="a"))
    state, recorded, orders = decide(state, 9.0)
    assert [type(e) for e in recorded] == [ev.Interrupted]
    assert {o.what for o in orders} == {"health", "inventory"}


# --- several nodes ----------------------------------------------------------------------------------------------------

FLEET = dataclasses.replace(POLICY, nodes=("b", "a"), orphan_timeout_s=600.0)


def on_two_nodes(policy=FLEET):
    """The history of a run that trains on two nodes."""
    history = [ev.DaemonStarted(t=0.0, policy=policy.to_dict())]
    for node in ("a", "b"):
        history += [connected(node, address=f"10.0.0.{node}"), ev.HealthReported(t=1.0, node=node)]
    history += [
        ev.InventoryReported(t=1.0, node="b"),
        ev.AttemptLaunched(t=2.0, attempt=1, world_size=4, placement={"b": [0, 1], "a": [0, 1]}),
        ev.StoreOpened(t=2.5, attempt=1, node="b", host="10.0.0.b", port=99),
        ev.WorkersStarted(t=3.0, attempt=1, node="b"),
        ev.WorkersStarted(t=3.0, attempt=1, node="a"),
        ev.WorkersInitialised(t=4.0, attempt=1, node="b"),
        ev.StateRestored(t=5.0, attempt=1, node="b"),
        ev.FirstStep(t=6.0, attempt=1, node="b", step=1),
    ]
    return history


def test_a_launch_waits_for_all_nodes_of_which_nothing_is_known_but_not_for_lost_ones_nor_for_ever():
    alone = [
        ev.DaemonStarted(t=0.0, policy=FLEET.to_dict()), connected("a"), ev.HealthReported(t=1.0, node="a"),
        ev.InventoryReported(t=1.0, node="a"),
    ]  # fmt: skip
    assert decide(fold(*alone), 2.0)[1:] == ([], [])
    for state, t in (
        (fold(*alone, ev.NodeLost(t=2.0, node="b", why="no route")), 2.0),
        (fold(*alone), decisions.NODE_PATIENCE_S + 1.0),
    ):
        assert [e.placement for e in decide(state, t)[1]] == [{"a": [0, 1]}]


def test_the_first_node_opens_the_store_before_anybody_launches_and_it_alone_says_what_to_resume():
    history = on_two_nodes()
    assert Ask(node="b", what="inventory") in decisions.decide(fold(*history[:5]), 1.0)
    assert not any(isinstance(c, Ask) and c.node == "a" for c in decisions.decide(fold(*history[:5]), 1.0))
    _, (launched,), orders = decide(fold(*history[:6]), 2.0)
    assert list(launched.placement) == ["b", "a"], "ranks follow the order of the hosts"
    assert orders == [OpenStore(node="b", attempt=1)]
    assert decide(fold(*history[:8]))[2] == [Launch(node="b", attempt=1), Launch(node="a", attempt=1)]
    assert fold(*history[:9]).status is Status.LAUNCHING
    assert fold(*history[:10]).status is Status.INITIALISING


def test_a_lost_node_ends_the_attempt_everywhere_and_is_not_waited_for():
    state = fold(*on_two_nodes(), ev.NodeLost(t=50.0, node="a", why="no word", silent_s=30.0))
    state, (failure,), orders = decide(state, 50.0)
    assert (failure.t, failure.detected_t, failure.lost, failure.node) == (20.0, 50.0, "node", "a")
    assert orders == [Stop(node="b", attempt=1, grace=False)]
    state = run.apply(state, ev.AttemptEnded(t=51.0, attempt=1, node="b"))
    state, (interrupted,), _ = decide(state, 51.0)
    assert (interrupted.cause, interrupted.severity, interrupted.node) == ("node_lost", "node", "a")
    state = run.apply(state, ev.HealthReported(t=51.0, node="b"))
    state = run.apply(state, ev.InventoryReported(t=51.0, node="b"))
    state, (launched,), orders = decide(state, 51.0)
    assert launched.placement == {"b": [0, 1]}
    assert orders == [Launch(node="b", attempt=2)], "alone it needs no store to be opened first"

    # It comes back with what it carried: that ends before anything else, and until then it counts for nothing.
    state = run.apply(state, dataclasses.replace(connected("a"), t=60.0, running=1))
    assert state.placeable() == ["b"]
    assert Stop(node="a", attempt=1, grace=False) in decide(state, 60.0)[2]
    state = run.apply(state, ev.AttemptEnded(t=61.0, attempt=1, node="a"))
    assert state.placeable() == ["b", "a"]
    assert decide(state, 61.0)[2] == [Launch(node="b", attempt=2), Ask(node="a", what="health")]
    assert state.devices_changed_t == 61.0, "only a later commit is reason to grow"


def test_nodes_that_are_all_out_of_reach_may_train_on_until_they_are_known_to_have_ended():
    state = fold(*on_two_nodes(), *(ev.NodeLost(t=50.0, node=n, why="no word", silent_s=30.0) for n in ("a", "b")))
    state, _, orders = decide(state, 50.0)
    assert (state.status, orders) == (Status.STOPPING, [])
    until = 50.0 + FLEET.orphan_timeout_s + decisions.LONGEST_FAREWELL_S
    assert decisions.next_deadline(state) == until
    assert decide(state, until - 1.0)[1] == []
    assert [e.kind for e in decide(state, until)[1]] == ["interrupted"]
    # One of them back, and without it the others cannot train.
    state = run.apply(state, dataclasses.replace(connected("a"), t=60.0, running=1))
    assert decide(state, 60.0)[2] == [Stop(node="a", attempt=1, grace=False)]
    state = run.apply(state, ev.AttemptEnded(t=61.0, attempt=1, node="a"))
    assert [e.kind for e in decide(state, 61.0)[1]] == ["interrupted"]


def test_a_lone_attempt_on_a_lost_node_has_been_ended_by_its_agent():
    history = [ev.DaemonStarted(t=0.0, policy=FLEET.to_dict()), *until_training(FLEET, "a")[1:]]
    state = fold(*history, ev.NodeLost(t=50.0, node="a", why="no word", silent_s=30.0))
    assert [e.kind for e in decide(state, 50.0)[1]] == ["failure_detected", "interrupted"]


def test_errors_of_connections_are_put_down_to_the_node_that_was_lost():
    gone = {"rank": 0, "node": "b", "exitcode": 1, "order": 0, "t": 40.0, "step": 9, "error": {
        "type": "RuntimeError", "mro": ["RuntimeError"], "message": "Connection closed by peer [10.0.0.7]:1234"}}  # fmt: skip
    state = fold(
        *on_two_nodes(),
        ev.FailureDetected(t=40.0, detected_t=40.0, attempt=1, node="b", rank=0, exitcode=1),
        ev.AttemptEnded(t=41.0, attempt=1, node="b", exits=[gone]),
    )
    assert decide(state, 41.0)[1] == [], "the fate of the other node is not known yet"
    state = run.apply(state, ev.NodeLost(t=70.0, node="a", why="no word", silent_s=30.0))
    (interrupted,) = decide(state, 70.0)[1]
    assert (interrupted.cause, interrupted.node, interrupted.t) == ("node_lost", "a", 40.0)


def test_of_two_deaths_the_earlier_one_is_the_cause_whatever_was_heard_first():
    def died(node, rank, t):
        return ev.FailureDetected(t=t, detected_t=45.0, attempt=1, node=node, rank=rank, exitcode=-9)

    state = fold(*on_two_nodes(), died("b", 0, 44.0), died("a", 2, 43.5))
    assert (state.failure.rank, state.failure.t) == (2, 43.5)
    state = fold(*on_two_nodes(), died("a", 2, 43.5), died("b", 0, 44.0))
    assert (state.failure.rank, state.failure.t) == (2, 43.5)


# --- any history ------------------------------------------------------------------------------------------------------

_nodes = st.sampled_from(["a", "b"])
_t = st.floats(0, 1000)
_attempt = st.integers(0, 3)
_chosen = st.none() | st.builds(chosen, st.integers(0, 30), st.integers(0, 5))


def _of(kind, **fields):
    return st.builds(kind, t=_t, **fields)


_in_attempt = {"attempt": _attempt, "node": _nodes}
_any_event = st.one_of(
    _of(ev.DaemonStarted, policy=st.just(POLICY.to_dict())),
    _of(ev.Requested, request=st.sampled_from(["save", "stop", "stop_now", "relaunch"]),
        exit_status=st.sampled_from([None, 75, 130]), timeout_s=st.floats(0, 100)),
    _of(ev.RunEnded, outcome=st.sampled_from(["finished", "failed", "stopped", "unavailable"])),
    _of(ev.AgentConnected, node=_nodes, devices=st.just([{"index": 0}, {"index": 1}]), running=st.none() | _attempt),
    _of(ev.AgentLost, node=_nodes),
    _of(ev.NodeLost, node=_nodes, silent_s=st.floats(0, 100)),
    _of(ev.StoreOpened, port=st.integers(1, 9), **_in_attempt),
    _of(ev.HealthReported, node=_nodes, unhealthy=st.lists(st.integers(0, 2), max_size=2)),
    _of(ev.InventoryReported, node=_nodes, chosen=_chosen, commits=st.integers(0, 2), problem=st.sampled_from(["", "x"]),
        newest_sequence=st.integers(0, 9)),
    _of(ev.AttemptLaunched, attempt=_attempt, world_size=st.integers(1, 4),
        placement=st.dictionaries(_nodes, st.lists(st.integers(0, 1), max_size=2), max_size=2), resume=_chosen),
    _of(ev.WorkersStarted, **_in_attempt),
    _of(ev.WorkersInitialised, **_in_attempt),
    _of(ev.StateRestored, step=st.integers(0, 30), **_in_attempt),
    _of(ev.FirstStep, step=st.integers(0, 30), **_in_attempt),
    _of(ev.Progress, step=st.integers(0, 30), step_s=st.none() | st.floats(0, 10), **_in_attempt),
    _of(ev.SaveStaged, step=st.integers(0, 30), stall_s=st.floats(0, 5), **_in_attempt),
    _of(ev.SaveCommitted, step=st.integers(0, 30), sequence=st.integers(0, 9), stall_s=st.floats(0, 5),
        upload_s=st.floats(0, 5), **_in_attempt),
    _of(ev.SaveFailed, step=st.integers(0, 30), **_in_attempt),
    _of(ev.SaveRejected, step=st.integers(0, 30), **_in_attempt),
    _of(ev.FailureDetected, detected_t=_t, exitcode=st.none() | st.integers(-9, 3), launch=st.booleans(), **_in_attempt),
    _of(ev.WorkersFinished, step=st.integers(0, 30), stopping=st.booleans(), closed=st.booleans(), **_in_attempt),
    _of(ev.AttemptEnded, exits=st.just([]) | st.just([{"rank": 0, "exitcode": -9}]), **_in_attempt),
    _of(ev.Interrupted, detected_t=_t, planned=st.booleans(), severity=st.sampled_from(["process", "launch"]), **_in_attempt),
    _of(ev.Restarted, attempt=_attempt, total_s=st.floats(0, 100)),
    _of(ev.IntervalDecided, interval_s=st.none() | st.floats(1, 100)),
    _of(ev.Noted),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_any_event, max_size=30))
def test_no_history_makes_the_core_raise_or_record_for_ever(history):
    now = picture.Picture()
    t = 0.0
    for event in history:
        now = picture.apply(now, event)
        t = max(t, event.t)
        for _ in range(11):
            commands = picture.decide(now, t)
            if not any(isinstance(c, Record) for c in commands):
                break
            assert len(commands) == 1
            now = picture.apply(now, commands[0].event)
        else:
            raise AssertionError(f"recorded for ever: {commands[0]}")
        decisions.next_deadline(now.run)


# --- a whole world ----------------------------------------------------------------------------------------------------


def play(world, rng, moves):
    for _ in range(moves):
        if world.ended:
            break
        possible = world.moves(faults=rng.randrange(8) == 0) or world.moves(faults=False)
        rng.choice(possible)()


def settle(world):
    """No more faults: what is open must come to an end, if need be because time runs out."""
    for turn in range(150):
        if not world.daemon and not world.ended:
            world.start_daemon()
        for machine in world.machines.values():
            possible = [] if world.ended else world.moves_of(machine)
            if possible:
                world._do(machine, possible[turn % len(possible)])
        if world.ended:
            return
        world.pass_time()
    raise AssertionError(f"no end in sight: {world.state.status}, {world.log[-8:]}")


_worlds = st.builds(
    World,
    st.builds(
        Policy,
        run_id=st.just("r"),
        interval_steps=st.just(10),
        min_devices=st.integers(1, 2),
        max_without_progress=st.integers(1, 4),
        max_restarts=st.none() | st.integers(0, 3),
        on_reject=st.sampled_from(["skip", "rollback", "stop"]),
        rollback_after=st.integers(1, 3),
        wait_for_devices_s=st.just(600.0),
        orphan_timeout_s=st.just(300.0),
    ),
    st.sampled_from([{"a": 2}, {"a": 1, "b": 1}, {"b": 2, "a": 1, "c": 2}]),
    remote=st.booleans(),
)


@settings(max_examples=800, deadline=None)
@given(world=_worlds, seed=st.integers(0, 2**32))
def test_whatever_goes_wrong_a_run_ends_rightly(world, seed):
    # Hypothesis picks the world, a seeded generator the course of events: lists of choices shrink for minutes.
    rng = random.Random(seed)
    play(world, rng, rng.randrange(150))
    settle(world)
    assert picture.replay(world.log) == world.picture


@settings(max_examples=300, deadline=None)
@given(world=_worlds, seed=st.integers(0, 2**32))
def test_a_run_that_ended_can_be_run_again(world, seed):
    rng = random.Random(seed)
    play(world, rng, 80)
    settle(world)
    before = world.state.outcome.outcome
    world.run_again()
    if before == "finished":
        assert world.ended
        return
    play(world, rng, 80)
    settle(world)


def test_a_node_that_is_cut_off_ends_what_an_agent_before_its_own_had_launched():
    """Found by chance: nobody had the workers end, and the run was called over beside them."""
    policy = dataclasses.replace(POLICY, max_without_progress=1, wait_for_devices_s=600.0, orphan_timeout_s=300.0)
    world, rng = World(policy, {"a": 2}, remote=True), random.Random(881170)
    play(world, rng, 80)
    settle(world)
    assert world.ended


def test_without_faults_the_first_attempt_finishes():
    world = World(POLICY, {"a": 2, "b": 2})
    settle(world)
    assert (world.state.outcome.outcome, world.state.outcome.exit_status, world.state.attempt) == ("finished", 0, 1)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_crash_loop_stops_after_max_without_progress(budget):
    world = World(dataclasses.replace(POLICY, max_without_progress=budget), {"a": 1})
    for _ in range(200):
        if world.ended:
            break
        machine = world.machines["a"]
        if world.daemon and machine.carried:
            world._do(machine, "crash")
        else:
            world.moves(faults=False)[0]()
    outcome = world.state.outcome
    assert (outcome.outcome, outcome.exit_status, world.state.attempt) == ("failed", 1, budget)
    assert f"{budget} attempts without a new committed checkpoint" in outcome.detail


def test_workers_that_start_and_never_meet_are_not_tried_for_ever():
    # A port that the script itself wants and somebody holds: no crash of the job, and no reason to go on for days.
    taken = {"rank": 0, "node": "a", "exitcode": 1, "order": 0, "step": 0,
             "error": {"type": "OSError", "mro": ["OSError"], "message": "[Errno 98] Address already in use"}}  # fmt: skip
    state = fold(*until_training()[:4])
    t = 100.0
    for _ in range(decisions.MAX_LAUNCH_FAILURES + 1):
        t += 100.0
        state, recorded, _ = decide(state, t)
        number = state.attempt
        assert [e.kind for e in recorded] == ["attempt_launched"]
        for event in (
            ev.WorkersStarted(t=t, attempt=number, node="a"),
            ev.FailureDetected(t=t, detected_t=t, attempt=number, node="a", rank=0, exitcode=1),
            ev.AttemptEnded(t=t, attempt=number, node="a", exits=[taken]),
        ):
            state = run.apply(state, event)
        state, recorded, _ = decide(state, t)
        assert recorded[0].severity == "launch"
        if state.status is Status.ENDED:
            break
        for event in (ev.HealthReported(t=t, node="a"), ev.InventoryReported(t=t, node="a")):
            state = run.apply(state, event)
    assert state.status is Status.ENDED
    assert "could not be launched" in state.outcome.detail


def test_a_device_that_is_reported_unhealthy_in_use_again_and_again_rests():
    state = fold(*until_training())
    for t in (10.0, 20.0, 30.0):
        assert state.usable("a", t) == (0, 1)
        state = run.apply(state, ev.HealthReported(t=t, node="a", unhealthy=[1]))
        state = run.apply(state, ev.HealthReported(t=t + 1, node="a", unhealthy=[]))
    assert state.usable("a", 40.0) == (0,)


def test_an_error_of_a_gpu_is_put_down_to_the_rank_that_has_it():
    history = [
        *until_training(),
        ev.FailureDetected(t=9.0, detected_t=9.0, attempt=1, node="a", rank=0, exitcode=-9),
        ev.AttemptEnded(t=9.5, attempt=1, node="a", exits=[
            {"rank": 0, "node": "a", "exitcode": -9, "order": 0},
            {"rank": 1, "node": "a", "exitcode": -9, "order": 1, "killed_by_us": True, "xids": ["Xid 48 on 9b:00: DBE"]},
        ]),
    ]  # fmt: skip
    _, (interrupted,), _ = decide(fold(*history))
    assert (interrupted.rank, interrupted.cause, interrupted.severity) == (1, "device_error", "device")


@pytest.mark.parametrize("back", [False, True])
def test_a_node_that_fenced_itself_is_not_to_blame_for_another_one_that_is_gone(back):
    """The daemon was dead when the power of b failed: a, which could do nothing alone, ended its worker, and tells so."""
    policy = dataclasses.replace(POLICY, nodes=("a", "b"))
    fenced = "node a could not reach the daemon for 4 s and ended its workers"
    history = [
        ev.DaemonStarted(t=0.0, policy=policy.to_dict()),
        connected("a", 1), connected("b", 1),
        ev.AttemptLaunched(t=2.0, attempt=1, world_size=2, placement={"a": [0], "b": [0]}),
        *(ev.WorkersStarted(t=3.0, attempt=1, node=node) for node in "ab"),
        ev.DaemonStarted(t=20.0, policy=policy.to_dict()),
        connected("a", 1),
        ev.FailureDetected(t=19.0, detected_t=19.0, attempt=1, node="a", lost="node", detail=fenced),
        ev.AttemptEnded(t=19.5, attempt=1, node="a"),
        connected("b", 1) if back else ev.NodeLost(t=28.0, node="b", why="no word", silent_s=8.0),
        *([ev.AttemptEnded(t=28.0, attempt=1, node="b")] if back else []),
    ]  # fmt: skip
    _, recorded, _ = decide(fold(*history))
    (told,) = [e for e in recorded if isinstance(e, ev.Interrupted)]
    assert (told.cause, told.node) == ("node_lost", "a" if back else "b")
    assert told.detail == (fenced if back else "node b is lost: no word")


def test_a_node_of_an_earlier_run_that_cannot_be_reached_when_it_is_started_again():
    """It ended with the run, and was forgotten: that it is away now says nothing of the attempt that it carried then."""
    policy = dataclasses.replace(POLICY, nodes=("a", "b"))
    state = fold(
        ev.DaemonStarted(t=0.0, policy=policy.to_dict()),
        connected("a", 1), connected("b", 1),
        ev.AttemptLaunched(t=2.0, attempt=1, world_size=2, placement={"a": [0], "b": [0]}),
        *(ev.WorkersStarted(t=3.0, attempt=1, node=node) for node in "ab"),
        *(ev.AttemptEnded(t=9.0, attempt=1, node=node) for node in "ab"),
        ev.RunEnded(t=9.0, outcome="stopped", exit_status=75),
        ev.DaemonStarted(t=20.0, policy=policy.to_dict()),
        ev.NodeLost(t=22.0, node="b", why="no route", silent_s=2.0),
        ev.RunEnded(t=23.0, outcome="unavailable", exit_status=69),
        ev.DaemonStarted(t=30.0, policy=policy.to_dict()),
        connected("b", 1),
    )  # fmt: skip
    assert state.placeable() == ["b"], "nothing of it is left there to be ended"
    assert not state.losses
