"""Scripts that fail: the cause is named, one failure is one restart, and a loop of them ends."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest

from ckptd.core import events as ev
from ckptd.node import processes
from ckptd.node.processes import Process
from system.checks import assert_same_losses, assert_told_once

pytestmark = pytest.mark.system


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_each_cause_is_named_and_survived(make_job, reference):
    """One run, five deaths of five kinds, each of one rank while its peer waits for it in a collective."""
    job = make_job(
        "--steps", "60", "--fault", "segv:12:1:1", "--fault", "bus:18:0:2", "--fault", "exit3:24:1:3",
        "--fault", "exit0:33:1:4", "--fault", "raise:41:0:5", restart={"max_without_progress": 10},
    )  # fmt: skip
    assert job.run() == 0, job.output()
    found = [(e.cause, e.rank, e.planned) for e in job.of(ev.Interrupted)]
    assert found == [
        ("signal", 1, False), ("signal", 0, False), ("exit_status", 1, False), ("early_exit", 1, False),
        ("exception", 0, False),
    ], job.story()  # fmt: skip
    segv, bus, three, early, raised = (e.detail for e in job.of(ev.Interrupted))
    assert "SIGSEGV" in segv
    assert "SIGBUS" in bus
    assert "/dev/shm" in bus
    assert three.endswith("ended with status 3")
    assert "ended early with status 0" in early
    assert "RuntimeError: planted at step 41" in raised
    for detail in (segv, bus, three, early, raised):
        assert detail in job.output()
    assert [(e.outcome, e.exit_status) for e in job.of(ev.RunEnded)] == [("finished", 0)]
    assert_told_once(job)
    assert_same_losses(job, reference(60))


def test_a_script_that_cannot_even_be_imported(make_job, tmp_path):
    job = make_job(script=script(tmp_path, "import a_module_that_nobody_has\n"))
    assert job.run() == 1
    assert len(job.of(ev.AttemptLaunched)) == 3
    assert "3 attempts without a new committed checkpoint" in job.output()
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in job.output()
    assert {(e.cause, e.severity) for e in job.of(ev.Interrupted)} == {("exception", "code")}


def test_a_script_that_is_gone_when_it_is_launched_again(make_job, tmp_path):
    job = make_job(script=script(tmp_path, """
        import os, sys
        if os.path.exists(sys.argv[0]):
            os.unlink(sys.argv[0])
        sys.exit("the first attempt took the script away")
    """), devices=1)  # fmt: skip
    assert job.run() == 1
    first, second = job.of(ev.Interrupted)
    assert (first.cause, first.detail) == (
        "exit_status", "rank 0 ended with status 1: the first attempt took the script away")  # fmt: skip
    assert (second.cause, second.severity) == ("script_not_found", "code")
    assert "no restart cures this" in job.of(ev.RunEnded)[0].detail
    assert "can't open file" in job.output()
    assert "No such file or directory" in job.output()


def test_a_script_that_fails_before_its_first_step(make_job):
    job = make_job("--fault", "raise:0")
    assert job.run() == 1
    assert len(job.of(ev.AttemptLaunched)) == 3
    assert "RuntimeError: planted at step 0" in job.output()
    assert [e.step for e in job.of(ev.Interrupted)] == [0, 0, 0]
    assert job.commits() == []


def test_a_loop_of_crashes_ends_though_the_daemon_is_killed_in_it(make_job):
    """It dies in step 7, before the first save at 10: every attempt counts, whichever daemon saw it."""
    job = make_job("--fault", "raise:7")
    job.start()
    job.wait_for(ev.Interrupted, lambda e: e.attempt == 1)
    job.process.kill()
    job.process.wait()
    assert job.run() == 1
    assert len(job.of(ev.AttemptLaunched)) == 3, job.story()
    assert len(job.of(ev.DaemonStarted)) == 2
    output = job.output()
    assert "3 attempts without a new committed checkpoint" in output
    # Rank 1 may or may not have completed step 7 when rank 0 died in it.
    assert re.search(r"the same failure [23] times at step [67]\b", output)
    assert "RuntimeError: planted at step 7" in output.partition("the last error, rank 0")[2]
    status = job.status()
    assert (status["outcome"]["outcome"], status["failures"]) == ("failed", 3)
    assert_told_once(job)


def test_a_rank_that_runs_out_of_batches_each_time_ends_the_run(make_job):
    """Rank 1 leaves with 0 at step 13 each time. The commit at 10 is progress, once, even if nobody lived to tell of it."""
    job = make_job("--pause", "0.05", "--fault", "exit0:13:1", restart={"max_without_progress": 2})
    assert job.run() == 1
    assert {(e.cause, e.rank) for e in job.of(ev.Interrupted)} == {("early_exit", 1)}
    assert [e.world_size for e in job.of(ev.AttemptLaunched)] == [2, 2, 2], "its device is not to blame"
    assert re.search(r"the same failure [23] times at step 1[23]\b", job.of(ev.RunEnded)[0].detail)


def test_loader_workers_of_a_dead_rank_are_ended_before_the_next_attempt(make_job, tmp_path):
    job = make_job(script=script(tmp_path, """
        import os, time
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset
        from ckptd_shim import TrainerShim

        class Stuck(Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                if os.environ["CKPTD_ATTEMPT"] == "1":
                    open(f"{os.environ['PIDS']}/{os.getpid()}", "w").close()
                    time.sleep(3600)
                return torch.zeros(1)

        dist.init_process_group("gloo")
        shim = TrainerShim(model=torch.nn.Linear(1, 1))
        shim.resume()
        for batch in DataLoader(Stuck(), batch_size=8, num_workers=2):
            dist.all_reduce(batch)
            shim.step(samples=8)
        shim.close()
    """), env={"PIDS": str(tmp_path)}, batch=None)  # fmt: skip
    job.start()
    job.wait_until(lambda: len(loaders(tmp_path)) == 4, "two workers of each of two ranks sleep in __getitem__")
    stuck = {pid: processes.identify(pid) for pid in loaders(tmp_path)}
    os.kill(job.workers()[1], signal.SIGKILL)
    job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2)
    assert not [p for p in stuck.values() if isinstance(p, Process) and processes.alive(p)], "launched beside them"
    assert job.wait() == 0, job.output()
    ended = next(e for e in job.of(ev.AttemptEnded) if e.attempt == 1)
    assert {p["pid"] for p in ended.leftovers} == set(stuck)
    assert "attempt 1: 4 left-over processes were ended" in job.output()


def loaders(directory):
    return [int(p.name) for p in directory.iterdir() if p.name.isdecimal()]
