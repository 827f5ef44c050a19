"""What do lines of the kernel's log say about the workers and the GPUs of a node?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:,\s*(.*))?")
_OFF_THE_BUS = re.compile(r"(?:GPU has fallen off the bus|GPU is lost)", re.IGNORECASE)
_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)")

APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 69})
"""Faults that a program causes (illegal address, page fault, its own abort): the device is well."""
DEVICE_XIDS: Final = frozenset(
    {46, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156}
)
"""ECC, NVLink, GSP and bus faults: the device, or its seat, is at fault. After NVIDIA's list of Xid errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """An error that the NVIDIA driver reported."""

    bus: str
    """PCI address as printed, such as `0000:9b:00`."""
    number: int
    text: str

    @property
    def blames_device(self) -> bool:
        return self.number in DEVICE_XIDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Everything of interest in some lines."""

    xids: tuple[Xid, ...] = ()
    lost: bool = False
    """A GPU fell off the bus, with or without an Xid."""
    oom_killed: tuple[int, ...] = ()
    """Pids that the kernel killed for want of memory, as the kernel numbers them: outside any container."""


def read(lines: Iterable[str]) -> Findings:
    """Search the lines of a kernel log, with or without timestamps."""
    xids: list[Xid] = []
    killed: list[int] = []
    lost = False
    for line in lines:
        if match := _XID.search(line):
            xids.append(Xid(bus=match[1], number=int(match[2]), text=(match[3] or "").strip()))
        if match := _OOM.search(line):
            killed.append(int(match[1]))
        lost = lost or _OFF_THE_BUS.search(line) is not None
    return Findings(xids=tuple(xids), lost=lost, oom_killed=tuple(killed))


def same_bus(a: str, b: str) -> bool:
    """Whether two PCI addresses name one device: `0000:9b:00`, `00000000:9B:00.0` and `9b:00.0` do."""
    return _bus(a) == _bus(b)


def _bus(address: str) -> tuple[str, str]:
    parts = address.lower().partition(".")[0].split(":")
    return (parts[-2].lstrip("0"), parts[-1].lstrip("0")) if len(parts) >= 2 else ("", address.lower())
