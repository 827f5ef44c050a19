import json
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
from any_events import any_event
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_run import MadeUpRun

from ckptd import status
from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.accounting import PHASES
from ckptd.core.overview import INTERRUPTIONS, Overview, Series


def overview_of(events, **options):
    folded = Overview(**options)
    for event in events:
        folded.apply(event)
    return folded


@pytest.fixture(scope="module")
def run():
    made = MadeUpRun(nodes=1, mtbf_s=900.0, stall_s=5.0, upload_s=10.0).interrupted_times(40)
    made.launch()
    made.train(600.0)
    return made


@pytest.fixture(scope="module")
def told(run):
    return overview_of(run.events).document(status.document(run.picture, t=run.t))


def test_the_document_is_json(told):
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_the_pictures_show_the_account(run, told):
    known = status.document(run.picture, t=run.t)["goodput"]
    assert told["wall_s"] == pytest.approx(known["wall_s"])
    assert told["goodput"] == pytest.approx(known["ratio"])
    columns = told["timeline"]["seconds_by_phase"]
    for phase in PHASES:
        spent = math.fsum(columns.get(phase, [0.0]))
        assert spent == pytest.approx(known["seconds_by_phase"][phase], rel=1e-4, abs=1e-2), phase


def test_what_happened_and_what_was_expected_are_in_the_same_terms(told):
    waste = told["waste"]
    assert told["goodput"] + sum(waste["happened"].values()) + waste["outside"] == pytest.approx(1.0)
    assert set(waste["expected_then"]) == {"save", "rework", "restart"} < set(waste["expected_now"])
    seconds = told["seconds_by_phase"]
    assert waste["happened"]["save"] == pytest.approx(seconds["checkpoint_stall"] / told["wall_s"])
    assert waste["happened"]["rework"] == pytest.approx(seconds["wasted_progress"] / told["wall_s"])


def test_restarts_interruptions_and_checkpoints_are_counted(run, told):
    restarts = [e for e in run.events if isinstance(e, ev.Restarted)]
    assert sum(group["count"] for group in told["restarts"]["groups"]) == len(restarts)
    assert told["restarts"]["newest"][-1]["total_s"] == pytest.approx(restarts[-1].total_s)
    interrupted = [e for e in run.events if isinstance(e, ev.Interrupted)]
    assert sum(row["count"] for row in told["causes"]) == len(interrupted)
    assert len(told["interruptions"]) == INTERRUPTIONS
    assert told["interruptions"][0]["attempt"] == interrupted[-1].attempt
    assert any("ECC" in row["message"] for row in told["interruptions"])
    disk = told["checkpoints"]["disk"]
    assert disk["committed"] == sum(isinstance(e, ev.SaveCommitted) for e in run.events)
    assert disk["failed"] == sum(isinstance(e, ev.SaveFailed) for e in run.events)
    assert sum(told["timeline"]["saves"]["disk"]["count"]) == disk["committed"]


def test_the_curve_is_lowest_at_the_optimum(told):
    curve = told["curve"]
    total = curve["waste"]["total"]
    least = curve["interval_s"][total.index(min(total))]
    assert least == pytest.approx(curve["optimum_s"]["young"], rel=0.2)
    assert curve["used_s"] == told["status"]["interval"]["seconds"]


def test_a_replay_at_its_own_costs_is_near_what_happened_and_cheaper_ones_are_better(run):
    folded = overview_of(run.events)
    known = status.document(run.picture, t=run.t)
    asked = [{"restart": 0.0}, {"stall": 0.0, "upload": 0.0}, {"interval": 7200.0}]
    was, own, faster, free, seldom = folded.document(known, asked=asked)["what_if"]
    assert own["goodput"] == pytest.approx(was["goodput"], abs=0.03)
    assert faster["waste"]["restart"] == 0.0
    assert free["goodput"] > was["goodput"]
    assert seldom["goodput"] < was["goodput"] / 2  # almost nothing is ever committed


def test_a_run_that_has_not_begun_can_be_shown():
    told = Overview().document(status.document(picture.Picture(), t=0.0))
    assert (told["wall_s"], told["goodput"], told["ettr"], told["what_if"], told["curve"]) == (0.0, 0.0, 0.0, [], None)


def test_time_that_passes_is_shown_and_not_kept(run):
    folded = overview_of(run.events)
    before = folded.account
    later = folded.document(status.document(run.picture, t=run.t + 500.0))
    assert folded.account == before
    assert later["wall_s"] == pytest.approx(before.wall_s + 500.0 + run.t - before.t)


def test_a_job_that_writes_much_is_cut_short():
    folded = Overview()
    for i in range(1000):
        folded.apply(
            ev.Interrupted(t=float(i), attempt=i, cause=f"cause {i}", detail="d" * 5000, message="m" * 99_999 + "\nend")
        )
        folded.apply(ev.SaveCommitted(t=float(i), attempt=i, step=i, tier=f"tier {i % 3}"))
    told = folded.document(status.document(picture.Picture(), t=1000.0))
    assert told["interruptions"][0]["message"].endswith("\nend")
    assert len(json.dumps(told)) < 150_000


def test_what_became_of_checkpoints_is_told():
    folded = overview_of(
        [
            ev.SaveRejected(t=1.0, step=1, tier="disk", why="NaN"),
            ev.CheckpointDeleted(t=2.0, step=1, tier="disk"),
            ev.Drilled(t=3.0, ok=True, step=7, tier="disk"),
            ev.Drilled(t=4.0, ok=False, step=8, tier="disk", problem="digest"),
            ev.RolledBack(t=5.0, to_step=7, source="guard", why="spikes"),
        ]
    )
    told = folded.document(status.document(picture.Picture(), t=6.0))
    disk = told["checkpoints"]["disk"]
    assert (disk["rejected"], disk["deleted"], disk["error"]) == (1, 1, "NaN")
    assert (told["drills"]["passed"], told["drills"]["failed"]) == (1, 1)
    assert told["drills"]["newest"]["problem"] == "digest"
    assert [(row["to_step"], row["why"]) for row in told["rollbacks"]] == [(7, "spikes")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied(ev.Event):
    kind: ClassVar[str] = "checkpoint_copied"
    step: int = 0
    tier: str = ""
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NotCopied(ev.Event):
    kind: ClassVar[str] = "copy_failed"
    tier: str = ""
    error: str = ""


def test_copies_on_further_tiers_are_counted():
    folded = overview_of(
        [Copied(t=1.0, step=5, tier="durable", bytes=7, seconds=3.0), NotCopied(t=2.0, tier="durable", error="403")]
    )
    told = folded.document(status.document(picture.Picture(), t=3.0))["checkpoints"]["durable"]
    assert (told["copied"], told["copy_failed"], told["error"], told["upload_s"]) == (1, 1, "403", 3.0)
    assert told["newest"]["step"] == 5


def test_a_thinned_series_keeps_its_ends():
    series = Series()
    for i in range(10_000):
        series.add({"x": i})
    xs = [point["x"] for point in series.points()]
    assert xs[0] == 0
    assert xs[-1] == 9999
    assert xs == sorted(set(xs))
    assert 50 < len(xs) <= 121


@settings(max_examples=60, deadline=None)
@given(st.lists(any_event(st.floats(0, 1e6)), max_size=30))
def test_whatever_happened_can_be_shown(happened):
    happened = [ev.DaemonStarted(t=0.0), *happened]
    now = picture.Picture()
    for event in happened:
        if not isinstance(event, ev.AttemptLaunched) or event.attempt is not None:
            now = picture.apply(now, event)
    known = status.document(now, t=1e6)
    json.dumps(overview_of(happened).document(known))
