"""What is a hang, what is not, and which rank is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.hang import Beat, Detector, Limits

LIMITS = Limits(factor=10.0, floor_s=30.0, startup_s=900.0)


def step(n, phase="step"):
    return Beat(step=n, phase=phase)


def trained(detector, steps=20, step_s=0.1, ranks=2, at=0.0):
    """A detector that has seen `steps` ordinary steps; returns the time."""
    for n in range(steps):
        detector.feed({rank: step(n) for rank in range(ranks)}, at)
        at += step_s
    return at


def test_steps_that_go_on_are_no_hang():
    detector = Detector(limits=LIMITS)
    now = trained(detector, steps=1000)
    assert detector.hung(now, expected=2) is None


def test_silence_beyond_the_limit_is_one_and_the_rank_behind_is_named():
    detector = Detector(limits=LIMITS)
    now = trained(detector)
    detector.feed({0: step(21), 1: step(20)}, now)
    assert detector.hung(now + 29, expected=2) is None
    hang = detector.hung(now + 31, expected=2)
    assert hang is not None
    assert (hang.rank, hang.step, hang.phase) == (1, 20, "step")
    assert hang.limit_s == 30.0
    assert hang.silent_s == pytest.approx(31)


def test_the_limit_follows_the_run_own_steps():
    detector = Detector(limits=LIMITS)
    now = trained(detector, step_s=20.0)
    assert detector.limit("step") == pytest.approx(200.0)
    assert detector.hung(now + 150, expected=2) is None
    assert detector.hung(now + 201, expected=2) is not None


def test_step_times_that_vary_a_hundredfold_are_no_hang():
    detector = Detector(limits=Limits(factor=10.0, floor_s=1.0, startup_s=900.0))
    now = 0.0
    for n in range(200):
        now += 5.0 if n % 2 else 0.05
        detector.feed({0: step(n), 1: step(n)}, now)
    assert detector.hung(now + 40, expected=2) is None
    assert detector.hung(now + 51, expected=2) is not None


def test_an_eval_that_takes_long_is_no_hang_and_does_not_blind_for_good():
    detector = Detector(limits=LIMITS)
    now = trained(detector)
    detector.feed({0: step(20, "eval"), 1: step(20)}, now)
    # Rank 1 waits in a collective, far beyond what a step may take: rank 0 is still within what an eval may.
    assert detector.hung(now + 800, expected=2) is None
    now += 800
    detector.feed({0: step(20), 1: step(20)}, now)
    detector.feed({0: step(21), 1: step(21)}, now + 0.1)
    assert detector.limit("step") < 100 * 900, "one long wait does not stretch the limit of a step for ever"
    now = trained_further(detector, now, steps=200)
    assert detector.hung(now + 31, expected=2) is not None


def trained_further(detector, now, *, steps):
    for n in range(steps):
        now += 0.1
        detector.feed({0: step(100 + n), 1: step(100 + n)}, now)
    return now


def test_beginnings_are_given_time_until_they_are_known():
    detector = Detector(limits=LIMITS)
    for phase in ("import", "init", "restore", "first_step"):
        detector.begin()
        detector.feed({0: step(0, phase), 1: step(0, phase)}, 0.0)
        assert detector.hung(899, expected=2) is None
        assert detector.hung(901, expected=2) is not None
    for _ in range(10):
        detector.learn("init", 2.0)
    assert detector.limit("init") == 30.0


def test_a_new_attempt_begins_with_a_clean_slate_and_keeps_what_is_normal():
    detector = Detector(limits=LIMITS)
    now = trained(detector)
    assert detector.hung(now + 100, expected=2) is not None
    detector.begin()
    assert detector.hung(now + 100, expected=2) is None
    detector.feed({0: step(0), 1: step(0)}, now + 100)
    assert detector.hung(now + 131, expected=2) is not None, "the thresholds were forgotten"


def test_the_rank_in_another_phase_is_the_suspect():
    detector = Detector(limits=Limits(factor=10.0, floor_s=30.0, startup_s=60.0))
    now = trained(detector, ranks=3)
    detector.feed({0: step(20), 1: step(20, "save"), 2: step(20)}, now)
    hang = detector.hung(now + 61, expected=3)
    assert hang is not None
    assert hang.rank == 1


def test_ranks_that_ended_do_not_hide_one_that_does_not():
    detector = Detector(limits=LIMITS)
    now = trained(detector)
    detector.feed({0: step(20, "end"), 1: step(20)}, now)
    hang = detector.hung(now + 31, expected=2)
    assert hang is not None
    assert hang.rank == 1


def test_an_end_that_does_not_end_is_seen_after_the_floor():
    detector = Detector(limits=LIMITS)
    now = trained(detector)
    detector.feed({0: step(20, "end"), 1: step(20, "end")}, now)
    assert detector.hung(now + 29, expected=2) is None
    assert detector.hung(now + 31, expected=2) is not None


def test_switched_off():
    detector = Detector(limits=Limits(enabled=False))
    now = trained(detector)
    assert detector.hung(now + 1e6, expected=2) is None


def test_a_rank_that_was_never_heard_of_hides_nothing_for_ever():
    detector = Detector(limits=LIMITS)
    detector.feed({0: step(0, "import")}, 0.0)
    assert detector.hung(899, expected=2) is None
    assert detector.hung(901, expected=2) is not None


beats = st.dictionaries(
    st.integers(0, 3),
    st.builds(Beat, step=st.integers(0, 50), phase=st.sampled_from(["init", "step", "eval", "end", "odd"])),
)


@given(st.lists(st.tuples(beats, st.floats(0, 1e4)), max_size=40))
def test_never_raises_and_only_names_a_rank_beyond_its_limit(pictures):
    detector = Detector(limits=LIMITS)
    now = 0.0
    for picture, gap in pictures:
        now += gap
        detector.feed(picture, now)
        hang = detector.hung(now, expected=4)
        assert hang is None or hang.silent_s > hang.limit_s >= 30.0
