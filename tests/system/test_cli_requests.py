"""Somebody asks a run to save or to stop, with a signal or a command: it does, and loses nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from urllib.request import urlopen

import pytest

from ckptd.core import events as ev
from ckptd_shim.contract import COMMITTED, Marker

pytestmark = pytest.mark.system


def newest_commit(job):
    return max((Marker.read(path / COMMITTED) for path in job.commits()), key=lambda marker: marker.sequence)


def wait_for_training(job, after=0):
    """Training in an attempt above `after`; returns its number."""
    return job.wait_for(ev.FirstStep, lambda e: e.attempt > after).attempt


def stop_took(job):
    """Seconds from the last request until nothing was left, by the run's own clock."""
    return job.of(ev.AttemptEnded)[-1].t - job.of(ev.Requested)[-1].t


@contextlib.contextmanager
def terminal(job):
    """`ckptd run` in the foreground of a terminal of its own; yields the end of the person who sits there."""
    ours, theirs = os.openpty()

    def sit_down():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    try:
        job.process = subprocess.Popen(
            [sys.executable, "-m", "ckptd", "run", str(job.path)],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=sit_down,  # noqa: PLW1509
        )  # fmt: skip
    finally:
        os.close(theirs)
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            os.close(ours)


class TestSignalsToTheDaemon:
    def test_each_saves_stops_and_the_run_goes_on_to_the_very_same_end(self, make_job, reference):
        job = make_job("--steps", "60", "--pause", "0.04", devices=1, checkpoint={"interval": {"steps": 1000}})
        attempt = 0
        for number, status in (
            (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130),
        ):  # fmt: skip
            job.start()
            attempt = wait_for_training(job, after=attempt)
            job.process.send_signal(number)
            assert job.wait() == status, job.output()
            last = max(job.losses())
            assert newest_commit(job).step == last < 60, "the step at which all agreed, and none after it"
            assert job.left_over() == []
            ended = job.of(ev.RunEnded)[-1]
            assert (ended.outcome, ended.exit_status) == ("stopped", status)
        assert [e.source for e in job.of(ev.Requested)] == ["SIGTERM", "SIGUSR1", "SIGUSR2", "Ctrl-C"]
        assert job.run() == 0, job.output()
        assert job.losses() == reference(60, world=1)
        assert job.of(ev.Interrupted) == [], "a stop that was asked for is no failure"
        status = job.status()
        assert (status["state"], status["failures"]) == ("ended", 0)

        trained, happened = job.losses_path.read_text(), len(job.events())
        assert job.run() == 0
        assert "it does not train again" in job.output()
        assert job.losses_path.read_text() == trained
        assert len(job.events()) == happened


class TestTerminals:
    def test_ctrl_c_twice_does_not_wait_for_a_worker_that_stands_still(self, make_job):
        job = make_job("--steps", "100000", restart={"stop_grace": "1s"}, checkpoint={"interval": {"steps": 1000}})
        with terminal(job) as keyboard:
            wait_for_training(job)
            workers = job.workers()
            os.kill(workers[1], signal.SIGSTOP)
            os.write(keyboard, b"\x03")
            job.wait_for(ev.Requested, lambda e: e.request == "stop")
            assert job.status()["state"] == "draining"
            os.write(keyboard, b"\x03")
            assert job.wait(30) == 130
        assert 1.0 <= stop_took(job) < 1.0 + 2.0
        assert [(e.request, e.source) for e in job.of(ev.Requested)] == [
            ("stop", "Ctrl-C"),
            ("stop_now", "Ctrl-C again"),
        ]
        assert job.left_over() == []

    def test_one_that_is_held_and_then_closed_ends_nothing(self, make_job):
        job = make_job("--steps", "150", "--pause", "0.03", devices=1)
        with terminal(job) as keyboard:
            os.write(keyboard, b"\x13")  # Ctrl-S: whoever writes there now waits
            wait_for_training(job)
            before = job.status()["step"]
            job.wait_until(lambda: job.status()["step"] > before + 20, "training goes on")
        assert job.wait() == 0
        assert len(job.losses()) == 150
        assert job.of(ev.Requested) == []

    def test_a_hangup_ends_nothing(self, make_job):
        job = make_job("--steps", "40", devices=1)
        job.start()
        wait_for_training(job)
        job.process.send_signal(signal.SIGHUP)
        os.kill(job.agent_pid(), signal.SIGHUP)
        os.kill(job.agent_pid(), signal.SIGINT)
        assert job.wait() == 0
        assert job.of(ev.Requested) == []


class TestSignalsToOthers:
    def test_the_agent_and_a_worker_turn_them_into_a_save_and_a_stop(self, make_job, reference):
        job = make_job("--steps", "60", "--pause", "0.04", checkpoint={"interval": {"steps": 1000}})

        def to_the_agent():
            os.kill(job.agent_pid(), signal.SIGUSR1)

        def to_one_worker():
            os.kill(job.workers()[1], signal.SIGTERM)

        attempt = 0
        for send in (to_the_agent, to_one_worker):
            job.start()
            attempt = wait_for_training(job, after=attempt)
            send()
            assert job.wait() == 75, job.output()
            assert newest_commit(job).step == max(job.losses())
            assert job.left_over() == []
        assert [e.source for e in job.of(ev.Requested)] == ["SIGUSR1 to the agent of node local"]

        job.start()
        wait_for_training(job, after=attempt)
        job.process.kill()
        job.process.wait()
        os.kill(job.agent_pid(), signal.SIGTERM)  # nobody is there to decide but the agent itself
        job.wait_until(lambda: job.left_over() == [], "the agent saved, stopped and left")
        assert newest_commit(job).step == max(job.losses()) < 60

        assert job.run() == 0, job.output()
        assert job.losses() == reference(60)


class TestStop:
    def test_deaf_workers_cost_the_grace_and_little_more_and_the_pages_answer_meanwhile(self, make_job):
        job = make_job(
            "--steps", "100000", "--fault", "deaf:1:0", "--fault", "deaf:1:1", restart={"stop_grace": "2s"},
            checkpoint={"interval": {"steps": 1000}}, web={"listen": "127.0.0.1:0"},
        )  # fmt: skip
        job.start()
        wait_for_training(job)
        stopping = subprocess.Popen([sys.executable, "-m", "ckptd", "stop", str(job.run_dir), "--now", "--json"])
        try:
            job.wait_until(lambda: job.status()["state"] == "stopping", "stopping")
            with urlopen(f"http://{job.status()['daemon']['web']}/metrics", timeout=1) as answer:
                assert b'ckptd_run_state{state="stopping"} 1.0' in answer.read()
            assert job.wait(30) == 75
            assert stopping.wait(10) == 0
        finally:
            stopping.kill()
            stopping.wait()
        assert 2.0 <= stop_took(job) < 2.0 + 2.0
        assert [e["exitcode"] for e in job.of(ev.AttemptEnded)[0].exits] == [-signal.SIGKILL] * 2
        assert job.left_over() == []


class TestCommands:
    """Each on a run that does not exist, lives, lost its daemon, is over."""

    COMMANDS = ("status", "events", "checkpoints", "save", "stop")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_no_such_run(self, make_job, command, tmp_path):
        job = make_job()
        for name in (str(tmp_path / "nowhere"), str(job.path)):
            done = job.ckptd(command, name, "--json")
            assert done.returncode == 64
            assert done.stdout == ""
            assert done.stderr.startswith("ckptd: ")
            assert "Traceback" not in done.stderr

    def ask(self, job, *args, status=0):
        done = job.ckptd(*args, str(job.run_dir), "--json")
        assert done.returncode == status, (args, done)
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr

    def test_over_a_life(self, make_job):
        job = make_job("--steps", "100000", devices=1, checkpoint={"interval": {"steps": 100000}})
        job.start()
        wait_for_training(job)

        # It lives.
        assert self.ask(job, "checkpoints") == []
        before = self.ask(job, "status")
        saved = self.ask(job, "save")
        assert saved["accepted"]
        assert saved["committed"]["step"] >= before["step"]
        assert self.ask(job, "status")["last_committed"] == saved["committed"]
        found = self.ask(job, "checkpoints", "--verify")
        assert [(row["step"], row["state"]) for row in found] == [(saved["committed"]["step"], "verified")]
        assert {"daemon_started", "agent_connected", "save_committed"} <= {e["kind"] for e in self.ask(job, "events")}
        assert "ago" in job.ckptd("status", str(job.path)).stdout
        assert "request: save (ckptd save)" in job.ckptd("events", str(job.run_dir)).stdout
        assert str(saved["committed"]["step"]) in job.ckptd("checkpoints", str(job.run_dir)).stdout

        # It does not answer.
        job.process.send_signal(signal.SIGSTOP)
        impatient = (
            "import ckptd.link, sys; ckptd.link.ask_daemon.__kwdefaults__['timeout'] = 0.5\n"
            "from ckptd.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", impatient, "status", str(job.run_dir)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 69
        assert f"process {job.process.pid}" in done.stderr
        assert "does not answer" in done.stderr
        job.process.send_signal(signal.SIGCONT)

        # Its daemon is dead; what is left trains on.
        job.process.kill()
        job.process.wait()
        status = self.ask(job, "status")
        assert (status["daemon"], status["state"]) == (None, "training")
        assert "`ckptd run` takes the run up again" in job.ckptd("status", str(job.run_dir)).stdout
        assert len(self.ask(job, "checkpoints")) == 1
        assert self.ask(job, "events")
        for command in ("save", "stop"):
            assert "no daemon supervises job" in self.ask(job, command, status=69)

        # A daemon adopts it, and it is stopped.
        job.start()
        job.wait_until(lambda: job.status()["daemon"] is not None, "a daemon again")
        job.wait_until(lambda: job.status()["nodes"]["local"]["connected"], "its agent again")
        assert job.status()["attempt"] == 1
        stopped = self.ask(job, "stop")
        assert stopped["accepted"]
        assert (stopped["outcome"]["outcome"], stopped["outcome"]["exit_status"]) == ("stopped", 75)
        assert job.wait() == 75

        # It is over.
        status = self.ask(job, "status")
        assert (status["state"], status["daemon"], status["outcome"]["outcome"]) == ("ended", None, "stopped")
        assert status["last_committed"]["step"] == max(job.losses())
        again = self.ask(job, "stop")
        assert (again["accepted"], again["outcome"]["exit_status"]) == (False, 75)
        assert "over already" in job.ckptd("stop", str(job.run_dir)).stdout
        assert "the run is over" in self.ask(job, "save", status=64)
        assert len(self.ask(job, "checkpoints")) == 2
        assert self.ask(job, "events")[-1]["kind"] == "run_ended"
