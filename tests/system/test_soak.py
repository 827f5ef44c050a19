"""Fault after fault, at random: nothing that was committed is lost, and the losses are those of a run without faults.

`make soak` runs it for as long as CKPTD_SOAK_S says (seconds); by default for as long as CI can spare. CKPTD_SOAK_SEED
repeats a run's choice of faults.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from ckptd.core import events as ev
from system.harness import reference_losses

DURATION_S = float(os.environ.get("CKPTD_SOAK_S", "40"))
SEED = int(os.environ.get("CKPTD_SOAK_SEED", "11"))
ORDERED = ("raise", "exit0", "exit3", "kill", "segv", "hang", "freeze")
INFLICTED = ("kill worker", "kill all", "kill agent", "kill daemon", "save", "device")


@pytest.mark.timeout(DURATION_S * 2 + 400)
def test_fault_after_fault(make_job, tmp_path):
    chance = random.Random(SEED)
    orders = tmp_path / "orders"
    orders.mkdir()
    sick = tmp_path / "sick"
    sick.touch()
    job = make_job(
        "--steps", "1000000", "--pause", "0.01", "--dropout", "0", "--orders", str(orders),
        checkpoint={"interval": {"steps": 10}},
        restart={"max_without_progress": 10_000, "grow": "at_checkpoint"},
        hang={"floor": "3s", "factor": 10, "startup": "30s"},
        health={"interval": "1s", "command": ["cat", str(sick)]},
    )  # fmt: skip
    job.start()
    end = time.monotonic() + DURATION_S
    faults: list[str] = []
    attempt = 0
    while time.monotonic() < end:
        job.wait_for(ev.FirstStep, lambda e, seen=attempt: (e.attempt or 0) > seen or not faults)
        attempt = max(e.attempt for e in job.of(ev.AttemptLaunched))
        job.wait_for(ev.SaveCommitted, lambda e, now=attempt: e.attempt >= now)
        time.sleep(chance.uniform(0.0, 0.4))
        kind = chance.choice(ORDERED + INFLICTED)
        workers = job.workers()
        if kind == "exit0" and len(workers) == 1:
            kind = "exit3"  # when all leave with 0 there is nothing to go on with: the run has ended early
        faults.append(kind)
        rank = chance.choice(sorted(workers))
        if kind in ORDERED:
            (orders / f"new{rank}").write_text(kind)
            (orders / f"new{rank}").rename(orders / f"rank{rank}")
        elif kind == "kill worker":
            os.kill(workers[rank], signal.SIGKILL)
        elif kind == "kill all":
            for pid in workers.values():
                os.kill(pid, signal.SIGKILL)
        elif kind == "kill agent":
            os.kill(job.agent_pid(), signal.SIGKILL)
        elif kind == "kill daemon":
            job.process.kill()
            job.process.wait()
            job.start()
            attempt -= 1  # training goes on as if nothing had happened
        elif kind == "save":
            assert job.ckptd("save", str(job.run_dir)).returncode == 0
            attempt -= 1
        elif kind == "device":
            sick.write_text("" if sick.read_text() else "1\n")
    job.wait_for(ev.FirstStep, lambda e: e.attempt > attempt)
    assert job.ckptd("stop", str(job.run_dir), timeout=120).returncode == 0, job.output()
    assert job.wait() == 75, job.output()
    check(job, tmp_path, faults)


def check(job, tmp_path, faults):
    print(f"{len(faults)} faults: {faults}")
    happened = job.events()
    committed = 0
    for event in happened:
        if isinstance(event, ev.SaveCommitted):
            committed = max(committed, event.step)
        if isinstance(event, ev.AttemptLaunched):
            # A commit of the moments in which no agent watched is news to the ledger, but not lost.
            resumed = (event.resume or {}).get("step", 0)
            assert resumed >= committed, f"attempt {event.attempt} lost a commit"
            committed = resumed
    status = job.status()
    account = status["goodput"]
    assert sum(account["seconds_by_phase"].values()) == pytest.approx(account["wall_s"])
    assert min(account["seconds_by_phase"].values()) >= 0
    losses = job.losses()
    steps = max(losses)
    assert sorted(losses) == list(range(1, steps + 1)), "a step was never trained"
    expected = reference_losses(tmp_path / "reference", "--steps", str(steps), "--pause", "0", "--dropout", "0")
    worlds = {e.world_size for e in happened if isinstance(e, ev.AttemptLaunched)}
    if len(worlds) == 1:
        assert losses == expected
    else:  # another number of workers adds up in another order
        for step in range(1, steps + 1):
            ours, theirs = float.fromhex(losses[step]), float.fromhex(expected[step])
            assert ours == pytest.approx(theirs, rel=0.05, abs=1e-4), f"step {step}"
    assert not job.left_over()
