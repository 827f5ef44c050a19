"""When a node on another machine is lost, and when somebody reaches for it: by its silence, never by its connection."""

from __future__ import annotations

import asyncio

import pytest
from daemons import RemoteBystander, hello

from ckptd import fleet as fleet_module
from ckptd.core.state import Node, RunState, Status
from ckptd.fleet import Fleet
from ckptd.launchers.base import Arrival

HEARTBEAT_S = 30.0


class Wire:
    """The daemon's end of a connection, which keeps what was sent."""

    def __init__(self):
        self.sent, self.aborted = [], False

    def send(self, message):
        self.sent.append(message)

    def abort(self):
        self.aborted = True

    async def flush(self):
        pass

    async def close(self):
        self.aborted = True


class Office:
    """A fleet of two nodes, and a clock that is set by hand."""

    def __init__(self, monkeypatch, *, adopting=False):
        self.now = 1000.0
        monkeypatch.setattr(fleet_module.time, "monotonic", lambda: self.now)
        self.launcher = RemoteBystander("n1", "n2")
        self.happened = []
        self.fleet = Fleet(
            launcher=self.launcher, run_id="0123456789ab", happened=self.happened.append, now=lambda: self.now,
            heartbeat_s=HEARTBEAT_S, adopting=adopting,
        )  # fmt: skip
        self.nodes = {}
        self.placement = {}

    def dial(self, node, **changes):
        wire = Wire()
        self.nodes[node] = Node(connected=True, agent=7)
        return asyncio.run(self.fleet.admit(wire, hello(node=node, **changes)))

    def turn(self, seconds=1.0, status=Status.TRAINING):
        """Time passes, a second at a turn, as in the daemon."""
        while seconds > 0:
            self.now += min(1.0, seconds)
            seconds -= 1.0
            self.fleet.mind(RunState(status=status, nodes=self.nodes, placement=self.placement))

    def kinds(self):
        return [(e.kind, e.node) for e in self.happened]


@pytest.fixture
def office(monkeypatch):
    return Office(monkeypatch)


def test_all_nodes_are_reached_for_at_once_and_those_of_a_run_under_way_only_if_they_do_not_dial(monkeypatch):
    fresh = Office(monkeypatch)
    fresh.turn()
    assert fresh.launcher.started == [("n1", False), ("n2", False)]
    adopting = Office(monkeypatch, adopting=True)
    adopting.turn(3)
    assert adopting.launcher.started == []
    adopting.dial("n1")
    adopting.turn(5)
    assert adopting.launcher.started == [("n2", False)]


def test_silence_for_the_heartbeat_timeout_is_a_loss_and_one_word_in_time_is_none(office):
    first, second = office.dial("n1"), office.dial("n2")
    for _ in range(3):
        office.turn(HEARTBEAT_S - 2)
        assert office.happened == []
        first.silent_s = second.silent_s = 0.0  # a word
    office.turn(HEARTBEAT_S - 1)
    first.silent_s = 0.0
    office.turn(3)
    assert office.kinds() == [("node_lost", "n2")]
    assert office.happened[0].silent_s >= HEARTBEAT_S
    assert second.channel.aborted, "what it says now is too late"
    assert not first.channel.aborted
    office.turn(HEARTBEAT_S / 2)
    assert office.kinds() == [("node_lost", "n2")], "it is lost once"


def test_a_node_is_silent_since_its_last_word_and_not_since_the_look_before_it(office):
    session = office.dial("n1")
    office.dial("n2").spoke_at += 1e6  # it speaks all the time
    office.turn()
    session.silent_s, session.spoke_at = 0.0, office.now + 0.9
    office.turn(HEARTBEAT_S)
    assert office.happened == [], "a part of the first second came before its word"
    office.turn()
    assert office.kinds() == [("node_lost", "n1")]
    assert office.happened[0].silent_s == pytest.approx(HEARTBEAT_S + 0.1)


def test_a_connection_that_breaks_and_comes_back_is_nothing(office):
    session = office.dial("n1")
    office.dial("n2")
    office.turn(5)
    office.fleet.left(session)
    office.turn(1)
    assert office.launcher.started == [], "it is about to dial"
    office.turn(2)
    assert office.launcher.started == [("n1", False)], "whether its agent lives is looked for"
    office.dial("n1")
    office.turn(HEARTBEAT_S - 10)
    assert office.happened == []


def test_silence_is_counted_over_connections_only_from_the_last_word(office):
    office.dial("n2")
    session = office.dial("n1")
    office.turn(HEARTBEAT_S - 5)
    office.fleet.left(session)
    office.turn(10)
    assert ("node_lost", "n1") in office.kinds()


def test_a_daemon_that_stood_still_itself_has_lost_nobody(office):
    office.dial("n1")
    office.dial("n2")
    office.turn(1)
    office.now += 3600.0
    office.turn(1)
    assert office.happened == []


def test_one_that_lives_and_does_not_dial_when_told_to_is_replaced_once_its_node_is_lost(office):
    office.dial("n2")
    office.dial("n1")
    office.turn(HEARTBEAT_S + 1)
    assert sorted(office.launcher.started) == [("n1", False), ("n2", False)], "they may have been out of reach"
    office.launcher.arrivals["n1"] = Arrival(ok=True, before="alive")
    office.launcher.arrivals["n2"] = Arrival(ok=False, why="host n2 cannot be reached: no route")
    office.turn(fleet_module.DIAL_PATIENCE_S - 1)
    assert ("n1", True) not in office.launcher.started
    office.turn(3)
    assert ("n1", True) in office.launcher.started, "not a minute later, though it was reached for before"
    office.turn(100)
    assert ("n2", True) not in office.launcher.started


def test_one_that_was_out_of_reach_dials_again_and_is_left_alone(office):
    office.dial("n2")
    office.dial("n1")
    office.turn(HEARTBEAT_S + 1)
    office.launcher.arrivals["n1"] = Arrival(ok=True, before="alive")
    office.turn(5)
    session = office.dial("n1")
    for _ in range(4):
        session.silent_s = 0.0
        office.turn(HEARTBEAT_S - 5)
    assert ("n1", True) not in office.launcher.started


def test_an_agent_that_is_found_dead_is_told_and_nothing_else_is(office):
    session = office.dial("n1")
    office.dial("n2")
    office.fleet.left(session)
    for before, told in (("alive", []), ("none", []), ("dead", [("agent_lost", "n1")])):
        office.launcher.arrivals["n1"] = Arrival(ok=True, before=before)
        office.turn()
        assert office.kinds() == told, before


def test_one_that_dialled_in_before_that_was_known_speaks_for_itself(office):
    office.dial("n1")
    office.dial("n2")
    office.launcher.arrivals["n1"] = Arrival(ok=True, before="dead")
    office.turn()
    assert office.happened == []


def test_a_node_that_cannot_be_reached_at_the_start_is_not_waited_for(office, caplog):
    office.dial("n2")
    for _ in range(3):
        office.launcher.arrivals["n1"] = Arrival(ok=False, why="host n1 cannot be reached: no route")
        office.turn()
    assert office.kinds() == [("node_lost", "n1")]
    assert office.happened[0].why == "host n1 cannot be reached: no route"
    assert sum("no route" in record.message for record in caplog.records) == 1


def test_one_that_carries_something_is_lost_by_its_silence_alone(monkeypatch):
    office = Office(monkeypatch, adopting=True)
    office.nodes["n1"] = Node(agent=7, started=True)
    office.placement = {"n1": (0,)}
    office.launcher.arrivals["n1"] = Arrival(ok=False, why="host n1 cannot be reached: no route")
    office.turn(2)
    assert office.happened == []


def test_a_run_that_no_agent_can_be_started_for_ends_and_says_why(office):
    for turn in range(fleet_module.MAX_VAIN_STARTS):
        assert not any(e.kind == "run_ended" for e in office.happened), turn
        for node in ("n1", "n2"):
            office.launcher.arrivals[node] = Arrival(ok=False, why=f"host {node} has no ckptd")
        office.turn()
    ended = office.happened[-1]
    assert (ended.kind, ended.exit_status) == ("run_ended", 69)
    assert "host n1 has no ckptd; host n2 has no ckptd" in ended.detail


def test_a_daemon_whose_run_was_taken_over_ends_and_tells_nobody_to_leave(office):
    session = office.dial("n1")
    office.launcher.arrivals["n2"] = Arrival(ok=False, why="host n2: the run was taken over", superseded=True)
    office.turn()
    assert (office.happened[-1].kind, office.happened[-1].exit_status) == ("run_ended", 64)
    asyncio.run(office.fleet.dismiss())
    assert session.channel.sent == []
    assert office.launcher.ended == []


def test_one_that_speaks_and_does_not_end_an_attempt_is_replaced(office):
    sessions = [office.dial("n1"), office.dial("n2")]
    office.placement = {"n1": (0,), "n2": (0,)}
    office.nodes["n1"] = Node(connected=True, agent=7, ended=True)
    for _ in range(int(office.fleet.stop_patience_s) + 2):
        for session in sessions:
            session.silent_s = 0.0
        office.turn(status=Status.STOPPING)
    assert office.launcher.started == [("n2", True)]
