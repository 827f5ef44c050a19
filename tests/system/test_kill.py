"""A worker is killed: training goes on from the newest commit as if nothing had happened."""

from __future__ import annotations

import os
import signal

from ckptd.core import events as ev
from system.harness import reference_losses


def test_a_killed_worker_costs_nothing_but_time(make_job, tmp_path):
    job = make_job("--steps", "60")
    job.start()
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= 20)
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait() == 0, job.output()
    interrupted = job.of(ev.Interrupted)
    assert [(e.cause, e.severity, e.rank, e.planned) for e in interrupted] == [("signal", "process", 1, False)]
    newest = max(e.step for e in job.of(ev.SaveCommitted) if e.attempt == 1)
    assert job.of(ev.AttemptLaunched)[1].resume["step"] == newest
    assert job.losses() == reference_losses(tmp_path / "reference", "--steps", "60", "--pause", "0")
