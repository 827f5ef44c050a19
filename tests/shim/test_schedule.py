"""When saves fall due, by arithmetic and by a clock of our own; and that real ranks agree on it."""

import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd_shim import contract
from ckptd_shim.schedule import Agreement, Schedule, StepTimes, check_intervals, gap_steps, is_due

# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_step_times_know_the_longest_and_the_mean():
    times = StepTimes()
    assert (times.longest_s, times.mean_s) == (None, None)
    times.add(2.0, 4, None)
    times.add(1.0, 1, 0.9)
    times.add(3.0, 5, 2.5)
    times.add(5.0, 0, 99.0)  # no step was made: nothing is learnt
    assert times.longest_s == 2.5
    assert times.mean_s == 6.0 / 10


def test_step_times_forget():
    times = StepTimes()
    times.add(100.0, 1, None)
    for _ in range(40):
        times.add(0.1, 1, None)
    assert times.longest_s == pytest.approx(0.1)
    assert times.mean_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("longest", "mean", "worst", "previous", "interval", "left_s", "left_steps", "gap"),
    [
        (None, None, 0.0, 50, 9.0, 9.0, 9, 1),  # nothing known
        (0.1, 0.1, 9.0, 100, None, None, None, 10),  # a second
        (5.0, 0.1, 5.0, 100, None, None, None, 1),  # one long step among them
        (0.001, 0.001, 0.001, 3, None, None, None, 6),  # but no faster than doubling
        (0.1, 0.1, 0.1, 100, 10.0, 0.35, None, 3),  # not beyond the interval's end in seconds
        (0.1, 0.1, 0.1, 100, 10.0, -1.0, None, 1),
        (0.1, 0.1, 0.1, 100, None, None, 4, 4),  # or in steps
        (0.1, 0.1, 0.1, 100, None, None, -3, 1),
        (0.1, 0.1, 0.1, 100, 10.0, 0.35, 2, 2),
        (0.1, 0.1, 5.0, 100, 60.0, 60.0, None, 3),  # three steps of the worst kind are a quarter of the interval
        (0.1, 0.1, 99.0, 100, 60.0, 60.0, None, 1),
        (0.0, 0.0, 0.0, 10**9, 10.0, 10.0, None, 10_000),  # a clock that stands still
    ],
)
def test_the_gap(longest, mean, worst, previous, interval, left_s, left_steps, gap):
    assert gap == gap_steps(
        longest_s=longest,
        mean_s=mean,
        worst_s=worst,
        previous=previous,
        interval_s=interval,
        left_s=left_s,
        left_steps=left_steps,
    )


@pytest.mark.parametrize(
    ("elapsed_s", "elapsed_steps", "interval_s", "interval_steps", "next_in_s", "due"),
    [
        (100.0, 100, None, None, 1.0, False),  # only on request
        (0.0, 10, None, 10, 1.0, True),
        (0.0, 9, None, 10, 1.0, False),
        (10.0, 5, 10.0, None, 1.0, True),
        (9.6, 5, 10.0, None, 1.0, True),  # 0.4 s early beats 0.6 s late
        (9.4, 5, 10.0, None, 1.0, False),
        (9.4, 5, 10.0, 5, 1.0, True),  # the earlier of the two
        (10.0, 5, 10.0, 99, 1.0, True),
        (0.0, 0, 0.1, 1, 1.0, False),  # nothing was done since the last one
    ],
)
def test_due(elapsed_s, elapsed_steps, interval_s, interval_steps, next_in_s, due):
    assert due == is_due(
        elapsed_s=elapsed_s,
        elapsed_steps=elapsed_steps,
        interval_s=interval_s,
        interval_steps=interval_steps,
        next_in_s=next_in_s,
    )


@pytest.mark.parametrize(
    "interval", [(0.0, None), (-1.0, None), (math.nan, None), (math.inf, None), (None, 0), (None, -5)]
)
def test_senseless_intervals(interval):
    with pytest.raises(ValueError, match="makes no sense"):
        check_intervals(*interval)
    with pytest.raises(ValueError, match="makes no sense"):
        schedule(interval_s=interval[0], interval_steps=interval[1])


def test_ranks_without_a_group():
    with pytest.raises(ValueError, match="3 ranks need a process group"):
        schedule(world_size=3)


# --- one rank on a clock of its own -----------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def schedule(**changes):
    options = {
        "rank": 0,
        "world_size": 1,
        "group": None,
        "attempt": 3,
        "control_path": None,
        "interval_s": None,
        "interval_steps": None,
        **changes,
    }
    return Schedule(**options)


@dataclasses.dataclass
class Run:
    saves: list  # (step, seconds since start)
    agreed: list
    end: float


def train(plan, durations, *, first=0, stall=0.0, start=True, clock=None):
    """Train for `durations` of steps; every agreed save is begun and stalls training."""
    clock = clock or plan._clock
    begun = clock.now
    run = Run([], [], 0.0)
    if start:
        plan.start(first)
    for step, seconds in enumerate(durations, first + 1):
        clock.now += seconds
        if plan.due(step):
            agreement = plan.agree(step, step_s=seconds)
            run.agreed.append((step, clock.now - begun))
            if agreement.save:
                run.saves.append((step, clock.now - begun))
                clock.now += stall
                plan.saved(step)
    run.end = clock.now - begun
    return run


def gaps(run):
    times = [0.0, *(t for _, t in run.saves)]
    return [b - a for a, b in itertools.pairwise(times)]


def test_steady_steps_save_at_the_interval_and_agree_once_a_second():
    run = train(schedule(interval_s=30.0, clock=Clock()), [0.1] * 6000)
    assert len(run.saves) == 20
    assert all(abs(gap - 30) <= 0.11 for gap in gaps(run))
    assert 590 <= len(run.agreed) <= 640
    assert max(b[1] - a[1] for a, b in itertools.pairwise(run.agreed)) <= 1.01


def test_the_first_agreement_is_one_step_on():
    plan = schedule(interval_steps=1000)
    plan.start(70)
    assert not plan.due(70)
    assert plan.due(71)


def test_an_interval_in_steps_is_met_to_the_step():
    run = train(schedule(interval_steps=7, clock=Clock()), [0.001, 0.02, 0.3] * 100, first=50)
    assert [step for step, _ in run.saves] == list(range(57, 351, 7))


def test_of_two_intervals_the_earlier_counts():
    clock = Clock()
    plan = schedule(interval_s=10.0, interval_steps=50, clock=clock)
    fast = train(plan, [0.1] * 300)
    assert [step for step, _ in fast.saves] == [50, 100, 150, 200, 250, 300]
    slow = train(plan, [1.0] * 100, first=300)
    assert all(abs(gap - 10) <= 1 for gap in gaps(slow))


def test_without_an_interval_nothing_is_saved():
    assert train(schedule(clock=Clock()), [0.5] * 1000).saves == []


def test_steps_longer_than_the_interval_save_each_time():
    run = train(schedule(interval_s=1.0, clock=Clock()), [5.0] * 10)
    assert [step for step, _ in run.saves] == list(range(1, 11))


@pytest.mark.parametrize("pattern", [[0.05, 5.0], [5.0, 0.05], [0.05] * 9 + [5.0], [0.05] * 99 + [5.0]])
def test_steps_that_vary_a_hundredfold(pattern):
    run = train(schedule(interval_s=60.0, clock=Clock()), (pattern * 3000)[: int(9000 / statistics.mean(pattern))])
    assert 145 <= len(run.saves) <= 155
    assert max(gaps(run)) <= 65
    assert min(gaps(run)) >= 55


def test_spells_of_steps_a_hundred_times_as_long():
    pattern = [0.05] * 400 + [5.0] * 20
    run = train(schedule(interval_s=60.0, clock=Clock()), pattern * 100)
    assert len(run.saves) > 150
    # The first spell begins inside a gap of short steps, and its steps are that long; the next ones are expected.
    assert max(gaps(run)[:3]) <= 60 + 20 * 5
    assert max(gaps(run)[3:]) <= 60 + 15 + 5
    assert min(gaps(run)) >= 55


def test_a_drift_of_five_percent_moves_the_steps_not_the_seconds():
    run = train(schedule(interval_s=60.0, clock=Clock()), [0.2] * 6000 + [0.21] * 6000)
    assert all(abs(gap - 60) <= 0.25 for gap in gaps(run))
    steps = [b - a for (a, _), (b, _) in itertools.pairwise(run.saves)]
    assert (steps[0], steps[-1]) == (300, 286)


@given(st.lists(st.floats(0.001, 3.0), min_size=50, max_size=400), st.floats(2.0, 40.0))
def test_no_pattern_of_steps_saves_too_often_or_far_too_late(durations, interval):
    run = train(schedule(interval_s=interval, clock=Clock()), durations)
    assert all(gap >= interval - 1.51 for gap in gaps(run))
    # Late by the steps of one gap at most. A gap is a second by the longest step seen before it.
    bound = max(
        (b - a for (_, a), (_, b) in zip([(0, 0.0), *run.agreed], run.agreed, strict=False)),
        default=sum(durations),
    )
    assert all(gap <= interval + bound + 1e-6 for gap in gaps(run))


def test_the_stall_of_a_save_is_not_step_time():
    run = train(schedule(interval_s=20.0, clock=Clock()), [0.1] * 2000, stall=60.0)
    assert all(abs(gap - 80) <= 0.11 for gap in gaps(run)[1:])
    assert len(run.agreed) < 260


def test_the_first_step_is_not_either():
    run = train(schedule(clock=Clock()), [120.0] + [0.1] * 1000)
    assert len(run.agreed) < 120


def test_a_save_that_is_not_begun_stays_due():
    clock = Clock()
    plan = schedule(interval_steps=10, clock=clock)
    plan.start(0)
    asked = []
    for step in range(1, 16):
        clock.now += 0.1
        if plan.due(step) and plan.agree(step, step_s=0.1).save:
            asked.append(step)
    assert asked[0] == 10
    assert len(asked) > 1
    plan.saved(15)
    assert [s for s, _ in train(plan, [0.1] * 25, first=15, start=False, clock=clock).saves] == [25, 35]


def test_a_save_out_of_turn_counts():
    clock = Clock()
    plan = schedule(interval_steps=10, clock=clock)
    assert train(plan, [0.1] * 5).saves == []
    plan.saved(5)
    assert [s for s, _ in train(plan, [0.1] * 20, first=5, start=False).saves] == [15, 25]


def test_a_wish_to_stop_saves_and_stops():
    plan = schedule()
    plan.start(0)
    assert plan.agree(1, step_s=0.1) == Agreement(save=False, stop=False, save_request=0, reason="")
    assert plan.agree(2, step_s=0.1, want_stop=True) == Agreement(
        save=True, stop=True, save_request=0, reason="rank 0 was asked to stop"
    )


# --- the control file -------------------------------------------------------------------------------------------------


def control(**changes):
    values = {
        "seq": 1,
        "attempt": 3,
        "interval_s": None,
        "interval_steps": None,
        "save_request": 0,
        "stop_after_save": False,
        "reason": "",
        "issued_at": 0.0,
        **changes,
    }
    return contract.Control(**values)


@pytest.fixture
def steered(tmp_path):
    """A schedule with a control file, the file, and what it says of ignored ones."""
    path = tmp_path / "control.json"
    ignored = []
    plan = schedule(control_path=str(path), on_ignored=ignored.append, interval_steps=500)
    plan.start(0)
    return plan, path, ignored


def test_a_new_interval_is_taken_over(steered):
    plan, path, ignored = steered
    plan.agree(1, step_s=0.1)
    assert (plan.interval_s, plan.interval_steps) == (None, 500)
    control(interval_s=12.5, interval_steps=None).write(path)
    plan.agree(2, step_s=0.1)
    assert (plan.interval_s, plan.interval_steps) == (12.5, None)
    control(seq=2, interval_s=None, interval_steps=2).write(path)
    assert plan.agree(3, step_s=0.1) == Agreement(save=True, stop=False, save_request=0, reason="interval")
    assert (plan.interval_s, plan.interval_steps) == (None, 2)
    assert ignored == []


def test_a_request_is_served_once(steered):
    plan, path, _ = steered
    control(save_request=4).write(path)
    assert plan.agree(1, step_s=0.1) == Agreement(save=True, stop=False, save_request=4, reason="save request")
    assert not plan.agree(2, step_s=0.1).save
    control(seq=2, save_request=4, interval_s=99.0).write(path)
    assert not plan.agree(3, step_s=0.1).save
    control(seq=3, save_request=3).write(path)
    assert not plan.agree(4, step_s=0.1).save
    control(seq=4, save_request=6).write(path)
    assert plan.agree(5, step_s=0.1).save_request == 6


def test_stop_after_save_saves_and_stops(steered):
    plan, path, _ = steered
    control(stop_after_save=True, save_request=1).write(path)
    stop = Agreement(save=True, stop=True, save_request=1, reason="stop after save")
    assert plan.agree(1, step_s=0.1) == stop
    assert plan.agree(2, step_s=0.1) == dataclasses.replace(stop, save_request=0)  # until it is done, or withdrawn
    control(seq=2, stop_after_save=False, save_request=1).write(path)
    assert not plan.agree(3, step_s=0.1).stop


BAD = {
    "not JSON": '{"seq": 5, "attem',
    "empty": "",
    "a list": "[1]",
    "a key missing": '{"seq": 5, "attempt": 3}',
    "another attempt": control(seq=5, attempt=2, interval_s=1.0, save_request=9, stop_after_save=True).to_json(),
    "an old seq": control(seq=1, interval_s=1.0, save_request=9, stop_after_save=True).to_json(),
    "a lower seq": control(seq=0, interval_s=1.0, save_request=9, stop_after_save=True).to_json(),
    "no time": control(seq=5, interval_s=-1.0, save_request=9).to_json(),
    "not a number": control(seq=5, interval_s=1.0, save_request=9).to_json().replace("1.0", "NaN"),
    "no steps": control(seq=5, interval_steps=0, save_request=9).to_json(),
    "too many steps": control(seq=5, interval_steps=10**30, save_request=9).to_json(),
    "a request below zero": control(seq=5, save_request=-9).to_json(),
    "a request too large": control(seq=5, save_request=10**30).to_json(),
    "nested too deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_control_file_is_ignored_and_reported_once(what, steered):
    plan, path, ignored = steered
    control(seq=1, interval_s=40.0, save_request=2).write(path)
    assert plan.agree(1, step_s=0.1).save_request == 2
    contract.write_atomically(path, BAD[what].encode())
    for step in range(2, 6):
        assert plan.agree(step, step_s=0.1) == Agreement(save=False, stop=False, save_request=0, reason="")
    contract.write_atomically(path, BAD[what].encode())
    plan.agree(6, step_s=0.1)
    assert plan.interval_s == 40.0
    assert len(ignored) == 1
    assert str(path) in ignored[0]
    control(seq=2, interval_s=41.0).write(path)
    plan.agree(7, step_s=0.1)
    assert plan.interval_s == 41.0
    assert len(ignored) == 1


def test_a_control_file_may_come_late_and_must_not_go(steered):
    plan, path, ignored = steered
    plan.agree(1, step_s=0.1)
    assert ignored == []
    control(interval_s=40.0).write(path)
    plan.agree(2, step_s=0.1)
    path.unlink()
    plan.agree(3, step_s=0.1)
    plan.agree(4, step_s=0.1)
    assert len(ignored) == 1
    assert plan.interval_s == 40.0


def test_a_control_file_that_cannot_be_read(steered):
    plan, path, ignored = steered
    path.mkdir()
    plan.agree(1, step_s=0.1)
    plan.agree(2, step_s=0.1)
    assert len(ignored) == 1


def test_an_unchanged_file_is_not_read_again(steered):
    plan, path, ignored = steered
    control(interval_s=40.0).write(path)
    plan.agree(1, step_s=0.1)
    status = os.stat(path)
    path.write_text("x" * status.st_size)  # the same inode and size, and now the same time
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    plan.agree(2, step_s=0.1)
    assert ignored == []


# --- three real ranks -------------------------------------------------------------------------------------------------

RANK = """
import json, os, sys, time
from datetime import timedelta
import torch.distributed as dist
from ckptd_shim import contract
from ckptd_shim.schedule import Schedule

rank, directory, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(os.path.join(directory, "store"), 3), rank=rank, world_size=3,
                        timeout=timedelta(seconds=60))
path = os.path.join(directory, "control.json")

def control(seq, **changes):
    values = dict(seq=seq, attempt=1, interval_s=None, interval_steps=None, save_request=0, stop_after_save=False,
                  reason="", issued_at=0.0)
    contract.Control(**{**values, **changes}).write(path)

def say(**what):
    print(json.dumps(what), flush=True)

# Of the clocks only that of rank 0 counts: the others' run wild.
clock = time.monotonic if rank == 0 else (lambda: 1e9 * rank)
plan = Schedule(rank=rank, world_size=3, group=dist.group.WORLD, attempt=1, control_path=path, clock=clock,
                interval_s=None if case != "interval" else 0.05, interval_steps=None,
                on_ignored=lambda why: say(ignored=why))
plan.start(0)
step = 0
try:
    while step < 400:
        step += 1
        time.sleep(0.001 * (rank + 1))
        if case == "control" and rank == 0:
            if step == 40: control(1, interval_steps=30)
            if step == 150: control(2, interval_steps=30, save_request=7)
            if step == 300: control(3, interval_s=1/3, save_request=7, stop_after_save=True)
        if case == "different" and rank == 1 and step == 1: step += 1
        if plan.due(step):
            a = plan.agree(step, step_s=0.001, want_stop=(case == "signal" and rank == 2 and step > 100))
            say(step=step, save=a.save, stop=a.stop, request=a.save_request, reason=a.reason,
                interval=[plan.interval_s, plan.interval_steps])
            if a.save: plan.saved(step)
            if a.stop: break
except RuntimeError as error:
    say(error=str(error))
else:
    say(done=step)
dist.barrier()  # a rank that leaves early could cut another one off in its last agreement
dist.destroy_process_group()
"""


def three_ranks(tmp_path, case):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), tmp_path, case], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def test_a_signal_that_only_one_rank_saw_stops_all_at_one_step(tmp_path):
    said = three_ranks(tmp_path, "signal")
    assert said[0] == said[1] == said[2]
    *agreed, last, done = said[0]
    assert not any(a["save"] or a["stop"] for a in agreed)
    assert last["save"]
    assert last["stop"]
    assert last["reason"] == "rank 2 was asked to stop"
    assert last["step"] == done["done"] > 100
    assert agreed[0]["step"] == 1
    assert len(agreed) < 100  # most steps cost no collective


def test_a_control_file_that_changes_reaches_all_at_one_step(tmp_path):
    said = three_ranks(tmp_path, "control")
    assert said[0] == said[1] == said[2]
    *agreed, last, done = said[0]
    saves = [a for a in agreed if a["save"]]
    first = next(a["step"] for a in agreed if a["interval"] == [None, 30])
    assert first >= 40
    assert not any(a["save"] for a in agreed if a["step"] < first)
    by_interval = [a["step"] for a in saves if a["reason"] == "interval"]
    assert len(by_interval) >= 4
    requests = [a for a in saves if a["reason"] == "save request"]
    assert [a["request"] for a in requests] == [7]
    assert 150 <= requests[0]["step"] <= 180
    order = [a["step"] for a in saves]
    assert all(b - a <= 30 for a, b in itertools.pairwise(order))
    assert (last["stop"], last["save"], last["reason"]) == (True, True, "stop after save")
    assert last["interval"] == [1 / 3, None]  # to the last bit, on every rank
    assert 300 <= last["step"] == done["done"] <= 330


def test_only_the_clock_of_rank_0_counts(tmp_path):
    said = three_ranks(tmp_path, "interval")
    assert said[0] == said[1] == said[2]
    assert said[0][-1] == {"done": 400}
    assert sum(a["save"] for a in said[0][:-1]) >= 5


def test_ranks_at_different_steps_are_told(tmp_path):
    said = three_ranks(tmp_path, "different")
    for rank, step in enumerate((1, 2, 1)):
        assert len(said[rank]) == 1
        assert f"this is {step}, they range from 1 to 2" in said[rank][0]["error"]


def test_a_save_that_may_not_be_is_asked_for_again_and_one_that_ends_training_is_not_held_back(tmp_path):
    clock, asked, allowed = [0.0], [], [False]
    path = tmp_path / "control.json"

    def may(step, request):
        asked.append((step, request))
        return allowed[0]

    schedule = Schedule(
        rank=0, world_size=1, group=None, attempt=1, control_path=str(path), interval_s=None, interval_steps=5,
        clock=lambda: clock[0], may_save=may,
    )  # fmt: skip
    schedule.start(0)

    def agree(step):
        clock[0] = float(step)
        return schedule.agree(step, step_s=1.0)

    assert [agree(step).save for step in range(1, 8)] == [False] * 7
    assert [step for step, _ in asked] == [5, 6, 7], "each time it is due, and not before"
    assert not schedule.due(7)
    assert schedule.due(8), "about a second later"
    control = {"seq": 1, "attempt": 1, "interval_s": None, "interval_steps": 5, "save_request": 1,
               "stop_after_save": False, "reason": "save", "issued_at": 0.0}  # fmt: skip
    contract.Control(**control).write(path)
    found = agree(8)
    assert (found.save, found.save_request, asked[-1]) == (False, 0, (8, 1))
    agree(9)
    assert asked[-1] == (9, 0), "a request is answered once"
    allowed[0] = True
    assert agree(10).save
    schedule.saved(10)
    allowed[0] = False
    contract.Control(**(control | {"seq": 2, "save_request": 2, "stop_after_save": True})).write(path)
    found = agree(11)
    assert (found.save, found.stop) == (True, True), "the last state is at least tried"
