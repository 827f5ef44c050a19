"""The local launcher: an agent in its own session, known by pid and start time, free of another run's marks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptd.launchers.local import NODE, LocalLauncher
from ckptd.node import processes
from ckptd_shim.contract import ENV_ATTEMPT, ENV_LAUNCH, ENV_RUN_ID


def launcher(directory):
    return LocalLauncher(
        run_dir=str(directory), run_id="mine", socket=str(directory / "ckptd.sock"), workdir=str(directory), devices=1
    )


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A launcher whose agent runs, and dials nobody."""
    # As where ckptd is started by a worker of another run.
    monkeypatch.setenv(ENV_RUN_ID, "another")
    monkeypatch.setenv(ENV_ATTEMPT, "3")
    monkeypatch.setenv(ENV_LAUNCH, "/somewhere/launch.json")
    local = launcher(tmp_path)
    local.start(NODE)
    yield local
    local.kill(NODE)
    local._child.wait()


def pid_of(directory):
    return int(json.loads((directory / f"agent-{NODE}.json").read_text())["pid"])


def test_it_has_a_session_and_marks_of_its_own(agent, tmp_path):
    pid = pid_of(tmp_path)
    assert processes.read_stat(pid).session == pid
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"{ENV_RUN_ID}=mine".encode() in environment
    assert not [v for v in environment if v.startswith((f"{ENV_ATTEMPT}=".encode(), f"{ENV_LAUNCH}=".encode()))]


def test_a_later_daemon_knows_it_by_its_record_and_may_end_it(agent, tmp_path):
    later = launcher(tmp_path)
    assert later.alive(NODE)
    later.kill(NODE)
    agent._child.wait()
    assert not later.alive(NODE)
    assert not agent.alive(NODE)
    assert "status -9" in agent.why_dead(NODE)
    assert later.why_dead(NODE).startswith("the agent that an earlier ckptd started is gone; its log is ")


@pytest.mark.parametrize("record", [b"", b"rubbish", b"{}", b'{"pid": 1, "start_time": "x"}'])
def test_a_record_that_says_nothing_is_nobody(tmp_path, record):
    (tmp_path / f"agent-{NODE}.json").write_bytes(record)
    assert not launcher(tmp_path).alive(NODE)


def test_a_pid_that_was_given_out_again_is_nobody(tmp_path):
    (tmp_path / f"agent-{NODE}.json").write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))
    local = launcher(tmp_path)
    assert not local.alive(NODE)
    local.kill(NODE)  # which must not be this process
