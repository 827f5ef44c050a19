"""ckptd under a service manager: it says when it is ready and that it lives, and can be replaced under a live run."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import pytest

from ckptd.core import events as ev

pytestmark = pytest.mark.system


class Manager:
    """The end of the socket that a service manager holds."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(60.0)
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "2000000"}

    def wait_for(self, beginning):
        while not (word := self.socket.recv(4096).decode()).startswith(beginning):
            pass
        return word

    def hears(self, beginning, within_s):
        self.socket.settimeout(within_s)
        try:
            with contextlib.suppress(TimeoutError):
                return self.wait_for(beginning)
        finally:
            self.socket.settimeout(60.0)

    def drain(self):
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.recv(4096)
        self.socket.settimeout(60.0)


@pytest.fixture
def manager(tmp_path):
    found = Manager(tmp_path / "notify")
    yield found
    found.socket.close()


def test_a_daemon_is_replaced_under_a_run_that_does_not_notice(make_job, manager):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1, checkpoint={"interval": {"steps": 1000}})
    job.start(env=manager.environment)
    manager.wait_for("READY=1")
    manager.wait_for("WATCHDOG=1")
    job.wait_for(ev.FirstStep)
    assert "training | step" in manager.wait_for("STATUS=training")
    for pid in (job.agent_pid(), *job.workers().values()):
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes(), "it could speak in the daemon's name"

    both = job.ckptd("stop", str(job.run_dir), "--now", "--detach")
    assert both.returncode == 64
    done = job.ckptd("stop", str(job.run_dir), "--detach")
    assert (done.returncode, done.stderr) == (0, "")
    manager.wait_for("STOPPING=1")
    assert job.wait() == 75, job.output()
    workers, agent, trained = job.workers(), job.agent_pid(), max(job.losses())
    job.wait_until(lambda: max(job.losses()) > trained + 5, "training goes on without a daemon")

    job.start(env=manager.environment)  # at once: what `stop --detach` waits for includes the lock
    manager.wait_for("READY=1")
    job.wait_for(ev.AgentConnected, lambda e: e.running == 1)
    assert (job.workers(), job.agent_pid()) == (workers, agent)
    assert job.of(ev.Requested) == [], "nobody asked for a save or a stop"
    assert len(job.of(ev.AttemptLaunched)) == 1

    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()
    manager.wait_for("STOPPING=1")
    assert job.left_over() == []
    refused = job.ckptd("stop", str(job.run_dir), "--detach")
    assert "it is over already" in refused.stdout


def test_a_daemon_that_stands_still_feeds_no_watchdog(make_job, manager):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1)
    job.start(env=manager.environment)
    job.wait_for(ev.FirstStep)
    manager.wait_for("WATCHDOG=1")
    job.process.send_signal(signal.SIGSTOP)
    job.wait_until(
        lambda: Path(f"/proc/{job.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stands"
    )
    manager.drain()
    try:
        assert manager.hears("WATCHDOG=1", within_s=3.0) is None
    finally:
        job.process.send_signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()


def test_a_run_that_is_over_is_a_service_that_succeeds(make_job, manager):
    """Ended before it was ready it would have failed, in systemd's eyes: at each boot of the machine."""
    job = make_job("--steps", "3", devices=1)
    assert job.run() == 0, job.output()
    job.start(env=manager.environment)
    assert job.wait() == 0
    manager.wait_for("READY=1")
