"""What is this machine like? File systems, clock, limits: asked of the kernel, judged by nobody here."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from dataclasses import dataclass
from typing import Final

NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs",
    "pvfs2", "panfs", "wekafs", "virtiofs", "vboxsf",
})  # fmt: skip
"""Types of file systems whose files other machines change. FUSE is counted in: nobody knows what is behind it."""
MEMORY: Final = frozenset(("tmpfs", "ramfs", "devtmpfs"))
_STA_UNSYNC: Final = 0x40
_STATUS_OFFSET: Final = 40
"""Of `status` in `struct timex` on a machine with 8-byte longs."""


@dataclass(frozen=True, kw_only=True)
class Filesystem:
    """Where a path lies, or would lie if it existed."""

    kind: str
    """As /proc/mounts calls it."""
    mountpoint: str
    size: int
    """Bytes."""
    free: int
    """Bytes that this user may write."""
    free_files: int | None
    """Files that can be made; None: the file system has no such limit."""

    @property
    def network(self) -> bool:
        """Whether other machines may be at work on it too."""
        return self.kind in NETWORK or self.kind.startswith("fuse")

    @property
    def memory(self) -> bool:
        """Whether it lives in memory: full when that is, gone with a reboot."""
        return self.kind in MEMORY


def filesystem(path: str | os.PathLike[str]) -> Filesystem:
    """The file system of `path`, or of the nearest directory above it that exists.

    Raises:
        OSError: it cannot be asked.
    """
    place = os.path.realpath(path)
    while not os.path.exists(place) and place != "/":
        place = os.path.dirname(place)
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split(" ")[1:3] for line in file]
    best, kind = "/", "?"
    for escaped, this in mounts:
        where = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
        # Of several mounted at one place the last one is seen.
        if (place == where or place.startswith(where.rstrip("/") + "/")) and len(where) >= len(best):
            best, kind = where, this
    stat = os.statvfs(place)
    return Filesystem(
        kind=kind, mountpoint=best, size=stat.f_blocks * stat.f_frsize, free=stat.f_bavail * stat.f_frsize,
        free_files=stat.f_favail if stat.f_files else None,
    )  # fmt: skip


def clock_synchronised() -> bool | None:
    """Whether the kernel believes its clock to be synchronised (adjtimex(2)); None: it does not say."""
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    buffer = ctypes.create_string_buffer(512)  # all zeros: change nothing, only tell
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except AttributeError:
        return None
    if answer < 0:
        return None
    return not int.from_bytes(buffer.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], "little") & _STA_UNSYNC


def limit(which: int) -> int | None:
    """The soft limit of a resource (`resource.RLIMIT_...`), None where there is none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def pids_limit() -> int | None:
    """How many processes and threads the cgroup of this process may have; None: no limit is seen."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in lines:
        if controllers and "pids" not in controllers.split(","):
            continue
        base = "/sys/fs/cgroup/pids" if controllers else "/sys/fs/cgroup"
        for candidate in (f"{base}{path.rstrip('/')}/pids.max", f"{base}/pids.max"):
            text = read(candidate)
            if text is not None and text.isdecimal():
                return int(text)
    return None


def read(path: str) -> str | None:
    """The content of a small file of the kernel's, stripped; None: it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65_536).strip()
    except OSError:
        return None
