"""What a service manager hears: real datagrams on a real socket."""

from __future__ import annotations

import os
import socket

import pytest

from ckptd.notify import Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.setblocking(False)
        yield server


def heard(server):
    found = []
    while True:
        try:
            found.append(server.recv(4096).decode())
        except BlockingIOError:
            return found


def test_each_word_is_one_datagram(manager):
    notifier = Notifier(manager.getsockname(), watchdog_s=3600.0)
    notifier.ready()
    notifier.status("training |\n step 5")
    notifier.status("training | step 5")
    notifier.status("x" * 1000)
    notifier.stopping()
    assert heard(manager) == ["READY=1", "STATUS=training | step 5", f"STATUS={'x' * 200}", "STOPPING=1"]


def test_the_watchdog_is_fed_no_more_often_than_it_needs(manager):
    notifier = Notifier(manager.getsockname(), watchdog_s=3600.0)
    for _ in range(100):
        notifier.alive()
    assert heard(manager) == ["WATCHDOG=1"]
    eager = Notifier(manager.getsockname(), watchdog_s=1e-6)
    for _ in range(5):
        eager.alive()
    assert heard(manager) == ["WATCHDOG=1"] * 5
    unwatched = Notifier(manager.getsockname())
    unwatched.alive()
    assert heard(manager) == []


def test_the_variables_are_taken_out_of_the_environment(manager):
    environment = {
        "NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid()), "A": "b",
    }  # fmt: skip
    notifier = Notifier.from_environment(environment)
    assert environment == {"A": "b"}
    assert (notifier.active, notifier.watchdog_s) == (True, 2.0)
    notifier.ready()
    assert heard(manager) == ["READY=1"]


@pytest.mark.parametrize(
    ("variables", "watchdog"),
    [
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "5000000"}, 5.0),
    ],
)
def test_a_watchdog_that_is_not_ours_is_not_fed(manager, variables, watchdog):
    assert Notifier.from_environment({"NOTIFY_SOCKET": manager.getsockname(), **variables}).watchdog_s == watchdog


def test_an_abstract_address(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0ckptd-test-{os.getpid()}-{tmp_path.name}")
        server.setblocking(False)
        Notifier("@" + server.getsockname()[1:].decode()).ready()
        assert heard(server) == ["READY=1"]


def test_nobody_listens(tmp_path, manager):
    for notifier in (Notifier(), Notifier.from_environment({}), Notifier.from_environment({"NOTIFY_SOCKET": "odd"})):
        assert not notifier.active
        notifier.ready()
    Notifier(str(tmp_path / "none")).ready()
    full = Notifier(manager.getsockname(), watchdog_s=1e-6)
    for _ in range(10_000):
        full.alive()  # more than the queue of a socket takes: it does not wait
