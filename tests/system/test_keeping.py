"""What a person pins stays, whatever happens to whom; what is deleted is said; and a run goes back where it is told to."""

from __future__ import annotations

import contextlib
import io
import json
import os

import pytest

from ckptd.cli import main
from ckptd.core import events as ev
from ckptd_shim.contract import COMMITTED, parse_checkpoint_dirname

pytestmark = pytest.mark.system


def steps_kept(job):
    return sorted(parse_checkpoint_dirname(path.name)[0] for path in job.commits())


def command(job, *args):
    """A command on the run, in this process, which need not start; (status, what it printed, what it complained of)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*args, str(job.run_dir)])
    return status, out.getvalue(), err.getvalue()


def keep(job, *args):
    """The JSON that a command prints."""
    status, out, err = command(job, *args, "--json")
    assert status == 0, err
    return json.loads(out)


def refused(job, *args):
    """What a command that is refused says."""
    status, out, err = command(job, *args)
    assert (status, out) == (64, "")
    return err


def committed_after(job, step, more):
    """Waits until so many checkpoints of steps above `step` were committed, and what the rules do not keep is gone."""
    job.wait_until(
        lambda: len([e for e in job.of(ev.SaveCommitted) if e.step > step]) >= more, f"{more} commits after {step}"
    )
    return max(e.step for e in job.of(ev.SaveCommitted))


@pytest.fixture
def small(make_job):
    """A run without end that saves every 10th step, about once a second, and keeps four."""

    def start(*args, **sections):
        job = make_job(
            "--steps", "100000", "--pause", "0.1", *args, devices=1,
            checkpoint={"interval": {"steps": 10}, "tiers": [{"name": "disk", "path": "ckpt", "keep_last": 4}]},
            **sections,
        )  # fmt: skip
        job.start()
        return job

    return start


def test_a_pin_outlives_rules_restarts_and_daemons_until_it_is_taken_off(small):
    job = small("--pin", "42")
    first = job.wait_for(ev.SaveCommitted)
    assert keep(job, "pin", str(first.step), "--label", "best")["path"] == first.path
    said = refused(job, "pin", "99999999")
    assert "there is no checkpoint of step 99999999; committed are, newest first:" in said
    by_script = job.wait_for(ev.CheckpointPinned, lambda e: e.source == "shim.pin")
    assert (by_script.step, by_script.label) == (50, "by the script")
    last = committed_after(job, 50, 5)
    pinned = {first.step, 50}
    job.wait_until(lambda: len(set(steps_kept(job)) - pinned) == 4, "four besides the pinned ones are kept")

    job.process.kill()  # the daemon
    job.process.wait()
    job.start()
    last = committed_after(job, last, 5)
    assert pinned <= set(steps_kept(job))
    dry = keep(job, "gc", "--dry-run")
    assert {i["step"]: i["why"] for i in dry["items"]}.items() >= dict.fromkeys(pinned, "pinned").items()
    rows = keep(job, "checkpoints")
    assert {row["step"]: row["label"] for row in rows if row["pinned"]} == {first.step: "best", 50: "by the script"}
    assert [pin["label"] for pin in job.status()["pins"]] == ["best", "by the script"]
    assert keep(job, "unpin", "50")["path"] == by_script.path
    gone = job.wait_for(ev.CheckpointDeleted, lambda e: e.step == 50)
    assert (gone.path, gone.tier) == (by_script.path, "disk")
    assert "older than what the rules keep" in gone.why
    assert "step 50 is not pinned; pinned are: 10 (best)" in refused(job, "unpin", "50")

    # Without a daemon the same commands do it themselves.
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    assert first.step in steps_kept(job)
    partial = job.tier / "job" / "step_000000001.a0001"
    partial.mkdir()
    (partial / ".run").write_text(job.run_id)
    assert "is not committed" in refused(job, "pin", "1")
    keep(job, "unpin", str(first.step))
    assert {i["path"] for i in keep(job, "gc", "--dry-run")["items"] if i["goes"]} == {first.path, str(partial)}
    assert partial.exists()
    assert {i["path"] for i in keep(job, "gc")["items"] if i["gone"]} == {first.path, str(partial)}
    assert not partial.exists()
    assert first.step not in steps_kept(job)
    before = job.status()["goodput"]["wall_s"]
    newest = max(steps_kept(job))
    keep(job, "pin", str(newest))
    assert [pin["step"] for pin in job.status()["pins"]] == [newest]
    job.start()
    assert job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2).resume["step"] == newest
    assert job.status()["goodput"]["wall_s"] - before < 60, "the run's clock stood still meanwhile"
    job.ckptd("stop", str(job.run_dir), "--now")
    job.wait()


def test_a_run_goes_back_at_once_and_what_came_after_is_suspect(small, reference):
    job = small()
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= 30)
    target = job.of(ev.SaveCommitted)[-2]
    assert "there is no checkpoint of step 7" in refused(job, "rollback", "--to", "7")
    keep(job, "pin", str(target.step))
    answer = keep(job, "rollback", "--to", str(target.step), "--why", "the loss looks odd")
    assert answer["path"] == target.path
    back = job.wait_for(ev.RolledBack)
    assert (back.to_step, back.sequence, back.source) == (target.step, target.sequence, "ckptd rollback")
    launched = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert launched.resume["path"] == target.path
    interrupted = job.wait_for(ev.Interrupted)
    assert (interrupted.cause, interrupted.planned) == ("rollback", True)
    left = [e for e in job.of(ev.SaveCommitted) if e.attempt == 1 and e.sequence > target.sequence]
    again = job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    assert again.sequence > max(e.sequence for e in left)
    assert again.step == target.step + 10
    states = {row["path"]: row["state"] for row in keep(job, "checkpoints")}
    assert states[target.path] == "committed"
    assert {states[e.path] for e in left if e.path in states} == {"suspect"}
    assert os.path.exists(os.path.join(target.path, COMMITTED))
    assert "ROLLED BACK to step" in job.output()
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    assert job.status()["failures"] == 0
    story = keep(job, "report")
    assert [(r["to_step"], r["why"]) for r in story["rollbacks"]] == [(target.step, "the loss looks odd")]
    assert [a["resumed_step"] for a in story["attempts"]] == [None, target.step], "both branches are told of"

    # And without a daemon: the next one starts there.
    newest = max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 2)
    known = "is suspect: the run went back from it before" if os.path.exists(left[0].path) else "there is no checkpoint"
    assert known in refused(job, "rollback", "--to", str(left[0].step), "--path", left[0].path)
    keep(job, "rollback", "--to", str(target.step), "--path", target.path)
    job.start()
    third = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 3)
    assert third.resume["step"] == target.step < newest
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 3)
    job.ckptd("stop", str(job.run_dir), "--now")
    job.wait()
    steps = max(job.losses())
    expected = reference(steps, world=1)
    assert job.losses() == {step: expected[step] for step in job.losses()}, "both branches trained the same"
