import pytest

from ckptd.core.audit import audit
from ckptd.core.estimates import Estimate
from ckptd.core.interval import decide
from ckptd.core.policy import Policy

KNOWN = Estimate(mtbf_s=10_000.0, mtbf_low_s=9e3, mtbf_high_s=11e3, stall_s=5.0, step_s=1.0, upload_s=20.0)


def judged(saving, rework, failures=100, policy=None, upload=None):
    decision = decide(KNOWN, policy or Policy())
    return audit(saving_s=saving, rework_s=rework, failures=failures, upload_s=upload, decision=decision)


def test_equal_is_right():
    found = judged(500.0, 500.0)
    assert (found.balanced, found.ratio, found.advice) == (True, 1.0, "balanced")


def test_what_an_upload_under_way_loses_is_no_fault_of_the_interval():
    assert judged(500.0, 2500.0, upload=20.0).rework_s == 500.0
    assert judged(500.0, 2500.0, upload=20.0).balanced
    assert judged(500.0, 100.0, upload=20.0).rework_s == 0.0


def test_few_failures_tell_nothing():
    assert judged(500.0, 0.0, failures=0).balanced is None
    assert judged(500.0, 1.0, failures=2).balanced is None
    assert "2" in judged(500.0, 1.0, failures=2).advice
    assert judged(500.0, 1300.0, failures=3).balanced  # chance alone would do it
    assert judged(500.0, 1300.0, failures=300).balanced is False
    assert judged(0.0, 100.0).balanced is None


@pytest.mark.parametrize(
    ("saving", "rework", "policy", "told"),
    [
        (900.0, 100.0, Policy(interval_s=50.0), "saves too often; let it be auto, or about 312"),
        (100.0, 900.0, Policy(interval_s=5000.0), "saves too seldom; let it be auto"),
        (900.0, 100.0, Policy(max_interval_s=60.0), "raise checkpoint.max_interval"),
        (100.0, 900.0, Policy(min_interval_s=3000.0, max_interval_s=None), "lower checkpoint.min_interval"),
        (900.0, 100.0, Policy(), "nothing to do"),
        (100.0, 900.0, Policy(max_interval_s=60.0), "nothing to do"),
    ],
)
def test_what_to_do_is_said(saving, rework, policy, told):
    found = judged(saving, rework, policy=policy)
    assert found.balanced is False
    assert told in found.advice
    assert "9 times more" in found.advice


def test_without_rework_there_is_nothing_to_divide_by():
    found = judged(500.0, 0.0)
    assert (found.ratio, found.balanced) == (None, False)
    assert "saving costs more than rework" in found.advice
    assert audit(saving_s=9.0, rework_s=1.0, failures=99, upload_s=None, decision=None).advice.endswith("less often")
