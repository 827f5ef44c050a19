"""What a watcher makes of heartbeats: it takes its own blindness for nobody's silence, and no silence for ever."""

from __future__ import annotations

import time

import pytest

from ckptd import watch as watch_module
from ckptd.core import events as ev
from ckptd.core.hang import Limits
from ckptd.core.state import RunState, Status
from ckptd.watch import Watch

STATE = RunState(status=Status.TRAINING, attempt=1, world_size=1, placement={"local": (0,)})
LIMITS = Limits(floor_s=5.0, startup_s=20.0, factor=2.0)


def message(mono, step, phase="step"):
    return {"mono": mono, "ranks": {"0": {"step": step, "phase": phase}}}


@pytest.fixture
def watch():
    watch = Watch(LIMITS)
    watch.saw(ev.AttemptLaunched(t=0.0, attempt=1))
    return watch


def trained(watch):
    """Ten steps, a second each, up to now by the agent's clock."""
    for step in range(10):
        watch.hear(message(1000.0 + step, step))
    return 1009.0


def test_a_daemon_that_heard_nothing_for_an_hour_blames_no_rank(watch):
    mono = trained(watch)
    watch._looked -= 3600.0
    assert watch.hang(STATE, 4000.0) is None
    # What had waited in the socket is read in one moment: first a step that it knew already.
    for seconds in range(1, 100):
        watch.hear(message(mono + seconds, 9 + seconds // 2))
        assert watch.hang(STATE, 4000.0) is None


def test_a_rank_that_stands_by_its_own_clock_is_seen(watch):
    mono = trained(watch)
    watch.hear(message(mono + 4.9, 9))
    assert watch.hang(STATE, 100.0) is None
    watch.hear(message(mono + 5.1, 9))
    found = watch.hang(STATE, 100.0)
    assert (found.rank, found.hang, found.t) == (0, True, pytest.approx(94.9))


def test_a_launch_of_which_nobody_is_ever_heard_does_not_last_for_ever(watch, monkeypatch):
    monkeypatch.setattr(watch_module, "LONGEST_TURN_S", 400.0)
    state = RunState(status=Status.LAUNCHING, attempt=1, world_size=1, placement={"local": (0,)})
    watch.hear({"mono": 1.0, "ranks": {}})
    watch._looked = time.monotonic() - 300.0
    assert watch.hang(state, 300.0) is None
    watch._looked = time.monotonic() - 30.0
    found = watch.hang(state, 330.0)
    assert found.hang
    assert found.rank is None
    assert "no worker has shown a sign of life within 320 s" in found.detail
    watch.saw(ev.AttemptLaunched(t=331.0, attempt=2))
    assert watch.hang(state, 332.0) is None
