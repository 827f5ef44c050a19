"""The rendezvous of an attempt: a store on a port that was never free in between, for one host, and new each time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from ckptd.node import elastic


def listeners():
    """(address, port) of every TCP socket that this process listens on, by /proc."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    raw, port = fields[1].split(":")
                    data = bytes.fromhex(raw)
                    words = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
                    found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found


def test_a_store_listens_on_the_given_host_alone():
    before = listeners()
    store = elastic.open_store("127.0.0.1")
    assert listeners() - before == {("127.0.0.1", store.port)}
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_stores_share_neither_port_nor_keys():
    stores = [elastic.open_store("127.0.0.1") for _ in range(5)]
    assert len({store.port for store in stores}) == 5
    stores[0].set("gloo/0", "an address of long ago")
    assert not any(store.check(["gloo/0"]) for store in stores[1:])


def test_the_port_is_never_let_go_between_choosing_and_listening(monkeypatch):
    """Whoever wants the port the moment it is known finds it taken."""
    thefts = []
    real = elastic.TCPStore

    def thief(host, port, **options):
        with socket.socket() as greedy:
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                greedy.bind((host, port))
                greedy.listen()
                thefts.append(port)
            except OSError:
                pass
        return real(host, port, **options)

    monkeypatch.setattr(elastic, "TCPStore", thief)
    assert elastic.open_store("127.0.0.1").port
    assert thefts == []


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_of_the_newer_kind():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    before = listeners()
    store = elastic.open_store("::1")
    assert listeners() - before == {("::1", store.port)}


def test_a_host_that_is_not_ours_is_an_error_at_once():
    with pytest.raises(OSError, match="assign"):
        elastic.open_store("192.0.2.1")


def test_the_agent_is_reachable_without_torch():
    """What the daemon and the commands import stays light."""
    code = (
        "import sys, ckptd.daemon, ckptd.agents, ckptd.node.agent, ckptd.node.attempt, ckptd.cli._run\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
