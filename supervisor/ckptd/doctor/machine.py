"""Is this machine fit for a night of training, whatever the job?"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from typing import Final

from ckptd import hostfacts
from ckptd.doctor import findings
from ckptd.doctor.findings import Finding

SHM: Final = "/dev/shm"  # noqa: S108  it is looked at, nothing is put there
LEAST_SHM: Final = 1 << 30
"""Docker gives 64 MiB, which a DataLoader's workers fill with a few batches."""
LEAST_OPEN_FILES: Final = 4096
LEAST_PROCESSES: Final = 4096


def clock() -> Iterator[Finding]:
    synchronised = hostfacts.clock_synchronised()
    if synchronised:
        yield findings.ok("clock", "synchronised, says the kernel")
    elif synchronised is None:
        yield findings.warn("clock", "the kernel does not say whether it is synchronised", "look at `timedatectl`")
    else:
        yield findings.warn(
            "clock",
            "not synchronised, says the kernel: times in the ledger and in metrics will not fit those of other machines",
            "start chronyd or systemd-timesyncd (in a container: on its host)",
        )


def shared_memory() -> Iterator[Finding]:
    if not os.path.isdir(SHM):
        yield findings.fail("shared memory", f"there is no {SHM}", "mount a tmpfs there")
        return
    shm = hostfacts.filesystem(SHM)
    told = f"{SHM} has {findings.amount(shm.size)}, {findings.amount(shm.free)} of it free"
    if shm.free < LEAST_SHM:
        yield findings.warn(
            "shared memory",
            f"{told}: workers of a DataLoader hand their batches over there, and end with a bus error when it is full",
            f"docker run --shm-size=16g or --ipc=host; otherwise mount -o remount,size=16G {SHM}, or clean it up",
        )
    else:
        yield findings.ok("shared memory", told)


def limits() -> Iterator[Finding]:
    files, processes, pids = (
        hostfacts.limit(resource.RLIMIT_NOFILE),
        hostfacts.limit(resource.RLIMIT_NPROC),
        hostfacts.pids_limit(),
    )
    if files is not None and files < LEAST_OPEN_FILES:
        yield findings.warn(
            "limits", f"a process may have {files} open files: DataLoader workers and NCCL use up more",
            "ulimit -n 65536; in a unit of systemd: LimitNOFILE=1048576",
        )  # fmt: skip
    for count, where, todo in (
        (processes, "this user", "ulimit -u unlimited"), (pids, "this cgroup", "docker run --pids-limit=-1, or TasksMax=infinity"),
    ):  # fmt: skip
        if count is not None and count < LEAST_PROCESSES:
            yield findings.warn(
                "limits", f"{where} may have {count} processes and threads; a worker alone has dozens", todo
            )
    core = hostfacts.limit(resource.RLIMIT_CORE)
    pattern = hostfacts.read("/proc/sys/kernel/core_pattern") or ""
    if core != 0 and not pattern.startswith("|"):
        yield findings.warn(
            "limits", "a worker that crashes writes all its memory into a core file, which takes minutes and fills disks",
            "ulimit -c 0, unless you want them",
        )  # fmt: skip
    told = ["no limit" if count is None else str(count) for count in (files, processes, pids)]
    yield findings.ok("limits", f"open files {told[0]}; processes of this user {told[1]}, of this cgroup {told[2]}")


def overcommit() -> Iterator[Finding]:
    if hostfacts.read("/proc/sys/vm/overcommit_memory") == "2":
        yield findings.warn(
            "memory", "vm.overcommit_memory is 2: a large process cannot fork, and warm starts and DataLoaders do",
            "sysctl vm.overcommit_memory=0",
        )  # fmt: skip


def kernel_log() -> Iterator[Finding]:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        yield findings.warn(
            "kernel log",
            f"/dev/kmsg cannot be read ({error.strerror}): kills for memory and GPU errors (Xid) are not told apart from others",
            "let this user read it: sysctl kernel.dmesg_restrict=0, or in a container pass the device /dev/kmsg",
        )
    else:
        yield findings.ok("kernel log", "can be read: kills for memory and GPU errors will be recognised")


def host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        begun = time.monotonic()
        socket.getaddrinfo(name, None)
        took = time.monotonic() - begun
    except OSError as error:
        yield findings.warn(
            "network", f"the name of this machine, {name}, has no address ({error}): gloo and NCCL may look for it",
            f"add {name} to /etc/hosts",
        )  # fmt: skip
        return
    if took > 1.0:
        yield findings.warn("network", f"looking up {name} takes {took:.1f} s", f"add {name} to /etc/hosts")
    else:
        yield findings.ok("network", f"this machine is {name}")
