"""What will go wrong tonight? A machine, and the job that is to run on it, are looked at before the night.

Each check gives one or more findings, in the order of this module; none raises. Nothing is changed, but for a file that is
written to each tier and removed, and a forkserver that is started and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import psutil

from ckptd import __version__, hostfacts, jobhost, orders
from ckptd.core import events
from ckptd.errors import CkptdError
from ckptd.hostfacts import Filesystem
from ckptd.jobspec import JobSpec, Tier
from ckptd.ledger import Ledger
from ckptd.node import health, warm
from ckptd.rundir import RunDir

GIB: Final = 1 << 30
LEAST_TORCH: Final = (2, 9)
SHM: Final = "/dev/shm"  # noqa: S108  it is looked at, nothing is put there
LEAST_SHM: Final = GIB
"""Docker gives 64 MiB, which a DataLoader's workers fill with a few batches."""
LEAST_LEDGER_ROOM: Final = GIB
LEAST_OPEN_FILES: Final = 4096
LEAST_PROCESSES: Final = 4096
LEAST_FILES: Final = 10_000
SLOW_PROBE_S: Final = 2.0
INTERPRETER_PATIENCE_S: Final = 60.0

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. `fail`: the run will not start, or will not save; `warn`: it may go wrong."""

    check: str
    level: Level
    what: str
    todo: str = ""
    """What to do about it; empty where all is well."""

    def to_json(self) -> dict[str, str]:
        """As `ckptd doctor --json` prints it."""
        return asdict(self)


def _ok(check: str, what: str) -> Finding:
    return Finding(check=check, level="ok", what=what)


def _warn(check: str, what: str, todo: str) -> Finding:
    return Finding(check=check, level="warn", what=what, todo=todo)


def _fail(check: str, what: str, todo: str) -> Finding:
    return Finding(check=check, level="fail", what=what, todo=todo)


def examine(spec: JobSpec | None) -> Iterator[Finding]:
    """All findings, one by one as they are made; None: only of the machine."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("clock", _clock), ("shared memory", _shared_memory), ("limits", _limits), ("memory", _overcommit),
        ("kernel log", _kernel_log), ("network", _names),
    ]  # fmt: skip
    if spec is not None:
        held = RunDir(spec.run_dir_path).lock_holder() is not None
        size = checkpoint_size(spec)
        checks += [
            ("python", lambda: _python(spec)),
            ("devices", lambda: _devices(spec)),
            ("run directory", lambda: _run_directory(spec)),
            ("port", lambda: _port(spec, held=held)),
            *((f"tier {tier.name}", lambda tier=tier: _tier(spec, tier, size)) for tier in spec.checkpoint.tiers),
            ("memory", lambda: _staging(size, held=held)),
            ("preload", lambda: _preload(spec)),
        ]
    else:
        checks.insert(0, ("python", _this_python))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that cannot be made says so, and the others are made
            yield _warn(name, f"cannot be looked at: {type(error).__name__}: {error}", "look at it by hand")


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


def amount(size: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


# --- the machine ------------------------------------------------------------------------------------------------------


def _clock() -> Iterator[Finding]:
    synchronised = hostfacts.clock_synchronised()
    if synchronised:
        yield _ok("clock", "synchronised, says the kernel")
    elif synchronised is None:
        yield _warn("clock", "the kernel does not say whether it is synchronised", "look at `timedatectl`")
    else:
        yield _warn(
            "clock",
            "not synchronised, says the kernel: times in the ledger and in metrics will not fit those of other machines",
            "start chronyd or systemd-timesyncd (in a container: on its host)",
        )


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir(SHM):
        yield _fail("shared memory", f"there is no {SHM}", "mount a tmpfs there")
        return
    shm = hostfacts.filesystem(SHM)
    told = f"{SHM} has {amount(shm.size)}, {amount(shm.free)} of it free"
    if shm.free < LEAST_SHM:
        yield _warn(
            "shared memory",
            f"{told}: workers of a DataLoader hand their batches over there, and end with a bus error when it is full",
            f"docker run --shm-size=16g or --ipc=host; otherwise mount -o remount,size=16G {SHM}, or clean it up",
        )
    else:
        yield _ok("shared memory", told)


def _limits() -> Iterator[Finding]:
    files, processes, pids = (
        hostfacts.limit(resource.RLIMIT_NOFILE),
        hostfacts.limit(resource.RLIMIT_NPROC),
        hostfacts.pids_limit(),
    )
    if files is not None and files < LEAST_OPEN_FILES:
        yield _warn(
            "limits", f"a process may have {files} open files: DataLoader workers and NCCL use up more",
            "ulimit -n 65536; in a unit of systemd: LimitNOFILE=1048576",
        )  # fmt: skip
    for count, where, todo in (
        (processes, "this user", "ulimit -u unlimited"), (pids, "this cgroup", "docker run --pids-limit=-1, or TasksMax=infinity"),
    ):  # fmt: skip
        if count is not None and count < LEAST_PROCESSES:
            yield _warn("limits", f"{where} may have {count} processes and threads; a worker alone has dozens", todo)
    core = hostfacts.limit(resource.RLIMIT_CORE)
    pattern = hostfacts.read("/proc/sys/kernel/core_pattern") or ""
    if core != 0 and not pattern.startswith("|"):
        yield _warn(
            "limits", "a worker that crashes writes all its memory into a core file, which takes minutes and fills disks",
            "ulimit -c 0, unless you want them",
        )  # fmt: skip
    told = ["no limit" if count is None else str(count) for count in (files, processes, pids)]
    yield _ok("limits", f"open files {told[0]}; processes of this user {told[1]}, of this cgroup {told[2]}")


def _overcommit() -> Iterator[Finding]:
    if hostfacts.read("/proc/sys/vm/overcommit_memory") == "2":
        yield _warn(
            "memory", "vm.overcommit_memory is 2: a large process cannot fork, and warm starts and DataLoaders do",
            "sysctl vm.overcommit_memory=0",
        )  # fmt: skip


def _kernel_log() -> Iterator[Finding]:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        yield _warn(
            "kernel log",
            f"/dev/kmsg cannot be read ({error.strerror}): kills for memory and GPU errors (Xid) are not told apart from others",
            "let this user read it: sysctl kernel.dmesg_restrict=0, or in a container pass the device /dev/kmsg",
        )
    else:
        yield _ok("kernel log", "can be read: kills for memory and GPU errors will be recognised")


def _names() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        begun = time.monotonic()
        socket.getaddrinfo(name, None)
        took = time.monotonic() - begun
    except OSError as error:
        yield _warn(
            "network", f"the name of this machine, {name}, has no address ({error}): gloo and NCCL may look for it",
            f"add {name} to /etc/hosts",
        )  # fmt: skip
        return
    if took > 1.0:
        yield _warn("network", f"looking up {name} takes {took:.1f} s", f"add {name} to /etc/hosts")
    else:
        yield _ok("network", f"this machine is {name}")


# --- the job ----------------------------------------------------------------------------------------------------------

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


def _this_python() -> Iterator[Finding]:
    yield from _judge_python(_ask_python(sys.executable, {}))


def _python(spec: JobSpec) -> Iterator[Finding]:
    problem = jobhost.interpreter_problem(spec)
    if problem is not None:
        yield _fail(
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
        yield _fail("python", told, "install torch for it")
        return
    parts = torch.split("+")[0].split(".")[:2]
    if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < LEAST_TORCH:
        yield _fail("python", told, f"this ckptd needs torch {'.'.join(map(str, LEAST_TORCH))} or newer")
    elif found["ckptd"] not in (None, __version__):
        yield _warn("python", f"{told}; this is ckptd {__version__}", "install the same version for the workers")
    else:
        yield _ok("python", told)


def _devices(spec: JobSpec) -> Iterator[Finding]:
    if spec.cluster.launcher != "local":
        yield _ok(
            "devices",
            f"looked for by the agents: `{spec.cluster.launcher}` starts them; run this on a node for the rest",
        )
        return
    wanted = spec.cluster.devices_per_node
    try:
        found = health.find_devices(None if wanted == "auto" else wanted)
    except CkptdError as error:
        yield _fail("devices", str(error), "see `nvidia-smi`, or set cluster.devices_per_node")
        return
    count, kind = len(found.devices), "GPUs" if found.gpus else "CPU workers"
    if not jobhost.allowed_worlds(spec, count):
        yield _fail(
            "devices",
            f"{count} {kind}, of which no world can be made",
            "see cluster.min_devices, multiple_of and batch.global",
        )
        return
    idle = jobhost.idle_devices(spec)
    if idle is not None:
        yield _warn("devices", f"{count} {kind}; {idle}", "change batch.global, or give the devices to somebody else")
    else:
        yield _ok("devices", f"{count} {kind}")
    if found.gpus:
        yield from _cuda(spec)
    if spec.health.command is not None or found.gpus:
        answer = asyncio.run(health.ask(found, spec.health.command))
        if answer.unhealthy or answer.detail:
            bad = f"unhealthy devices: {sorted(answer.unhealthy)}; " if answer.unhealthy else ""
            yield _warn("devices", f"{bad}{answer.detail}".rstrip("; "), "repair them, or the command that says so")


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
        yield _fail(
            "devices", "there are GPUs, and this torch was built without CUDA", "install the CUDA build of torch"
        )
    elif words[2] != "True":
        yield _fail(
            "devices",
            f"torch cannot use the GPUs, which the driver shows: {done.stderr.strip()[-300:]}",
            f"see `nvidia-smi`; the driver may be too old for CUDA {words[1]}",
        )
    else:
        yield _ok("devices", f"torch can use them, with CUDA {words[1]}")


def _run_directory(spec: JobSpec) -> Iterator[Finding]:
    path = spec.run_dir_path
    place = hostfacts.filesystem(path)
    above = _existing(str(path))
    if not os.access(above, os.W_OK | os.X_OK):
        yield _fail("run directory", f"{above} cannot be written by this user", "name another run_dir in job.yaml")
        return
    told = f"{path}, {place.kind}, {amount(place.free)} free"
    if place.network:
        yield _warn(
            "run directory",
            f"{told}: a network file system. SQLite's write-ahead log and locks are not safe there, and each event waits for it",
            "set run_dir to a directory on a local disk; checkpoints may stay where they are",
        )
    elif place.memory:
        yield _warn(
            "run directory",
            f"{told}: in memory. The run's history is lost with a reboot",
            "set run_dir to a directory on a disk",
        )
    elif place.free < LEAST_LEDGER_ROOM:
        yield _warn(
            "run directory",
            f"{told}: the ledger and the logs of workers need room",
            "make room, or name another run_dir",
        )
    else:
        yield _ok("run directory", told)
    try:
        RunDir(path).socket_path()
    except CkptdError as error:
        yield _fail("run directory", str(error), "name a run_dir with a shorter path")


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def _port(spec: JobSpec, *, held: bool) -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)):
        pass  # the store of each attempt has to find one
    listen = spec.web.listen
    if listen is None:
        yield _ok("port", "no web, as job.yaml says")
        return
    if held:
        yield _ok("port", f"{listen} is this run's own daemon's, which lives")
        return
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if "[" in host else socket.AF_INET
        ):
            yield _ok("port", f"{listen} is free")
    except OSError as error:
        yield _fail(
            "port", f"{listen} cannot be listened on: {error.strerror}", "change web.listen; port 0 is any free one"
        )
        return
    if host.strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        yield _warn(
            "port", f"{listen} is open to other machines, and whoever reaches it can read status and metrics",
            "listen on 127.0.0.1, or put a proxy or a firewall before it",
        )  # fmt: skip


def _tier(spec: JobSpec, tier: Tier, size: int | None) -> Iterator[Finding]:
    name = f"tier {tier.name}"
    if tier.path is None:
        yield _ok(name, f"{tier.url}: an object store is not looked at from here")
        return
    directory = str(spec.tier_dir(tier))
    place = hostfacts.filesystem(directory)
    try:
        took = _probe(directory)
    except OSError as error:
        yield _fail(
            name,
            f"{directory} cannot be written: {error.strerror} ({error.filename})",
            "see its owner, rights, quota and mount",
        )
        return
    told = f"{directory}, {place.kind}, {amount(place.free)} free"
    yield from _room(name, told, place, tier, size)
    if place.free_files is not None and place.free_files < LEAST_FILES:
        yield _warn(
            name,
            f"{directory}: only {place.free_files} more files can be made there",
            "delete files, or name another place",
        )
    if took > SLOW_PROBE_S:
        yield _warn(
            name,
            f"{directory}: a small file took {took:.1f} s to be written safely",
            "see what else uses that disk or network",
        )
    if place.memory and all(
        t.path is not None and hostfacts.filesystem(spec.tier_dir(t)).memory for t in spec.checkpoint.tiers
    ):
        yield _warn(
            name, f"{directory} is in memory, and no tier is on a disk: a reboot takes every checkpoint along",
            "add a tier on a disk after it",
        )  # fmt: skip


def _room(name: str, told: str, place: Filesystem, tier: Tier, size: int | None) -> Iterator[Finding]:
    """Whether the checkpoints fit that are to be kept, and the one that is written before the oldest goes."""
    if size is None:
        yield _ok(name, f"{told}; how large a checkpoint is, the first one will show")
        return
    wanted = size * (tier.keep_last + 1)
    of = f"{told}; a checkpoint has {amount(size)}"
    if place.free < size:
        yield _fail(name, f"{of}: not one more fits", "make room, or set keep_last lower")
    elif place.size < wanted:
        yield _fail(
            name, f"{of}: {tier.keep_last} that are kept and one that is written need {amount(wanted)}, more than there is at all",
            f"set keep_last to {max(1, place.size // size - 2)}, or name a larger place",
        )  # fmt: skip
    elif place.free < 2 * size:
        yield _warn(name, f"{of}: few more fit", "make room, or set keep_last lower")
    else:
        yield _ok(name, of)


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


def _staging(size: int | None, *, held: bool) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    told = f"{amount(memory.available)} of {amount(memory.total)} available"
    if size is not None and not held and memory.available < size:
        yield _warn(
            "memory",
            f"{told}; a save copies the state, {amount(size)}, into memory before it is written",
            "free some memory",
        )
    else:
        yield _ok("memory", told)


def _preload(spec: JobSpec) -> Iterator[Finding]:
    recipe: Any = orders.settings(spec, max(2, spec.cluster.min_devices))["warm"]
    if recipe is None:
        yield _ok("preload", "restart.warm is false: every restart imports torch anew")
        return
    if shutil.which(spec.python_path) is None:
        return  # told already
    server = warm.ForkServer(warm.Recipe.from_message(recipe))
    begun = time.monotonic()
    server.start()
    try:
        server.wait_ready(warm.READY_TIMEOUT_S)
    except warm.Cold as error:
        yield _warn(
            "preload", f"workers cannot be forked, every restart will take seconds longer: {error}",
            "take that module out of restart.preload, or what it does at import; or set restart.warm: false",
        )  # fmt: skip
    else:
        modules = f", {', '.join(spec.restart.preload)}" if spec.restart.preload else ""
        yield _ok(
            "preload", f"torch{modules} imported in {time.monotonic() - begun:.1f} s, and workers can be forked from it"
        )
    finally:
        server.close()
