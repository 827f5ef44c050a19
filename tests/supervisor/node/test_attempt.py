"""A stop that comes while workers are being launched: whatever the order, they end, and that is told once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from ckptd.node import attempt as attempt_module
from ckptd.node import processes
from ckptd.node.attempt import Attempt
from ckptd_shim.contract import ENV_ATTEMPT, ENV_RUN_ID, Phase, Pulse
from ckptd_shim.launch import STACKS_SIGNAL


class Stage:
    """An attempt, what it told, and real workers."""

    def __init__(self, directory):
        self.told = []
        self.released = 0
        self.workers = []
        self.run_id = uuid.uuid4().hex
        self.attempt = Attempt(
            run_id=self.run_id, number=1, node="local", directory=str(directory), ranks=[0, 1], emit=self._emit,
            release=self._release, stop_grace_s=0.3,
        )  # fmt: skip

    def _emit(self, kind, **data):
        self.told.append((kind, data))

    def _release(self):
        self.released += 1

    def kinds(self):
        return [kind for kind, _ in self.told]

    def launch(self, code="import time; time.sleep(600)"):
        environment = {**os.environ, ENV_RUN_ID: self.run_id, ENV_ATTEMPT: "1"}
        self.workers = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) for _ in range(2)
        ]
        return dict(enumerate(w.pid for w in self.workers)), dict(enumerate(os.pidfd_open(w.pid) for w in self.workers))

    def started(self, *args, **options):
        pids, fds = self.launch(*args, **options)
        self.attempt.started(pids, fds, time.monotonic())

    async def ended(self):
        await asyncio.wait_for(self.attempt.ended.wait(), 20)
        await asyncio.sleep(0)
        assert processes.members(self.run_id, 1, []) == []
        assert self.kinds().count("attempt_ended") == 1
        return dict(self.told)["attempt_ended"]


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    for worker in stage.workers:
        worker.kill()
        worker.wait()


def test_before_the_launch_nothing_is_launched(stage):
    async def scene():
        stage.attempt.stop(grace=True)
        assert not stage.attempt.claim()
        await stage.ended()

    asyncio.run(scene())
    assert stage.kinds() == ["attempt_ended"]


def test_during_the_launch_the_workers_are_ended_as_soon_as_they_exist(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.attempt.stop(grace=True)
        stage.attempt.stop(grace=False)
        await asyncio.sleep(0.05)
        assert stage.kinds() == [], "nothing can have ended that may just be beginning"
        stage.started()
        ended = await stage.ended()
        assert [e["exitcode"] for e in ended["exits"]] == [-signal.SIGTERM] * 2

    asyncio.run(scene())
    assert stage.kinds() == ["workers_started", "attempt_ended"]
    assert stage.released == 1


def test_during_a_launch_that_fails(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.attempt.stop(grace=True)
        stage.launch()  # some of them came to be, and nobody was told their pids
        stage.attempt.launch_failed("no room")
        await stage.ended()

    asyncio.run(scene())
    assert stage.kinds() == ["failure_detected", "attempt_ended"]


def test_after_it_and_twice(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.started("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
        await asyncio.sleep(0.2)
        stage.attempt.stop(grace=True)
        stage.attempt.stop(grace=True)
        stage.attempt.launch_failed("elastic says so, too late")
        await stage.ended()

    asyncio.run(scene())
    assert stage.kinds() == ["workers_started", "attempt_ended"]


def test_in_the_moment_in_which_all_have_finished(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.started("pass")
        for worker in stage.workers:
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  the loop must not look before
        while len(stage.attempt.exits) < 2:
            await asyncio.sleep(0)
        stage.attempt.stop(grace=True)
        await stage.ended()

    asyncio.run(scene())
    assert stage.kinds() == ["workers_started", "workers_finished", "attempt_ended"]


def test_asking_for_stacks_kills_nobody_whose_interpreter_is_about_to_end(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.started()  # without faulthandler, as after the interpreter's finalisation
        for rank, worker in enumerate(stage.workers):
            stage.attempt.pulses[rank] = Pulse(
                pid=worker.pid, phase=Phase.END, step=1, samples=1, beat=0.0, loss=None, step_s=None
            )
        stage.attempt.stop(grace=False, stacks=True)
        ended = await stage.ended()
        assert [(e["exitcode"], e["killed_by_us"]) for e in ended["exits"]] == [(-signal.SIGKILL, True)] * 2

    asyncio.run(scene())


def test_one_that_the_question_for_stacks_ended_was_ended_by_us(stage):
    async def scene():
        assert stage.attempt.claim()
        stage.started()
        stage.attempt._wants_stacks = stage.attempt._stopping = True  # between the look at its handlers and the signal
        stage.workers[0].send_signal(STACKS_SIGNAL)
        async with asyncio.timeout(20):
            while 0 not in stage.attempt.exits:
                await asyncio.sleep(0.01)
        exit_ = stage.attempt.exits[0]
        assert (exit_.exitcode, exit_.killed_by_us) == (-STACKS_SIGNAL, True)
        await stage.attempt._end(grace=0.0)

    asyncio.run(scene())


def pulse(step, step_s=0.1):
    return Pulse(pid=1, phase=Phase.STEP, step=step, samples=0, beat=0.0, loss=None, step_s=step_s)


def test_who_is_out_of_touch_ends_a_lone_attempt_and_not_one_that_moves_with_other_nodes(tmp_path, monkeypatch):
    attempt = Stage(tmp_path).attempt
    found = {0: pulse(1)}
    monkeypatch.setattr(attempt_module, "read_pulses", lambda *_: dict(found))
    attempt.look()
    assert not attempt.fenced(19.9, 20.0)
    assert attempt.fenced(20.0, 20.0), "another may begin elsewhere"
    attempt.nodes = 2
    assert not attempt.fenced(1e6, 20.0), "all nodes would have been stopped first"
    attempt.moved_at -= 25.0
    attempt.look()
    assert attempt.fenced(20.0, 20.0), "it does not move: a node of it has ended"
    found[0] = pulse(2)
    attempt.look()
    assert not attempt.fenced(20.0, 20.0)
    found[0] = pulse(2, step_s=60.0)
    attempt.look()
    attempt.moved_at -= 100.0
    assert not attempt.fenced(20.0, 20.0), "its steps take a minute each"


def test_a_fenced_attempt_says_why_it_ended(tmp_path):
    async def scene():
        stage = Stage(tmp_path)
        stage.started()
        stage.attempt.fence("node local could not reach the daemon for 20 s")
        stage.attempt.fence("once more")
        ended = await stage.ended()
        failed = dict(stage.told)["failure_detected"]
        assert (failed["lost"], failed["detail"]) == ("node", "node local could not reach the daemon for 20 s")
        assert stage.kinds().count("failure_detected") == 1
        assert [e["killed_by_us"] for e in ended["exits"]] == [True, True]

    asyncio.run(scene())


def test_only_the_node_of_rank_zero_tells_what_rank_zero_wrote(tmp_path):
    (tmp_path / "report.jsonl").write_text('{"kind": "first_step", "mono": 1.0, "step": 1}\n')
    for ranks, told in (([0, 1], ["first_step"]), ([2, 3], [])):
        stage = Stage(tmp_path)
        Attempt(
            run_id="r",
            number=1,
            node="n",
            directory=str(tmp_path),
            ranks=ranks,
            emit=stage._emit,
            release=stage._release,
        ).look()
        assert stage.kinds() == told
