"""An agent comes to be on a node, once, outlives whoever started it, and is told where to dial when that changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from ckptd import __version__, link
from ckptd.node import arrival, dialling, processes
from ckptd.node.arrival import MARK
from ckptd.node.attempt import node_file
from ckptd.node.processes import Process

SECRET = "00" * 32


@pytest.fixture
def node(tmp_path):
    """Asks for something as ssh would; ends the agents that came of it."""
    started = []

    def ask(what="start", **changes):
        wanted = {
            "do": what, "version": __version__, "run_dir": str(tmp_path / "run"), "run_id": "r", "node": "n@1",
            "workdir": str(tmp_path), "devices": 1, "secret": SECRET, "replace": False,
            "dial": {"host": "127.0.0.1", "port": 9, "epoch": 1}, **changes,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "ckptd.node", "--stdin"], input=json.dumps(wanted) + "\n", capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        (line,) = done.stdout.splitlines()
        answer = json.loads(line.removeprefix(MARK))
        assert (done.returncode == 0) is answer["ok"]
        if answer.get("pid") and (identity := processes.identify(answer["pid"])) is not None:
            started.append(identity)
        return answer

    yield ask
    for agent in started:
        processes.send(agent, signal.SIGKILL)
    assert not processes.wait_gone(started, 20)


def test_it_lives_in_a_session_of_its_own_and_the_secret_is_nowhere_to_be_read(node, tmp_path):
    told = node()
    assert (told["ok"], told["before"]) == (True, "none")
    pid = told["pid"]
    assert processes.read_stat(pid).session == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    for name in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{name}", "rb") as file:
            assert SECRET.encode() not in file.read()
    run = tmp_path / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert dialling.read(str(run), "n@1") == dialling.Dial(host="127.0.0.1", port=9, epoch=1)
    for path in run.iterdir():
        assert SECRET not in path.read_text(errors="replace")
    assert (run / "agent-n_1.log").exists(), "a name that no path can lead out of the directory"


def test_one_that_lives_is_told_the_new_address_and_left_alone_unless_it_is_to_be_replaced(node, tmp_path):
    first = node()
    again = node(dial={"host": "127.0.0.1", "port": 10, "epoch": 2})
    assert (again["before"], again["pid"]) == ("alive", first["pid"])
    assert dialling.read(str(tmp_path / "run"), "n@1").port == 10
    late = node(dial={"host": "127.0.0.1", "port": 11, "epoch": 1})
    assert not late["ok"]
    assert late["superseded"]
    assert dialling.read(str(tmp_path / "run"), "n@1").port == 10, "the daemon that took over keeps it"
    other = node(replace=True, dial={"host": "127.0.0.1", "port": 10, "epoch": 2})
    assert other["before"] == "killed"
    assert other["pid"] != first["pid"]
    processes.send(processes.identify(other["pid"]), signal.SIGKILL)
    assert not processes.wait_gone([Process(other["pid"], 0)], 5)
    assert node(dial={"host": "127.0.0.1", "port": 10, "epoch": 2})["before"] == "dead"
    assert node("kill")["before"] == "killed"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": "99"}, f"ckptd {__version__} is installed there, the daemon is 99: install one version"),
        ({"workdir": "/nowhere"}, "there is no directory /nowhere there, which job.yaml names as workdir"),
        ({"devices": None}, "no GPU was found here"),
        ({"run_dir": "/proc/nowhere"}, "its run directory /proc/nowhere cannot be made"),
    ],
)
def test_where_none_comes_to_be_it_says_why(node, changes, why):
    told = node(**changes)
    assert not told["ok"]
    assert why in told["why"]


class Head:
    """A daemon as far as an agent can tell, which keeps who dialled in."""

    def __init__(self, epoch):
        self.epoch, self.hellos, self.left = epoch, [], 0
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.dial = {"host": "127.0.0.1", "port": self.sock.getsockname()[1], "epoch": epoch}

    async def serve(self, channel):
        self.hellos.append(await channel.receive())
        settings = {
            "tiers": [], "health_command": None, "health_interval_s": 30.0, "stop_grace_s": 1.0,
            "orphan_timeout_s": 60.0, "fence_timeout_s": 20.0, "warm": None,
        }  # fmt: skip
        channel.send({"type": "welcome", "settings": settings, "acknowledged": 0, "epoch": self.epoch})
        while await channel.receive() is not None:
            pass
        self.left += 1


def test_an_agent_leaves_a_daemon_that_lives_for_the_one_that_took_over_and_does_not_go_back(node):
    async def until(true):
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.02)

    async def scene():
        old, new = Head(1), Head(2)
        servers = [await link.listen_tcp(head.sock, bytes.fromhex(SECRET), head.serve) for head in (old, new)]
        agent = await asyncio.to_thread(node, dial=old.dial)
        await until(lambda: old.hellos)
        assert (await asyncio.to_thread(node, dial=new.dial))["before"] == "alive"
        await until(lambda: new.hellos and old.left)
        assert [hello["pid"] for hello in old.hellos + new.hellos] == [agent["pid"]] * 2
        for server in servers:
            server.close()
        assert not (await asyncio.to_thread(node, dial=old.dial))["ok"]

    asyncio.run(scene())


def test_names_of_files_stay_inside():
    assert node_file("agent", "../../etc/x", "json") == "agent-.._.._etc_x.json"


def test_the_interface_of_an_address():
    assert dialling.interface_of("127.0.0.1") == "lo"
    assert dialling.interface_settings("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert dialling.interface_settings("") == dialling.interface_settings("192.0.2.1") == {}


def test_a_dial_file_that_makes_no_sense_is_tried_again_later(tmp_path):
    for text in ("", "[]", '{"host": 1}'):
        (tmp_path / node_file("dial", "n", "json")).write_text(text)
        with pytest.raises(OSError, match="cannot be read"):
            dialling.read(str(tmp_path), "n")


def test_nobody_gets_past_a_directory_of_somebody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(arrival.NotThere, match="belongs to user"):
        arrival.act({"version": __version__, "run_dir": str(tmp_path), "node": "n", "do": "start"})
