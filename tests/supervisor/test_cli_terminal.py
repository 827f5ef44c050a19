"""What depends on who looks: completion in a shell, colours, and bars on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckptd import cli
from ckptd.cli import _progress, _text


def complete(*words, **env):
    done = subprocess.run(
        [sys.executable, "-m", "ckptd"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "_CKPTD_COMPLETE": "bash_complete",
             "COMP_WORDS": " ".join(["ckptd", *words]), "COMP_CWORD": str(len(words)), **env},
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_options_and_names_of_runs_are_completed(tmp_path):
    assert complete("val") == ["validate"]
    assert set(complete("st")) >= {"status", "stop"}
    assert set(complete("stop", "--")) >= {"--now", "--detach", "--no-wait"}
    for name in ("alpha", "beta"):
        run = tmp_path / "ckptd" / "runs" / name
        run.mkdir(parents=True)
        (run / "lock").touch()
    assert complete("status", "a", XDG_STATE_HOME=str(tmp_path)) == ["alpha"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert f"_CKPTD_COMPLETE={shell}_complete" in out
    assert cli.main(["completion", "tcsh"]) == 64


def test_bash_takes_the_script_and_completes():
    script = subprocess.run(
        [sys.executable, "-m", "ckptd", "completion", "bash"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout  # fmt: skip
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p ckptd"], capture_output=True, text=True, check=False)
    assert "_ckptd_completion ckptd" in done.stdout, done.stderr


class Terminal:
    def isatty(self):
        return True


def test_colours_are_for_terminals_and_for_those_who_do_not_decline(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _text.coloured(Terminal())
    with open(tmp_path / "file", "w") as file:
        assert not _text.coloured(file)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _text.coloured(Terminal())


ON_A_TERMINAL = """
import sys, threading
from ckptd.cli import _progress
with _progress.bar(4, "verifying") as advance:
    advance(4)
count = [0]
seen = threading.Event()
def done():
    count[0] += 1
    if count[0] > 2: seen.set()
    return count[0]
with _progress.watched(10, "steps", done):
    seen.wait(30)
print("over")
"""


def on_a_terminal(code):
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # the other end is closed, and all of it was read
    finally:
        os.close(ours)
    return done, shown.decode()


def test_bars_are_drawn_on_a_terminal_and_never_on_standard_output():
    done, shown = on_a_terminal(ON_A_TERMINAL)
    assert (done.returncode, done.stdout) == (0, "over\n"), shown
    assert "verifying" in shown
    assert "100%" in shown
    assert "steps" in shown


def test_there_are_no_bars_elsewhere(capfd):
    with _progress.bar(4, "verifying") as advance:
        advance(4)
    with _progress.watched(10, "steps", lambda: 5):
        pass
    assert capfd.readouterr() == ("", "")
