"""`ckptd drill` on real runs: a whole checkpoint restores, a damaged or a worse one is found, and training goes on beside."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from ckptd.core import events as ev
from system.harness import Job

EVALUATING = """
import os, sys, torch
from ckptd_shim import TrainerShim

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 4); y = x.sum(1, keepdim=True)
shim = TrainerShim(model=model, optimizer=optimizer)
shim.resume()

def validate():
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x) * SCALE, y).item()

SCALE = float(os.environ.get("SCALE", "1"))
if shim.drill:
    assert os.environ["CKPTD_DRILL"] == "1"
    shim.evaluated(validate())
while shim.global_step < 30 and not shim.stopping:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if shim.global_step == 29:
        shim.evaluated(validate())
    shim.step(loss=loss)
shim.close()
"""


def drill(job: Job, *args: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, object], str]:
    old = dict(os.environ)
    os.environ.update(env or {})
    try:
        done = job.ckptd("drill", str(job.run_dir), "--json", *args, timeout=150)
    finally:
        os.environ.clear()
        os.environ.update(old)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.timeout(300)
def test_a_script_with_an_evaluation_is_held_to_it(make_job, tmp_path):
    script = tmp_path / "evaluating.py"
    script.write_text(EVALUATING)
    job = make_job(script=script, devices=1, batch={"micro": 12}, drill={"tolerance": 0.01})
    assert job.run() == 0
    before = files(job.tier)

    status, found, errors = drill(job)
    assert status == 0, (found, errors)
    assert (found["ok"], found["step"], found["tier"], found["compared"]) == (True, 30, "disk", "validation")
    marker = json.loads((Path(str(found["path"])) / "COMMITTED").read_text())
    assert marker["validation_step"] == 29
    assert found["expected"] == marker["validation_loss"]
    assert found["loss"] < found["expected"] * 1.01

    # The same weights, judged by a script that makes worse of them.
    status, found, _ = drill(job, env={"SCALE": "1.5"})
    assert (status, found["ok"]) == (1, False)
    assert "was saved with it (validation" in str(found["problem"])

    # A flipped bit in the newest is what a drill is for; it does not take an older one instead.
    shard = next(p for p in Path(str(found["path"])).iterdir() if p.name.endswith(".distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    status, found, _ = drill(job)
    assert (status, found["ok"], found["step"]) == (1, False, 30)
    assert "its bytes have changed" in str(found["problem"])
    shard.write_bytes(whole)

    assert files(job.tier) == before  # no drill wrote anything there
    drilled = job.of(ev.Drilled)
    assert [event.ok for event in drilled] == [True, False, False]
    state = job.status()
    assert (state["drill"]["ok"], state["drill"]["good_at"]) == (False, {"disk": drilled[0].at})
    assert state["state"] == "ended"  # the end of the run is still its end


@pytest.mark.timeout(300)
def test_a_script_that_knows_nothing_of_drills_is_tried_on_schedule_while_it_trains(make_job):
    job = make_job(
        "--steps", "100000", "--pause", "0.05", drill={"every": "1s"}, checkpoint={"interval": {"steps": 10}}
    )
    job.start()
    drilled = job.wait_for(ev.Drilled, timeout=150)
    assert (drilled.ok, drilled.source, drilled.compared) == (True, "schedule", "training"), drilled.problem
    assert drilled.step % 10 == 0
    first = drilled.step
    job.wait_for(ev.SaveCommitted, lambda e: e.step > first)  # training went on
    assert len(job.of(ev.AttemptLaunched)) == 1
    done = job.ckptd("drill", str(job.run_dir), timeout=150)  # by hand beside it
    assert done.returncode == 0, done.stderr
    assert "restores in" in done.stdout
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75


def test_nothing_to_try_and_no_such_tier_are_said(make_job):
    job = make_job("--steps", "5", devices=1)
    assert job.run() == 0
    done = job.ckptd("drill", str(job.run_dir), "--tier", "tape")
    assert done.returncode == 64
    assert "no tier is called 'tape'; there are: disk" in done.stderr
    done = job.ckptd("drill", str(job.run_dir), "--workers", "5")
    assert done.returncode == 64
    for path in job.tier.rglob("COMMITTED"):
        path.unlink()
    status, found, _ = drill(job)
    assert (status, found["ok"], found["step"]) == (1, False, None)
    assert "holds no committed checkpoint" in str(found["problem"])
    with sqlite3.connect(f"file:{job.run_dir}/ledger.db?mode=ro", uri=True) as ledger:
        assert ledger.execute("select count(*) from events where kind = 'drilled'").fetchone() == (1,)
