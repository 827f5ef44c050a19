"""Where does the daemon listen for agents on other machines, and which of its addresses do they reach?"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import resource
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptd import auth
from ckptd.errors import PortTaken
from ckptd.jobspec import JobSpec
from ckptd.link import BACKLOG
from ckptd.rundir import RunDir
from ckptd_shim import contract

log = logging.getLogger(__name__)

LOOK_UP_TIMEOUT_S = 10.0
LOOK_UPS = 16
OTHER_FILES = 512
"""Descriptors for all else: the ledger, pages, strangers, calls of ssh."""
_ANYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - what job.yaml may say, not what we bind by ourselves


@dataclass(kw_only=True)
class Door:
    """A socket that listens on this machine, and what agents have to know to get in."""

    sock: socket.socket
    secret: bytes
    epoch: int
    moved: bool = False
    """Agents of an earlier daemon know another port: they have to be told."""
    addresses: dict[str, str] = field(default_factory=dict)
    """node -> the address of this machine that it dials."""

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])


def open_door(spec: JobSpec, run_dir: RunDir, *, epoch: int, known: Mapping[str, str] | None = None) -> Door:
    """Bind `cluster.listen`, or an address that reaches the hosts. A daemon before this one had the same port, if possible.

    `known`: host -> its address or network name, where ssh has no say in that; others are looked up by their own names.

    Agents that live dial the port that they know; where it is taken now, they are told the new one by whoever starts
    agents (see `node.arrival`).

    Raises:
        PortTaken: it cannot be bound, or no address of this machine reaches the hosts.
        UsageError: the secret's file is not ours alone.
    """
    _make_room(len(spec.cluster.hosts))
    secret = auth.run_secret(str(run_dir.secret_path))
    host, port = _wanted(spec)
    names = [entry.host for entry in spec.cluster.hosts]
    if host in _ANYWHERE:
        addresses = _addresses(names, known)
        found = set(addresses.values())
        if not found:
            raise PortTaken(
                f"no address of this machine is known to reach {', '.join(names[:3])}: name one as cluster.listen"
            )
        fallback = next(iter(addresses.values()))
        addresses = {name: addresses.get(name, fallback) for name in names}
        # Several networks: listen on all of them. What dials has to prove the secret anyway.
        bind = fallback if len(found) == 1 and spec.cluster.listen is None else ("::" if ":" in fallback else "0.0.0.0")  # noqa: S104
    else:
        addresses, bind = dict.fromkeys(names, host), host
    before = _recorded(run_dir)
    sock = _bound(bind, port, before.get("port") if port == 0 else None)
    # Beside the ledger, which may be lost: agents never again obey a lower one.
    door = Door(sock=sock, secret=secret, epoch=max(epoch, before.get("epoch", 0)), addresses=addresses)
    door.moved = before.get("port", door.port) != door.port or door.epoch != before.get("epoch", door.epoch)
    document = {"host": bind, "port": door.port, "epoch": door.epoch}
    contract.write_atomically(run_dir.listen_path, json.dumps(document).encode(), durable=True)
    return door


def _make_room(nodes: int) -> None:
    """Have the kernel allow as many open files as there will be connections: the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * nodes + OTHER_FILES  # a node that dials again may be here twice for a moment
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("this process may open %d files, and %d nodes want %d: raise `ulimit -Hn`", most, nodes, wanted)


def _wanted(spec: JobSpec) -> tuple[str, int]:
    host, _, port = (spec.cluster.listen or ":0").rpartition(":")
    return host.strip("[]"), int(port)


def _recorded(run_dir: RunDir) -> dict[str, int]:
    try:
        with open(run_dir.listen_path, "rb") as file:
            found = json.load(file)
        return {"port": int(found["port"]), "epoch": int(found["epoch"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _bound(host: str, port: int, before: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if before is not None:
        with contextlib.suppress(OSError):
            return socket.create_server((host, before), family=family, backlog=BACKLOG)
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{host}:{port}"
        raise PortTaken(f"cluster.listen: {where} cannot be listened on: {os.strerror(error.errno or 0)}") from None


def _addresses(hosts: list[str], known: Mapping[str, str] | None) -> dict[str, str]:
    """The address of this machine that each host would see; hosts of which that is not known are left out."""

    def towards(host: str) -> str | None:
        return _address_towards(_real_name(host) if known is None else known.get(host, host))

    with ThreadPoolExecutor(LOOK_UPS) as pool:
        answers = dict(zip(hosts, pool.map(towards, hosts), strict=True))
    found = {host: address for host, address in answers.items() if address is not None}
    outside = next((address for address in found.values() if not _is_loopback(address)), None)
    # A node that is this machine, as the first one of an allocation is: its store would be where only it can reach.
    return {host: outside if outside and _is_loopback(address) else address for host, address in found.items()}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(host: str) -> str | None:
    """Which address this machine would use towards a host: the routes know. Nothing is sent."""
    try:
        known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in known:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _real_name(host: str) -> str:
    """The name behind what the user's ssh configuration calls a host."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["ssh", "-G", "--", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=LOOK_UP_TIMEOUT_S, check=False,
        )  # fmt: skip
        for line in told.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value.strip("[]")
    return host.rpartition("@")[2].strip("[]")
