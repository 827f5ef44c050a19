"""A device that strikes rests; the rest of them go on."""

from __future__ import annotations

import dataclasses

import pytest

from ckptd.core import devices, events
from ckptd.core.devices import PROBATION_S, QUARANTINE_S, STRIKES, WINDOW_S, DeviceBook

PLACEMENT = {"a": (0, 1, 2, 3), "b": (0, 2)}


def book(*names):
    found = [{"index": i, "id": name, "name": "gpu"} for i, name in enumerate(names or ("u0", "u1", "u2", "u3"))]
    return devices.connected(DeviceBook(), events.AgentConnected(t=0.0, node="a", devices=found))


def failure(t, rank=2, cause="signal", severity="process", planned=False):
    return events.Interrupted(
        t=t, detected_t=t, rank=rank, cause=cause, severity=severity, planned=planned, detail="it died"
    )


def struck(state, times, **what):
    for t in times:
        state = devices.struck(state, failure(t, **what), PLACEMENT)
    return state


def test_ranks_are_dealt_node_by_node():
    assert [devices.device_of_rank(PLACEMENT, rank) for rank in range(7)] == [
        ("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 2), None,
    ]  # fmt: skip


def test_after_enough_strikes_a_device_is_left_out_for_a_while():
    state = struck(book(), range(STRIKES - 1))
    assert state.usable("a", range(4), 10.0) == (0, 1, 2, 3)
    state = struck(state, [10.0])
    assert state.usable("a", range(4), 10.0) == (0, 1, 3)
    assert "it died" in (state.why_not("a", 2, 10.0) or "")
    assert state.next_release(10.0) == pytest.approx(10.0 + QUARANTINE_S)
    assert state.usable("a", range(4), 11.0 + QUARANTINE_S) == (0, 1, 2, 3)


def test_a_device_on_probation_is_out_at_the_first_strike_and_for_longer():
    state = struck(book(), [0.0, 1.0, 2.0])
    back = 3.0 + QUARANTINE_S
    state = struck(state, [back])
    assert state.usable("a", range(4), back + QUARANTINE_S + 1) == (0, 1, 3)
    assert state.usable("a", range(4), back + 2 * QUARANTINE_S + 1) == (0, 1, 2, 3)


def test_strikes_grow_old():
    state = struck(book(), [0.0, 1.0, WINDOW_S + 2.0, WINDOW_S + 3.0])
    assert state.usable("a", range(4), WINDOW_S + 4.0) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "what",
    [
        {"cause": "exception", "severity": "code"},
        {"planned": True},
        {"rank": None},
        {"cause": "resume_error"},
        {"rank": 99},
    ],
)
def test_what_is_no_fault_of_the_device(what):
    state = struck(book(), range(10), **what)
    assert state.usable("a", range(4), 10.0) == (0, 1, 2, 3)


def test_a_failure_of_severity_device_counts_whatever_its_cause():
    state = struck(book(), range(STRIKES), cause="exception", severity="device")
    assert state.usable("a", range(4), 10.0) == (0, 1, 3)


def test_a_commit_clears_doubts_but_not_certain_faults():
    doubtful = devices.proved(struck(book(), [0.0, 1.0]), PLACEMENT)
    assert struck(doubtful, [2.0]).usable("a", range(4), 3.0) == (0, 1, 2, 3)
    certain = devices.proved(struck(book(), [0.0, 1.0], severity="device"), PLACEMENT)
    assert struck(certain, [2.0]).usable("a", range(4), 3.0) == (0, 1, 3)


def test_strikes_stay_with_the_device_when_indices_shift():
    state = struck(book(), range(STRIKES))
    shifted = [{"index": i, "id": name} for i, name in enumerate(["u1", "u2", "u3"])]
    state = devices.connected(state, events.AgentConnected(t=20.0, node="a", devices=shifted))
    assert state.usable("a", range(3), 20.0) == (0, 2)


def test_a_slot_of_the_cpu_belongs_to_its_node():
    found = [{"index": 0, "id": "cpu-slot-0"}]
    state = DeviceBook()
    for node in ("a", "b"):
        state = devices.connected(state, events.AgentConnected(t=0.0, node=node, devices=found))
    state = devices.drained(state, events.DeviceDrained(t=0.0, device=state.identity("a", 0)))
    assert (state.usable("a", [0], 1.0), state.usable("b", [0], 1.0)) == ((), (0,))


def test_drain_and_undrain():
    state = devices.drained(book(), events.DeviceDrained(t=0.0, device="u1", drained=True))
    assert state.usable("a", range(4), 1e9) == (0, 2, 3)
    assert state.next_release(0.0) is None
    state = devices.drained(state, events.DeviceDrained(t=1.0, device="u1", drained=False))
    assert state.usable("a", range(4), 2.0) == (0, 1, 2, 3)


def test_undrain_forgives_strikes_too():
    state = struck(book(), range(STRIKES))
    state = devices.drained(state, events.DeviceDrained(t=20.0, device="u2", drained=False))
    assert state.usable("a", range(4), 21.0) == (0, 1, 2, 3)
    assert struck(state, [22.0]).usable("a", range(4), 23.0) == (0, 1, 2, 3)


def test_what_cannot_be_killed_takes_its_device_along():
    ended = events.AttemptEnded(t=5.0, unkillable=[{"pid": 77, "name": "python", "rank": 3}])
    state = devices.unkillable(book(), ended, PLACEMENT)
    assert state.usable("a", range(4), 1e9) == (0, 1, 2)
    assert "77" in (state.why_not("a", 3, 6.0) or "")


def test_what_cannot_be_killed_stays_out_whatever_else_is_put_down_to_its_device():
    stuck = events.AttemptEnded(t=1.0, node="a", unkillable=[{"pid": 7, "name": "python", "rank": 2}])
    state = devices.unkillable(book(), stuck, PLACEMENT)
    state = struck(state, [1.0, 2.0, 3.0], cause="hang")
    assert "cannot be killed" in (state.why_not("a", 2, 1e9) or "")


def test_probation_ends():
    state = struck(book(), [0.0, 1.0, 2.0])
    later = 3.0 + QUARANTINE_S + PROBATION_S
    state = struck(state, [later])
    assert state.usable("a", range(4), later) == (0, 1, 2, 3)
    state = struck(state, [later + 1, later + 2])
    assert state.usable("a", range(4), later + 2 + QUARANTINE_S) == (0, 1, 3), "the second time it rests for longer"


def test_a_device_whose_health_comes_and_goes_rests_too():
    state = book()
    for t in range(STRIKES):
        assert state.usable("a", range(4), t) == (0, 1, 2, 3)
        state = devices.proved(state, PLACEMENT)
        report = events.HealthReported(t=float(t), node="a", unhealthy=[2], detail="too hot")
        state = devices.failed_in_use(state, report, {2})
    assert "too hot" in (state.why_not("a", 2, 10.0) or "")


def two_nodes():
    return devices.connected(book(), events.AgentConnected(t=0.0, node="b", devices=[{"index": 0, "id": "v0"}]))


def test_a_node_is_drained_whatever_devices_it_has_and_given_back():
    state = two_nodes()
    assert state.named("b") == ["node b", "v0"]
    for identity in state.named("b"):
        state = devices.drained(state, events.DeviceDrained(t=0.0, device=identity))
    state = devices.connected(state, events.AgentConnected(t=1.0, node="b", devices=[{"index": 0, "id": "new"}]))
    assert state.why_not("b", 0, 1.0) == "drained", "another device in a node that nobody wants"
    assert state.not_drained("b", (0,)) == ()
    assert [(found["node"], found["for_s"]) for found in state.held_against(1.0)] == [("b", None)]
    assert state.usable("a", (0, 1), 1.0) == (0, 1)
    for identity in state.named("b"):
        state = devices.drained(state, events.DeviceDrained(t=2.0, device=identity, drained=False))
    assert state.usable("b", (0,), 2.0) == (0,)


def test_a_node_that_is_lost_again_and_again_rests_where_there_is_another():
    lost = [
        events.Interrupted(t=t, detected_t=t, node="b", cause="node_lost", severity="node") for t in (1.0, 2.0, 3.0)
    ]
    state, alone = two_nodes(), book()
    for event in lost:
        state = devices.struck(state, event, {"a": (0,), "b": (0,)})
        alone = devices.struck(alone, dataclasses.replace(event, node="a"), {"a": (0,)})
    assert state.usable("b", (0,), 4.0) == ()
    assert state.usable("a", (0,), 4.0) == (0,)
    assert state.usable("b", (0,), 4.0 + QUARANTINE_S) == (0,)
    assert alone.usable("a", (0,), 4.0) == (0,), "there is nothing else"


def test_a_node_with_a_remnant_that_cannot_be_killed_is_left_out_until_somebody_says_otherwise():
    ended = events.AttemptEnded(t=5.0, attempt=1, node="b", unkillable=[{"pid": 77, "name": "python", "rank": 3}])
    state = devices.haunted(two_nodes(), ended)
    assert "process 77" in (state.why_not("b", 0, 1e9) or "")
    assert state.not_drained("b", (0,)) == ()
