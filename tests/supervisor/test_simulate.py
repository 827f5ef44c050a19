"""The simulator against the production account, its own shortcut, and the model."""

import itertools
import random
import statistics

import pytest

from ckptd import failure_times
from ckptd.core import accounting, picture
from ckptd.core import events as ev
from ckptd.core.commands import Record
from ckptd.core.interval import waste
from ckptd.core.policy import Policy
from ckptd.errors import UsageError
from ckptd.failure_times import Trace
from ckptd.simulate import NODE, Job, Oracle, Production, best_interval, fixed, follow
from ckptd.simulate_compare import compare, curve, hindsight
from ckptd.sitelogs.reading import Options

DAY = 86_400.0
LLAMA = 54 * DAY / 419
JOB = Job(devices=16_384, stall_s=60.0, restart_s=600.0, upload_s=90.0)


class Every:
    stages = False

    def __init__(self, seconds):
        self.seconds = seconds

    def due(self, since):
        return since + self.seconds

    def tell(self, event):
        pass


class Whole:
    """All that the daemon makes of its events: the picture, its decisions recorded."""

    stages = True

    def __init__(self):
        self.picture = picture.Picture()

    def tell(self, event):
        self.picture = picture.apply(self.picture, event)
        if isinstance(event, ev.DaemonStarted):
            for found in (
                ev.AgentConnected(t=event.t, node=NODE, devices=[{"index": 0}]),
                ev.HealthReported(t=event.t, node=NODE),
                ev.InventoryReported(t=event.t, node=NODE),
            ):
                self.picture = picture.apply(self.picture, found)
        while True:
            records = [c.event for c in picture.decide(self.picture, event.t) if isinstance(c, Record)]
            ours = [e for e in records if isinstance(e, ev.IntervalDecided)]
            if not ours:
                return
            self.picture = picture.apply(self.picture, ours[0])

    def due(self, since):
        return since + self.picture.decision.interval_s


@pytest.mark.parametrize("seed", range(8))
def test_an_attempt_at_a_time_is_the_same_as_a_save_at_a_time(seed):
    dice = random.Random(seed)
    job = Job(
        devices=8, stall_s=dice.choice([0.0, 5.0, 60.0]), restart_s=dice.choice([0.0, 30.0, 4000.0]),
        upload_s=dice.choice([0.0, 30.0, 300.0]),
    )  # fmt: skip
    trace = failure_times.weibull(3000.0, 0.7, 3 * DAY)(dice)
    seconds = dice.choice([10.0, 400.0, 5000.0])
    one, other = fixed(trace, job, seconds), follow(trace, job, Policy(), Every(max(seconds, job.upload_s)))
    assert (one.failures, one.saves) == (other.failures, other.saves)
    for name in ("saving_s", "rework_s", "restart_s"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-6)


def test_what_is_simulated_is_what_runs_in_production():
    """The same failures through the whole picture: the same interval all the way, and the production account of time."""
    trace = failure_times.surges(8000.0, 5.0, 0.3 * DAY, 3 * DAY)(random.Random(4))
    policy = Policy(run_id="r", max_interval_s=None, wait_for_devices_s=1e9)
    whole = Whole()
    one, other = follow(trace, JOB, policy, whole), follow(trace, JOB, policy, Production(policy, JOB.devices))
    assert one == other
    assert one.failures > 20
    told = accounting.summary(whole.picture.account, t=trace.horizon_s)
    assert told.wall_s == pytest.approx(trace.horizon_s)
    assert told.goodput == pytest.approx(1 - one.waste, abs=2 * JOB.stall_s / trace.horizon_s)
    # A failure in the middle of a stall has no event of that save, so the account takes the part of it for training.
    paid = told.seconds_by_phase["wasted_progress"] + told.seconds_by_phase["checkpoint_stall"]
    assert paid == pytest.approx(one.rework_s + one.saving_s, abs=JOB.stall_s)
    assert whole.picture.estimate.failures + whole.picture.estimates.failures.merged == one.failures


def test_a_fixed_interval_wastes_what_the_model_says():
    traces = [failure_times.exponential(LLAMA, 54 * DAY)(random.Random(seed)) for seed in range(30)]
    got = statistics.fmean(fixed(trace, JOB, 1200.0).waste for trace in traces)
    expected = waste(1200.0, stall_s=60.0, mtbf_s=LLAMA, restart_s=600.0, upload_s=90.0).total
    assert got == pytest.approx(
        expected, rel=0.12
    )  # to first order: the model lets failures of a job that is down cost work too
    points = dict(curve(traces, JOB))
    assert hindsight(traces, JOB) == pytest.approx(best_interval(LLAMA, JOB), rel=0.4)
    assert points[max(points)] > 1.5 * min(points.values())


def test_failures_before_the_first_step_begin_the_restart_again():
    trace = Trace(times=(1000.0, 1300.0, 1800.0, 9000.0), horizon_s=10_000.0, mtbf_s=((0.0, 1.0),))
    job = Job(devices=1, stall_s=1.0, restart_s=600.0)
    found = fixed(trace, job, 100.0)
    assert found.failures == 4
    assert found.restart_s == pytest.approx((1800 + 600 - 1000) + 600)
    assert found.rework_s < 200


def test_nothing_fails_and_nothing_costs():
    trace = Trace(times=(), horizon_s=DAY, mtbf_s=((0.0, 1e12),))
    job = Job(devices=1, stall_s=0.0, restart_s=0.0)
    for found in (fixed(trace, job, 100.0), follow(trace, job, Policy(), Production(Policy(), 1))):
        assert (found.waste, found.failures) == (0.0, 0)
    assert follow(trace, job, Policy(), Oracle(trace, job)).waste == 0.0


def test_an_oracle_knows_when_the_rate_changes():
    trace = Trace(times=(), horizon_s=10 * DAY, mtbf_s=((0.0, 1e6), (5 * DAY, 1e4), (6 * DAY, 1e6)))
    oracle = Oracle(trace, JOB)
    calm, wild = best_interval(1e6, JOB), best_interval(1e4, JOB)
    assert oracle.due(0.0) == pytest.approx(calm)
    assert oracle.due(5 * DAY + 1) == pytest.approx(5 * DAY + 1 + wild)
    assert oracle.due(5 * DAY - 100) == pytest.approx(5 * DAY - 100 + wild)
    assert oracle.due(5 * DAY - calm + 10) == 5 * DAY  # overdue the moment that it knows


def test_ckptd_learns_what_it_is_not_told():
    source = failure_times.exponential(LLAMA, 54 * DAY)
    wrong = Policy(prior_device_seconds=50_000 * 3600.0 * 10, max_interval_s=None)
    found = compare(source, JOB, wrong, seeds=3, fixed_s=3600.0, vendor_mtbf_s=10 * LLAMA, oracle=True)
    by_name = {score.name: score for score in found.scores}
    assert by_name["oracle"].regret == 0.0
    assert by_name["ckptd"].regret < 0.05
    assert by_name["fixed"].regret > 0.2
    assert by_name["vendor"].regret > 0.2
    for score in found.scores:
        assert score.waste == pytest.approx(score.save + score.rework + score.restart)


def test_a_log_has_no_oracle():
    source = failure_times.replay([5000.0, 20_000.0, 300.0, 9000.0] * 20, 1000.0, jitter_s=600.0)
    found = compare(source, JOB, Policy(max_interval_s=None), seeds=2, fixed_s=3600.0, vendor_mtbf_s=None, oracle=False)
    assert (found.reference, found.failures) == ("best fixed", 80)
    assert [score.name for score in found.scores] == ["ckptd", "best fixed", "fixed"]


@pytest.mark.parametrize("draw", [
    failure_times.exponential(5000.0, 40 * DAY), failure_times.weibull(5000.0, 0.7, 40 * DAY),
    failure_times.replay([5000.0] * 691, 0.0, jitter_s=3000.0),
])  # fmt: skip
def test_failures_come_in_order_and_as_often_as_they_should(draw):
    trace = draw(random.Random(2))
    assert list(trace.times) == sorted(trace.times)
    assert 0 <= trace.times[0] <= trace.times[-1] < trace.horizon_s
    assert len(trace.times) == pytest.approx(trace.horizon_s / 5000.0, rel=0.2)
    assert draw(random.Random(2)) == trace


def test_surges_are_where_they_are_said_to_be():
    trace = failure_times.surges(10_000.0, 10.0, DAY, 100 * DAY, calm_s=5 * DAY)(random.Random(1))
    spans = [*trace.mtbf_s, (trace.horizon_s, 0.0)]
    wild = [(a, b) for (a, m), (b, _) in itertools.pairwise(spans) if m == 1000.0]
    assert len(wild) > 5
    inside = sum(1 for t in trace.times if any(a <= t < b for a, b in wild))
    assert inside / sum(b - a for a, b in wild) == pytest.approx(1e-3, rel=0.1)
    once = failure_times.surges(10_000.0, 10.0, DAY, 100 * DAY)(random.Random(1))
    assert [m for _, m in once.mtbf_s] == [10_000.0, 1000.0, 10_000.0]


def test_logs_are_gaps_or_what_import_reads():
    options = Options(source="log.csv", now=4e9)
    assert failure_times.read_log(b"gap_s\n10\n0\n30\n", options, 8) == ([10.0, 0.0, 30.0], 0.0)
    times = b"time,kind\n2024-01-01T00:00:00Z,start\n2024-01-01T10:00:00Z,failure\n2024-01-02T00:00:00Z,failure\n"
    gaps, tail = failure_times.read_log(times, options, 8)
    assert gaps == pytest.approx([36_000.0, 50_400.0])
    assert tail == 0.0
    for bad in (b"gap\nsoon\n", b"gap\n-5\n", b"gap\n", b"gap\n0\n", b""):
        with pytest.raises(UsageError):
            failure_times.read_log(bad, options, 8)
