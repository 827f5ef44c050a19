"""What ssh and the other end say, in words that name the host and what to do."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest

from ckptd import __version__
from ckptd.jobscalars import Host
from ckptd.launchers import ssh
from ckptd.launchers.ssh import MARK, Job, SshLauncher, understood

SECRET = bytes(range(32))


@pytest.mark.parametrize(
    ("status", "out", "err", "said"),
    [
        (255, "", "ssh: connect to host h port 22: No route to host", "host h cannot be reached: 'ssh: connect"),
        (255, "", "user@h: Permission denied (publickey).", "Does `ssh h true` work without a question?"),
        (127, "", "sh: 1: /opt/python: not found", "host h has no program /opt/python"),
        (1, "", "/opt/python: No module named ckptd", f"install ckptd {__version__} there with pip"),
        (1, "", "/opt/python: Error while finding module specification for 'ckptd.node'\nNo module named 'ckptd'",
         "has no ckptd"),
        (2, "", "boom", "ended with status 2 and said 'boom'"),
        (1, f'{MARK}{{"ok": false, "why": "ckptd 9 is installed there"}}', "", "host h: ckptd 9 is installed there"),
    ],
)  # fmt: skip
def test_why_no_agent_is_there(status, out, err, said):
    found = understood("h", "/opt/python", status, out, err)
    assert not found.ok
    assert said in found.why


def test_what_a_login_shell_says_before_is_passed_over():
    found = understood("h", "p", 0, f'Welcome!\n{{"ok": false}}\n{MARK}{{"ok": true, "before": "alive"}}\n', "motd")
    assert (found.ok, found.before) == (True, "alive")


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    script = tmp_path / "ssh"
    script.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/argv\ncat > {tmp_path}/stdin\n"
        f"env > {tmp_path}/env\n[ -e {tmp_path}/hang ] && exec sleep 600\n"
        f"echo '{MARK}{json.dumps({'ok': True, 'before': 'none'})}'\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = Job(
        run_dir="/r", run_id="id", workdir="/w", python="/usr/bin/py thon", devices=2, secret=SECRET, port=7, epoch=3
    )
    made = SshLauncher(job=job, hosts=[Host(host="h1"), Host(host="h2", devices=4)], addresses={"h1": "a", "h2": "b"})
    yield made
    made.close(over=True)


def wait(launcher, node):
    deadline = time.monotonic() + 30
    while (found := launcher.arrival(node)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_the_secret_goes_through_standard_input_and_nowhere_else(launcher, tmp_path):
    launcher.start("h2", replace=True)
    assert wait(launcher, "h2").ok
    argv = (tmp_path / "argv").read_text()
    assert SECRET.hex() not in argv + (tmp_path / "env").read_text()
    assert argv.splitlines()[-2:] == ["h2", "exec '/usr/bin/py thon' -m ckptd.node --stdin"]
    assert "BatchMode=yes" in argv
    wanted = json.loads((tmp_path / "stdin").read_text())
    assert wanted["secret"] == SECRET.hex()
    assert (wanted["do"], wanted["devices"], wanted["replace"]) == ("start", 4, True)
    assert wanted["dial"] == {"host": "b", "port": 7, "epoch": 3}
    assert launcher.arrival("h2") is None, "told once"


def test_a_host_that_hangs_holds_nobody_up_and_is_let_go(launcher, tmp_path):
    (tmp_path / "hang").touch()
    begun = time.monotonic()
    launcher.start("h1", replace=False)
    launcher.start("h1", replace=False)  # one at a time
    assert launcher.busy("h1")
    assert launcher.arrival("h1") is None
    assert time.monotonic() - begun < 5.0
    deadline = time.monotonic() + 30
    while not (tmp_path / "env").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    launcher.close(over=True)
    while launcher.busy("h1") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not launcher.busy("h1")


def test_without_ssh_it_says_so(launcher, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    launcher.start("h1", replace=False)
    assert "ssh cannot be started here" in wait(launcher, "h1").why


def test_ssh_speaks_the_language_of_the_other_end():
    from ckptd.node import arrival

    assert ssh.MARK == arrival.MARK
