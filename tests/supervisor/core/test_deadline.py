"""When a run begins to stop: early enough for a save, late enough to have trained."""

from __future__ import annotations

from ckptd.core.deadline import stop_before_s
from ckptd.core.estimates import Estimate


def estimate(**known):
    return Estimate(mtbf_s=1e4, mtbf_low_s=1e3, mtbf_high_s=1e5, **known)


def test_three_saves_three_steps_the_grace_and_a_margin():
    usual = estimate(stall_s=2.0, upload_s=38.0, step_s=10.0)
    assert stop_before_s(usual, stop_grace_s=5.0, whole_s=86_400.0) == 3 * (2 + 38 + 10) + 5 + 30


def test_what_is_not_known_is_guessed():
    assert stop_before_s(estimate(), stop_grace_s=3.0, whole_s=3600.0) == 3 * 20 + 3 + 30
    half_known = estimate(stall_s=0.1)
    assert stop_before_s(half_known, stop_grace_s=3.0, whole_s=3600.0) == 3 * 20 + 3 + 30


def test_half_of_a_short_allocation_is_for_training():
    assert stop_before_s(estimate(), stop_grace_s=3.0, whole_s=60.0) == 30
