"""The run's clock: it goes on where it was, stands while the run is over, and never goes back."""

from __future__ import annotations

import time

import pytest

from ckptd.clock import RunClock
from ckptd.core import events as ev


def started(t, mono, boot="this"):
    return ev.DaemonStarted(t=t, mono=mono, boot_id=boot)


def test_a_new_run_begins_at_zero():
    clock = RunClock.resume(last_t=0.0, last=None, anchor=None, boot_id="this")
    assert clock.now() == pytest.approx(0.0, abs=0.1)


def test_time_without_a_daemon_counts_exactly_within_a_boot():
    mono = time.monotonic()
    anchor = started(10.0, mono - 100.0)
    last = ev.Progress(t=50.0, at=0.0, step=1)
    clock = RunClock.resume(last_t=50.0, last=last, anchor=anchor, boot_id="this")
    assert clock.now() == pytest.approx(110.0, abs=0.1)


@pytest.mark.parametrize("wall", [-3600.0, 0.0, 3600.0])
def test_within_a_boot_the_wall_clock_says_nothing(monkeypatch, wall):
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + wall)
    clock = RunClock.resume(
        last_t=50.0, last=ev.Progress(t=50.0, at=real), anchor=started(10.0, time.monotonic() - 60.0), boot_id="this"
    )
    assert clock.now() == pytest.approx(70.0, abs=0.1)


@pytest.mark.parametrize(("wall", "expected"), [(120.0, 170.0), (-3600.0, 50.0)])
def test_after_a_reboot_the_wall_clock_counts_but_only_forwards(monkeypatch, wall, expected):
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + wall)
    clock = RunClock.resume(
        last_t=50.0, last=ev.Progress(t=50.0, at=real), anchor=started(10.0, 1e9, boot="before"), boot_id="this"
    )
    assert clock.now() == pytest.approx(expected, abs=0.1)


def test_a_run_that_is_over_stands_still():
    ended = ev.RunEnded(t=50.0, at=0.0)
    clock = RunClock.resume(last_t=50.0, last=ended, anchor=started(0.0, time.monotonic() - 9999.0), boot_id="this")
    assert clock.now() == pytest.approx(50.0, abs=0.1)


def test_it_never_goes_behind_what_the_ledger_has():
    """Agents' events may lie later than the anchor's arithmetic says."""
    anchor = started(0.0, time.monotonic() - 10.0)
    clock = RunClock.resume(last_t=12.0, last=ev.Progress(t=12.0), anchor=anchor, boot_id="this")
    assert clock.now() >= 12.0
