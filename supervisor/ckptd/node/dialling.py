"""Which address does an agent dial, and which network interface does that make the workers' own?

The address stands in a file of the node's run directory, `dial-<node>.json`, which whoever starts agents there replaces:
an agent that lives reads it again before each try, and so finds a daemon that has moved.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import psutil

from ckptd.node.attempt import node_file
from ckptd_shim import contract


@dataclass(frozen=True, kw_only=True)
class Dial:
    """Where the daemon listens."""

    host: str
    port: int
    epoch: int = 0
    """How often the run was taken over by a daemon on another host: the highest that was seen here counts."""


def _path(run_dir: str, node: str) -> str:
    return os.path.join(run_dir, node_file("dial", node, "json"))


def read(run_dir: str, node: str) -> Dial:
    """Raises OSError: the file is not there, or cannot be read as one."""
    try:
        with open(_path(run_dir, node), "rb") as file:
            found = json.load(file)
        return Dial(host=str(found["host"]), port=int(found["port"]), epoch=int(found["epoch"]))
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{_path(run_dir, node)} cannot be read: {error}") from None


def write(run_dir: str, node: str, dial: Dial) -> None:
    """Have the node's agent dial there from now on."""
    contract.write_atomically(_path(run_dir, node), json.dumps(asdict(dial)).encode(), durable=True)


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address; None: none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return name
    return None


def interface_settings(address: str) -> dict[str, str]:
    """Variables that have gloo and NCCL use the network on which the daemon was reached; none where that is not known.

    Both would else take the first interface that they find, or an address that the host's name happens to stand for.
    """
    name = interface_of(address) if address else None
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
