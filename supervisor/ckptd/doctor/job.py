"""Does a job find here what it needs: interpreter, devices, places to write to, a port, modules that can be forked?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import psutil

from ckptd import __version__, hostfacts, jobhost, orders
from ckptd.core import events
from ckptd.doctor import findings
from ckptd.doctor.findings import Finding
from ckptd.errors import CkptdError
from ckptd.hostfacts import Filesystem
from ckptd.jobspec import JobSpec, Tier
from ckptd.ledger import Ledger
from ckptd.node import health, warm
from ckptd.rundir import RunDir

LEAST_TORCH: Final = (2, 9)
LEAST_LEDGER_ROOM: Final = 1 << 30
LEAST_FILES: Final = 10_000
SLOW_PROBE_S: Final = 2.0
INTERPRETER_PATIENCE_S: Final = 60.0


def checkpoint_size(spec: JobSpec) -> int | None:
    """Bytes of the newest checkpoint that this run committed; None: it has committed none yet."""
    path = RunDir(spec.run_dir_path).ledger_path
    if not path.is_file():
        return None
    size = None
    with contextlib.suppress(CkptdError), Ledger.open(path, readonly=True) as ledger:
        for _, event in ledger.events():
            if isinstance(event, events.SaveCommitted):
                size = event.bytes
    return size


_ASK: Final = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in ("torch", "ckptd"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print("answer", json.dumps(found))
"""


def this_python() -> Iterator[Finding]:
    yield from _judge_python(_ask_python(sys.executable, {}))


def python(spec: JobSpec) -> Iterator[Finding]:
    problem = jobhost.interpreter_problem(spec)
    if problem is not None:
        yield findings.fail(
            "python", problem, "name the interpreter that torch and ckptd are installed for as `python` in job.yaml"
        )
        return
    yield from _judge_python(_ask_python(spec.python_path, spec.env))


def _ask_python(python: str, env: dict[str, str]) -> dict[str, str | None]:
    done = subprocess.run(
        [python, "-c", _ASK], env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", timeout=INTERPRETER_PATIENCE_S, check=True,
    )  # fmt: skip
    answer = next(line for line in done.stdout.splitlines() if line.startswith("answer "))
    return dict(json.loads(answer.removeprefix("answer ")))


def _judge_python(found: dict[str, str | None]) -> Iterator[Finding]:
    torch = found["torch"]
    told = f"Python {found['python']}, torch {torch or 'not installed'}, ckptd {found['ckptd'] or __version__}"
    if torch is None:
        yield findings.fail("python", told, "install torch for it")
        return
    parts = torch.split("+")[0].split(".")[:2]
    if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < LEAST_TORCH:
        yield findings.fail("python", told, f"this ckptd needs torch {'.'.join(map(str, LEAST_TORCH))} or newer")
    elif found["ckptd"] not in (None, __version__):
        yield findings.warn(
            "python", f"{told}; this is ckptd {__version__}", "install the same version for the workers"
        )
    else:
        yield findings.ok("python", told)


def devices(spec: JobSpec) -> Iterator[Finding]:
    if spec.cluster.launcher != "local":
        yield findings.ok(
            "devices",
            f"looked for by the agents: `{spec.cluster.launcher}` starts them; run this on a node for the rest",
        )
        return
    wanted = spec.cluster.devices_per_node
    try:
        found = health.find_devices(None if wanted == "auto" else wanted)
    except CkptdError as error:
        yield findings.fail("devices", str(error), "see `nvidia-smi`, or set cluster.devices_per_node")
        return
    count, kind = len(found.devices), "GPUs" if found.gpus else "CPU workers"
    if not jobhost.allowed_worlds(spec, count):
        yield findings.fail(
            "devices",
            f"{count} {kind}, of which no world can be made",
            "see cluster.min_devices, multiple_of and batch.global",
        )
        return
    idle = jobhost.idle_devices(spec)
    if idle is not None:
        yield findings.warn(
            "devices", f"{count} {kind}; {idle}", "change batch.global, or give the devices to somebody else"
        )
    else:
        yield findings.ok("devices", f"{count} {kind}")
    if found.gpus:
        yield from _cuda(spec)
    if spec.health.command is not None or found.gpus:
        answer = asyncio.run(health.ask(found, spec.health.command))
        if answer.unhealthy or answer.detail:
            bad = f"unhealthy devices: {sorted(answer.unhealthy)}; " if answer.unhealthy else ""
            yield findings.warn(
                "devices", f"{bad}{answer.detail}".rstrip("; "), "repair them, or the command that says so"
            )


def _cuda(spec: JobSpec) -> Iterator[Finding]:
    code = "import torch; print('answer', torch.version.cuda, torch.cuda.is_available())"
    done = subprocess.run(
        [spec.python_path, "-c", code], env={**os.environ, **spec.env}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, errors="replace", timeout=2 * INTERPRETER_PATIENCE_S, check=False,
    )  # fmt: skip
    words = next(
        (line.split() for line in done.stdout.splitlines() if line.startswith("answer ")), ["answer", "None", "?"]
    )
    if words[1] == "None":
        yield findings.fail(
            "devices", "there are GPUs, and this torch was built without CUDA", "install the CUDA build of torch"
        )
    elif words[2] != "True":
        yield findings.fail(
            "devices",
            f"torch cannot use the GPUs, which the driver shows: {done.stderr.strip()[-300:]}",
            f"see `nvidia-smi`; the driver may be too old for CUDA {words[1]}",
        )
    else:
        yield findings.ok("devices", f"torch can use them, with CUDA {words[1]}")


def run_directory(spec: JobSpec) -> Iterator[Finding]:
    path = spec.run_dir_path
    place = hostfacts.filesystem(path)
    above = _existing(str(path))
    if not os.access(above, os.W_OK | os.X_OK):
        yield findings.fail(
            "run directory", f"{above} cannot be written by this user", "name another run_dir in job.yaml"
        )
        return
    told = f"{path}, {place.kind}, {findings.amount(place.free)} free"
    if place.network:
        yield findings.warn(
            "run directory",
            f"{told}: a network file system. SQLite's write-ahead log and locks are not safe there, and each event waits for it",
            "set run_dir to a directory on a local disk; checkpoints may stay where they are",
        )
    elif place.memory:
        yield findings.warn(
            "run directory",
            f"{told}: in memory. The run's history is lost with a reboot",
            "set run_dir to a directory on a disk",
        )
    elif place.free < LEAST_LEDGER_ROOM:
        yield findings.warn(
            "run directory",
            f"{told}: the ledger and the logs of workers need room",
            "make room, or name another run_dir",
        )
    else:
        yield findings.ok("run directory", told)
    try:
        RunDir(path).socket_path()
    except CkptdError as error:
        yield findings.fail("run directory", str(error), "name a run_dir with a shorter path")


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def port(spec: JobSpec, *, held: bool) -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)):
        pass  # the store of each attempt has to find one
    listen = spec.web.listen
    if listen is None:
        yield findings.ok("port", "no web, as job.yaml says")
        return
    if held:
        yield findings.ok("port", f"{listen} is this run's own daemon's, which lives")
        return
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if "[" in host else socket.AF_INET
        ):
            yield findings.ok("port", f"{listen} is free")
    except OSError as error:
        yield findings.fail(
            "port", f"{listen} cannot be listened on: {error.strerror}", "change web.listen; port 0 is any free one"
        )
        return
    if host.strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        yield findings.warn(
            "port", f"{listen} is open to other machines, and whoever reaches it can read status and metrics",
            "listen on 127.0.0.1, or put a proxy or a firewall before it",
        )  # fmt: skip


def tier(spec: JobSpec, tier: Tier, size: int | None) -> Iterator[Finding]:
    name = f"tier {tier.name}"
    if tier.path is None:
        yield findings.ok(name, f"{tier.url}: an object store is not looked at from here")
        return
    directory = str(spec.tier_dir(tier))
    place = hostfacts.filesystem(directory)
    try:
        took = _probe(directory)
    except OSError as error:
        yield findings.fail(
            name,
            f"{directory} cannot be written: {error.strerror} ({error.filename})",
            "see its owner, rights, quota and mount",
        )
        return
    told = f"{directory}, {place.kind}, {findings.amount(place.free)} free"
    yield from _room(name, told, place, tier, size)
    if place.free_files is not None and place.free_files < LEAST_FILES:
        yield findings.warn(
            name,
            f"{directory}: only {place.free_files} more files can be made there",
            "delete files, or name another place",
        )
    if took > SLOW_PROBE_S:
        yield findings.warn(
            name,
            f"{directory}: a small file took {took:.1f} s to be written safely",
            "see what else uses that disk or network",
        )
    if place.memory and all(
        t.path is not None and hostfacts.filesystem(spec.tier_dir(t)).memory for t in spec.checkpoint.tiers
    ):
        yield findings.warn(
            name, f"{directory} is in memory, and no tier is on a disk: a reboot takes every checkpoint along",
            "add a tier on a disk after it",
        )  # fmt: skip


def _room(name: str, told: str, place: Filesystem, tier: Tier, size: int | None) -> Iterator[Finding]:
    """Whether the checkpoints fit that are to be kept, and the one that is written before the oldest goes."""
    if size is None:
        yield findings.ok(name, f"{told}; how large a checkpoint is, the first one will show")
        return
    wanted = size * (tier.keep_last + 1)
    of = f"{told}; a checkpoint has {findings.amount(size)}"
    if place.free < size:
        yield findings.fail(name, f"{of}: not one more fits", "make room, or set keep_last lower")
    elif place.size < wanted:
        yield findings.fail(
            name, f"{of}: {tier.keep_last} that are kept and one that is written need {findings.amount(wanted)}, more than there is at all",
            f"set keep_last to {max(1, place.size // size - 2)}, or name a larger place",
        )  # fmt: skip
    elif place.free < 2 * size:
        yield findings.warn(name, f"{of}: few more fit", "make room, or set keep_last lower")
    else:
        yield findings.ok(name, of)


def _probe(directory: str) -> float:
    """Write, flush, rename and delete a small file; seconds that it took. Directories that were made for it go again."""
    made = []
    path = directory
    while not os.path.exists(path):
        made.append(path)
        path = os.path.dirname(path)
    begun = time.monotonic()
    try:
        os.makedirs(directory, exist_ok=True)
        name = os.path.join(directory, f".ckptd-doctor-{os.getpid()}")
        try:
            with open(f"{name}.part", "wb") as file:
                file.write(b"x" * (1 << 20))
                file.flush()
                os.fsync(file.fileno())
            os.rename(f"{name}.part", name)
        finally:
            for leftover in (name, f"{name}.part"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(leftover)
        return time.monotonic() - begun
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def memory(size: int | None, *, held: bool) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    told = f"{findings.amount(memory.available)} of {findings.amount(memory.total)} available"
    if size is not None and not held and memory.available < size:
        yield findings.warn(
            "memory",
            f"{told}; a save copies the state, {findings.amount(size)}, into memory before it is written",
            "free some memory",
        )
    else:
        yield findings.ok("memory", told)


def preload(spec: JobSpec) -> Iterator[Finding]:
    recipe: Any = orders.settings(spec, max(2, spec.cluster.min_devices))["warm"]
    if recipe is None:
        yield findings.ok("preload", "restart.warm is false: every restart imports torch anew")
        return
    if shutil.which(spec.python_path) is None:
        return  # told already
    server = warm.ForkServer(warm.Recipe.from_message(recipe))
    begun = time.monotonic()
    server.start()
    try:
        server.wait_ready(warm.READY_TIMEOUT_S)
    except warm.Cold as error:
        yield findings.warn(
            "preload", f"workers cannot be forked, every restart will take seconds longer: {error}",
            "take that module out of restart.preload, or what it does at import; or set restart.warm: false",
        )  # fmt: skip
    else:
        modules = f", {', '.join(spec.restart.preload)}" if spec.restart.preload else ""
        yield findings.ok(
            "preload", f"torch{modules} imported in {time.monotonic() - begun:.1f} s, and workers can be forked from it"
        )
    finally:
        server.close()
