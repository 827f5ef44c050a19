"""What `ckptd doctor` finds, on this machine and with jobs that are made to be wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ckptd import cli, doctor, jobspec
from ckptd.core import events
from ckptd.doctor import job, machine
from ckptd.hostfacts import Filesystem
from ckptd.ledger import Ledger
from ckptd.rundir import RunDir

GIB = 1 << 30


def make(directory: Path, **sections):
    document = {
        "version": 1, "name": "job", "command": ["train.py"], "run_dir": str(directory / "run"),
        "cluster": {"devices_per_node": 2}, "web": {"listen": None}, "restart": {"warm": False},
        "checkpoint": {"tiers": [{"name": "disk", "path": str(directory / "ckpt")}]}, **sections,
    }  # fmt: skip
    (directory / "train.py").write_text("")
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def found(path, check):
    return [finding for finding in doctor.examine(jobspec.load(path)) if finding.check == check]


def committed(path, size):
    run_dir = RunDir(jobspec.load(path).run_dir_path)
    run_dir.create()
    with Ledger.open(run_dir.ledger_path) as ledger:
        ledger.append(events.SaveCommitted(t=1.0, at=1.0, attempt=1, step=1, tier="disk", path="x", bytes=size))


def test_a_job_that_is_right_has_nothing_that_fails(tmp_path, capsys):
    path = make(tmp_path, web={"listen": "127.0.0.1:0"}, restart={"warm": True})
    committed(path, 1000)
    before = sorted(os.listdir(tmp_path))
    assert cli.main(["doctor", str(path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    levels = {f["check"]: f["level"] for f in findings}
    for check in ("python", "devices", "run directory", "port", "tier disk", "preload"):
        assert levels[check] == "ok", findings
    assert all(f["todo"] for f in findings if f["level"] != "ok")
    assert sorted(os.listdir(tmp_path)) == before, "what was made to look is gone again"
    assert "can be forked" in next(f["what"] for f in findings if f["check"] == "preload")


def test_a_module_that_starts_threads_is_no_good_to_fork_from(tmp_path):
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    path = make(tmp_path, restart={"warm": True, "preload": ["busy"]})
    (finding,) = found(path, "preload")
    assert finding.level == "warn"
    assert "busy starts threads" in finding.what


def test_what_fails_ends_with_status_1_and_says_what_to_do(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        path = make(tmp_path, web={"listen": listen}, checkpoint={"tiers": [{"name": "disk", "path": "/proc/nowhere"}]})
        assert cli.main(["doctor", str(path)]) == 1
    out = capsys.readouterr().out
    lines = {line.split(maxsplit=2)[1]: line for line in out.splitlines() if line.startswith("fail")}
    assert "/proc/nowhere" in lines["tier"]
    assert f"{listen} cannot be listened on: Address already in use" in lines["port"]
    assert "-> change web.listen" in out
    assert "\x1b" not in out, "no colour where it is not a terminal"


def test_a_job_that_is_wrong_is_not_looked_at(tmp_path, capsys):
    path = make(tmp_path, nonsense=1)
    assert cli.main(["doctor", str(path)]) == 78
    assert "nonsense" in capsys.readouterr().err


def test_devices(tmp_path):
    path = make(tmp_path, cluster={"devices_per_node": 3}, batch={"global": 8, "micro": 8})
    (finding,) = found(path, "devices")
    assert (finding.level, "1 of 3 devices will be idle" in finding.what) == ("warn", True)
    path = make(tmp_path, health={"command": ["echo", "1"]})
    assert [f.what for f in found(path, "devices")] == ["2 CPU workers", "unhealthy devices: [1]"]
    if not job.health._nvml_devices():
        (finding,) = found(make(tmp_path, cluster={}), "devices")
        assert finding.level == "fail"
        assert "no GPU was found" in finding.what


def test_an_old_or_absent_torch_fails():
    def levels(**versions):
        return [f.level for f in job._judge_python({"python": "3.11.7", "ckptd": job.__version__, **versions})]

    assert levels(torch="2.13.0+cpu") == ["ok"]
    assert levels(torch="2.10.0a0+git") == ["ok"]
    assert levels(torch="2.8.1") == ["fail"]
    assert levels(torch=None) == ["fail"]
    assert levels(torch="2.13.0", ckptd="0.0.1") == ["warn"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_a_run_directory_in_memory_and_checkpoints_only_there(tmp_path):
    path = make(
        tmp_path,
        run_dir="/dev/shm/ckptd-doctor-test",
        checkpoint={"tiers": [{"name": "m", "path": "/dev/shm/ckptd-t"}]},
    )
    (finding,) = found(path, "run directory")
    assert (finding.level, "in memory" in finding.what) == ("warn", True)
    assert any("a reboot takes every checkpoint" in f.what for f in found(path, "tier m"))
    assert not os.path.exists("/dev/shm/ckptd-doctor-test")
    assert not os.path.exists("/dev/shm/ckptd-t")


@pytest.mark.parametrize(
    ("size", "free", "total", "level"),
    [
        (None, 5 * GIB, 10 * GIB, "ok"),
        (1 * GIB, 5 * GIB, 10 * GIB, "ok"),
        (1 * GIB, GIB // 2, 10 * GIB, "fail"),  # the next save fails
        (3 * GIB, 4 * GIB, 10 * GIB, "fail"),  # three and one do not fit into all of it
        (1 * GIB, GIB + 1, 10 * GIB, "warn"),
    ],
)
def test_room_for_the_checkpoints_that_are_to_be_kept(size, free, total, level):
    place = Filesystem(kind="tmpfs", mountpoint="/m", size=total, free=free, free_files=None)
    (finding,) = job._room("tier m", "/m", place, jobspec.Tier(name="m", path="/m", keep_last=3), size)
    assert finding.level == level, finding


def test_the_size_of_a_checkpoint_is_known_from_the_newest(tmp_path):
    path = make(tmp_path)
    assert job.checkpoint_size(jobspec.load(path)) is None
    committed(path, 10)
    committed(path, 20)
    assert job.checkpoint_size(jobspec.load(path)) == 20
    (finding,) = found(path, "tier disk")
    assert "a checkpoint has 20 B" in finding.what


def test_a_network_file_system_is_no_place_for_the_ledger(tmp_path, monkeypatch):
    """None can be mounted here: what the kernel would say is put in its place."""
    monkeypatch.setattr(
        job.hostfacts, "filesystem",
        lambda _path: Filesystem(kind="nfs4", mountpoint="/home", size=GIB, free=GIB, free_files=None),
    )  # fmt: skip
    (finding,) = found(make(tmp_path), "run directory")
    assert (finding.level, "SQLite" in finding.what, "local disk" in finding.todo) == ("warn", True, True)


def test_low_limits_are_told_without_a_job(tmp_path):
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 256; exec {sys.executable} -m ckptd doctor --json"], cwd=tmp_path, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert any(f["check"] == "limits" and "256 open files" in f["what"] for f in findings)
    assert {"clock", "shared memory", "limits", "kernel log", "network", "python"} <= {f["check"] for f in findings}


def test_a_check_that_breaks_is_told_and_the_others_are_made(tmp_path, monkeypatch):
    def broken():
        raise ZeroDivisionError("oh")
        yield

    monkeypatch.setattr(machine, "clock", broken)
    findings = list(doctor.examine(jobspec.load(make(tmp_path))))
    assert [f.what for f in findings if f.check == "clock"] == ["cannot be looked at: ZeroDivisionError: oh"]
    assert [f.level for f in findings if f.check == "port"] == ["ok"]
