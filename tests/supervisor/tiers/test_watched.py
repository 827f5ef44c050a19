"""Work that hangs is left behind, counted, and not multiplied."""

from __future__ import annotations

import os
import threading

import pytest

from ckptd.tiers import Abandoned, Crew, Pace, Stalled
from ckptd.tiers.watched import NICE


def test_what_work_returns_or_raises_comes_back():
    assert Crew().run("a", lambda _pace: 7, stall_s=10) == 7
    with pytest.raises(ZeroDivisionError):
        Crew().run("a", lambda _pace: 1 // 0, stall_s=10)


def test_work_that_hangs_is_left_behind_and_refused_until_it_comes_back():
    crew, gate, ended = Crew(), threading.Event(), threading.Event()

    def hang(pace):
        try:
            gate.wait(60)
            pace.beat()
        except Abandoned:
            ended.set()
            raise

    with pytest.raises(Stalled, match="nfs: no progress for"):
        crew.run("nfs", hang, stall_s=0.05)
    assert crew.stuck == ["nfs"]
    threads = threading.active_count()
    for _ in range(20):
        with pytest.raises(Stalled, match="it is waited for"):
            crew.run("nfs", hang, stall_s=0.05)
    assert threading.active_count() == threads, "threads pile up"
    assert crew.run("disk", lambda _pace: 1, stall_s=10) == 1, "another tier waits"
    gate.set()
    assert ended.wait(20), "it went on with work that nobody waits for"
    while crew.stuck:
        pass
    assert crew.run("nfs", lambda _pace: 2, stall_s=10) == 2


def test_slow_work_that_moves_is_waited_for():
    ticks = threading.Event()

    def slow(pace):
        for _ in range(8):
            ticks.wait(0.05)
            pace.beat(10)
        return pace.bytes

    assert Crew().run("slow", slow, stall_s=0.3) == 80


def test_a_stop_ends_the_waiting():
    crew, gate, stop = Crew(), threading.Event(), threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        crew.run("a", lambda _pace: gate.wait(60), stall_s=60, stop=stop)
    gate.set()


def test_work_beside_training_has_a_low_priority_of_its_own():
    def mine(_pace: Pace):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert Crew().run("a", mine, stall_s=10, nice=True) == min(19, max(before, NICE))
    assert Crew().run("a", mine, stall_s=10) == before
