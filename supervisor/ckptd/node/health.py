"""Which devices this node has, and which of them are fit to train on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptd.errors import LaunchError
from ckptd.node.processes import HELPER_MARK

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0
OUTPUT_LIMIT = 65_536
"""Bytes of a command's output that are looked at: one that never stops talking must not fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """An answer: indices of devices that must not be used, and what to tell a person."""

    unhealthy: frozenset[int] = frozenset()
    detail: str = ""


@dataclass(kw_only=True)
class Devices:
    """The devices of this node: GPUs where there are any, else as many CPU slots as job.yaml says."""

    gpus: bool
    devices: list[dict[str, Any]] = field(default_factory=list)

    @property
    def indices(self) -> list[int]:
        return [int(device["index"]) for device in self.devices]

    def identity(self, index: int) -> str:
        """What a device is called whatever its index."""
        return next(str(d["id"]) for d in self.devices if int(d["index"]) == index)

    def buses(self, places: Mapping[int, int]) -> dict[int, str]:
        """PCI address by rank, for the devices that have one; `places`: rank -> index."""
        known = {int(d["index"]): str(d["bus"]) for d in self.devices if d.get("bus")}
        return {rank: known[index] for rank, index in places.items() if index in known}


def find_devices(wanted: int | None) -> Devices:
    """The devices to train on; `wanted` None means `auto`.

    Raises:
        LaunchError: `auto` on a node without GPUs, or more GPUs wanted than there are.
    """
    gpus = visible(_nvml_devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        if wanted is not None and wanted > len(gpus):
            raise LaunchError(f"cluster.devices_per_node is {wanted}, but this node has {len(gpus)} GPUs")
        return Devices(gpus=True, devices=gpus if wanted is None else gpus[:wanted])
    if wanted is None:
        raise LaunchError(
            "cluster.devices_per_node is auto, and no GPU was found here (it takes the NVIDIA driver and the extra "
            "`ckptd[gpu]`); without GPUs say how many CPU workers a node runs: devices_per_node: 2"
        )
    return Devices(gpus=False, devices=[{"index": i, "id": f"cpu-slot-{i}", "name": "cpu"} for i in range(wanted)])


def visible(devices: list[dict[str, Any]], setting: str | None) -> list[dict[str, Any]]:
    """Those of a node's GPUs that `CUDA_VISIBLE_DEVICES` lets this job use: NVML itself shows the neighbours' as well.

    As CUDA reads it: indices or beginnings of identities, in that order, up to the first that names no device.
    """
    if setting is None:
        return devices
    found: list[dict[str, Any]] = []
    for name in (part.strip() for part in setting.split(",")):
        named = [
            d for d in devices if (name.isdecimal() and int(name) == d["index"]) or (name and d["id"].startswith(name))
        ]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


def _nvml_devices() -> list[dict[str, Any]]:
    # Untested where the project is developed: there is no GPU. Kept thin.
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
            found.append({"index": index, "id": _text(uuid), "name": _text(name), "bus": _text(bus)})
    except pynvml.NVMLError:
        return []
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvml_unhealthy(devices: Devices) -> Health:
    # A device that NVML cannot reach, or that asks for a reset, is not launched on.
    import pynvml

    bad: dict[int, str] = {}
    for index in devices.indices:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(devices.identity(index))
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            bad[index] = str(error)
    return Health(unhealthy=frozenset(bad), detail="; ".join(f"device {i}: {why}" for i, why in bad.items()))


async def ask(devices: Devices, command: list[str] | None) -> Health:
    """Ask NVML and `health.command`. What cannot be asked is not held against a device, but said in `detail`."""
    known = Health()
    if devices.gpus:
        known = await asyncio.to_thread(_nvml_unhealthy, devices)
    if command is None:
        return known
    told = await _run_command(command, devices.indices)
    return Health(
        unhealthy=known.unhealthy | told.unhealthy, detail="; ".join(d for d in (known.detail, told.detail) if d)
    )


async def _run_command(command: list[str], indices: list[int]) -> Health:
    shown = " ".join(command)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, HELPER_MARK[0]: HELPER_MARK[1]},
        )
    except OSError as error:
        return Health(detail=f"health.command `{shown}` cannot be started: {error}")
    try:
        out, err = await asyncio.wait_for(_what_it_says(process), COMMAND_TIMEOUT_S)
    except TimeoutError:
        # The command may be a script that waits for others: its whole session goes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        return Health(detail=f"health.command `{shown}` did not end within {COMMAND_TIMEOUT_S:.0f} s")
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()[-500:]
        return Health(
            detail=f"health.command `{shown}` ended with status {process.returncode}: {said or 'it said nothing'}"
        )
    bad: set[int] = set()
    strange: list[str] = []
    # Line by line: a number inside of a sentence says nothing of a device.
    for line in filter(None, map(str.strip, out.decode(errors="replace").splitlines())):
        if line.isdecimal() and len(line) < 10 and int(line) in indices:
            bad.add(int(line))
        else:
            strange.append(line)
    detail = (
        f"health.command `{shown}` printed {', '.join(strange[:5])[:200]!r}: no index of a device here"
        if strange
        else ""
    )
    return Health(unhealthy=frozenset(bad), detail=detail)


async def _what_it_says(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Standard output and standard error, once it has ended: the beginning of each, however much more it prints."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = await asyncio.gather(_beginning(process.stdout), _beginning(process.stderr))
    await process.wait()
    return out, err


async def _beginning(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while chunk := await stream.read(OUTPUT_LIMIT):
        kept += chunk[: OUTPUT_LIMIT - len(kept)]
    return bytes(kept)
