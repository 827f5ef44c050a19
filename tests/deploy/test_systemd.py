"""The unit file: by systemd's own eyes, and, where it can be had, under a real systemd."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.core import events as ev
from ckptd.errors import ExitStatus

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "ckptd@.service"
SYSTEMD = "/lib/systemd/systemd"
HIERARCHIES = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")]


def installed(directory, job_path=None):
    """A command `ckptd` and the unit that runs it, as after an installation that chose other paths."""
    command = directory / "ckptd"
    paths = os.pathsep.join(p for p in sys.path if p.endswith(("supervisor", "trainer_shim")))
    command.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -m ckptd "$@"\n')
    command.chmod(0o755)
    etc = directory / "etc"
    (etc / "job").mkdir(parents=True)
    if job_path is not None:
        (etc / "job" / "job.yaml").symlink_to(job_path)
    text = UNIT.read_text().replace("/opt/ckptd/bin/ckptd", str(command)).replace("/etc/ckptd", str(etc))
    (directory / "units").mkdir()
    return directory / "units" / "ckptd@.service", text


def values(key):
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_what_systemd_makes_of_each_exit_status():
    success = {int(status) for status in values("SuccessExitStatus")[0].split()} | {0}
    final = {int(status) for status in values("RestartPreventExitStatus")[0].split()}
    assert success == {ExitStatus.FINISHED, ExitStatus.REQUEUE, ExitStatus.INTERRUPTED}
    assert set(ExitStatus) - success - final == {ExitStatus.BUG}, "and this one is started again"
    assert values("Restart") == ["on-failure"]


def test_training_outlives_the_daemon_and_keeps_its_devices():
    assert values("Type") == ["notify"]
    assert values("KillMode") == ["process"]
    assert values("OOMPolicy") == ["continue"]
    assert values("WatchdogSec")
    for hides in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "PrivateTmp", "NoNewPrivileges"):
        assert values(hides) == [], hides


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_to_say(tmp_path):
    unit, text = installed(tmp_path)
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit.parent / "ckptd@job.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Systemd:
    """A systemd of our own: a user's instance, in a mount namespace where it believes that the machine booted it.

    It takes every process of the cgroup that it starts in for its own, so that has to be one that holds nothing else.
    """

    def __init__(self, directory):
        self.directory = directory
        self.runtime = directory / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.log_path = directory / "systemd.log"
        name = f"ckptd-test-{os.getpid()}"
        self.groups = [root / name for root in HIERARCHIES if (root / "cgroup.procs").exists()]
        script = f"""
            for group in {" ".join(map(str, self.groups))}; do mkdir $group; echo $$ > $group/cgroup.procs; done
            grep -qE '^0::/{name}$|:name=systemd:/{name}$' /proc/self/cgroup
            if grep -E '^0::|:name=systemd:' /proc/self/cgroup | grep -v ':/{name}$'; then exit 1; fi
            mount -t tmpfs tmpfs /run
            mkdir -p /run/systemd/system
            exec {SYSTEMD} --user --log-target=console
        """
        self.environment = {
            **os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_DATA_HOME": str(directory / "data"), "XDG_STATE_HOME": str(directory / "state"),
        }  # fmt: skip
        self.environment.pop("DBUS_SESSION_BUS_ADDRESS", None)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ctl(self, *args):
        return subprocess.run(
            ["systemctl", "--user", *args],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def lives(self):
        """Whether it came up, within a while."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.ctl("list-units").returncode == 0:
                return True
            time.sleep(0.1)
        return False

    def unit(self, name):
        shown = self.ctl("show", "ckptd@job.service")
        return dict(line.partition("=")[::2] for line in shown.stdout.splitlines())[name]

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGRTMIN + 24)  # leave at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
        self.process.wait()
        for root in self.groups:
            for group in sorted((path for path in (root, *root.rglob("*")) if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    for pid in (group / "cgroup.procs").read_text().split():  # what the job's own end will find
                        (root.parent / "cgroup.procs").write_text(pid)
                    group.rmdir()


@pytest.fixture
def systemd(tmp_path):
    if os.geteuid() != 0 or not os.path.exists(SYSTEMD) or shutil.which("unshare") is None:
        pytest.skip("a systemd of our own takes root, systemd and unshare")
    if os.path.exists("/run/systemd/system"):
        pytest.skip("this machine has its own systemd, which owns the cgroups")
    found = Systemd(tmp_path)
    try:
        if not found.lives():
            pytest.skip(f"no systemd comes up here: {found.log_path.read_text()[-500:]}")
        yield found
    finally:
        found.close()


@pytest.mark.system
def test_a_restart_leaves_training_alone_and_a_stop_saves(make_job, systemd, tmp_path):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1, checkpoint={"interval": {"steps": 100000}})
    unit, text = installed(tmp_path, job.path)
    # What only the system's own instance can do.
    text = re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("systemctl list-jobs", "systemctl --user list-jobs").replace("XDG_RUNTIME_DIR=%t/ckptd/%i", "")
    text = text.replace("RestartSec=5s", "RestartSec=100ms")
    unit.write_text(text)
    assert systemd.ctl("link", str(unit)).returncode == 0
    started = systemd.ctl("start", "ckptd@job.service")
    assert started.returncode == 0, started.stderr + systemd.log_path.read_text()
    assert systemd.unit("ActiveState") == "active"
    job.wait_for(ev.FirstStep)
    workers, agent = job.workers(), job.agent_pid()

    def adopted(times):
        job.wait_until(lambda: len(job.of(ev.AgentConnected)) == times + 1, "the next daemon has taken over")
        assert job.of(ev.AgentConnected)[-1].running == 1
        assert (job.workers(), job.agent_pid()) == (workers, agent)
        assert job.of(ev.Requested) == [], "nobody asked for a save or a stop"

    restarted = systemd.ctl("restart", "ckptd@job.service")
    assert restarted.returncode == 0, restarted.stderr
    adopted(1)
    systemd.ctl("kill", "--kill-whom=main", "--signal=KILL", "ckptd@job.service")
    adopted(2)
    assert systemd.unit("NRestarts") == "1"

    stopped = systemd.ctl("stop", "ckptd@job.service")
    assert stopped.returncode == 0, stopped.stderr
    assert (systemd.unit("ActiveState"), systemd.unit("Result")) == ("inactive", "success")
    assert job.left_over() == []
    assert [e.source for e in job.of(ev.Requested)] == ["SIGTERM"]
    assert job.of(ev.SaveCommitted)[-1].step == max(job.losses())
