"""Which devices this node has, and which of them are fit to train on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from ckptd.errors import LaunchError
from ckptd.node.processes import HELPER_MARK

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0


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


def find_devices(wanted: int | None) -> Devices:
    """The devices to train on; `wanted` None means `auto`.

    Raises:
        LaunchError: `auto` on a node without GPUs, or more GPUs wanted than there are.
    """
    gpus = _nvml_devices()
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
            found.append({"index": index, "id": _text(uuid), "name": _text(name)})
    except pynvml.NVMLError:
        return []
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvml_unhealthy(indices: list[int]) -> Health:
    # A device that NVML cannot reach, or that asks for a reset, is not launched on.
    import pynvml

    bad: dict[int, str] = {}
    for index in indices:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            bad[index] = str(error)
    return Health(unhealthy=frozenset(bad), detail="; ".join(f"device {i}: {why}" for i, why in bad.items()))


async def ask(devices: Devices, command: list[str] | None) -> Health:
    """Ask NVML and `health.command`. What cannot be asked is not held against a device, but said in `detail`."""
    known = Health()
    if devices.gpus:
        known = await asyncio.to_thread(_nvml_unhealthy, devices.indices)
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
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except TimeoutError:
        # The command may be a script that waits for others: its whole session goes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        return Health(detail=f"health.command `{shown}` gave no answer within {COMMAND_TIMEOUT_S:.0f} s")
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()[-500:]
        return Health(detail=f"health.command `{shown}` ended with status {process.returncode}: {said}")
    bad: set[int] = set()
    strange: list[str] = []
    for line in out.decode(errors="replace").split():
        if line.isdecimal() and int(line) in indices:
            bad.add(int(line))
        else:
            strange.append(line)
    detail = (
        f"health.command `{shown}` printed {', '.join(strange[:5])!r}: no index of a device here" if strange else ""
    )
    return Health(unhealthy=frozenset(bad), detail=detail)
