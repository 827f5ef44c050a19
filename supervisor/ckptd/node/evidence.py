"""What the machine knows about a death: its kernel's log, and whether a cgroup ran out of memory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque

from ckptd.core import kernel_log

RECENT_S = 300.0
"""What the kernel said longer ago is not about a death of now."""
KEPT = 1000
"""Lines of interest that are kept."""
_CGROUP = "/sys/fs/cgroup"


class OomCounter:
    """Counts the kernel's kills for memory in the cgroup of this process, version 1 or 2."""

    def __init__(self) -> None:
        self._path = _oom_file()
        self._before = self._count()

    def _count(self) -> int:
        if self._path is None:
            return 0
        with contextlib.suppress(OSError), open(self._path, encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def rose(self) -> bool:
        """Whether there was a kill since this object was made, or since the last call."""
        before, self._before = self._before, self._count()
        return self._before > before


def _oom_file() -> str | None:
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        name = "memory.events" if not controllers else "memory.oom_control"
        if controllers and "memory" not in controllers.split(","):
            continue
        # Inside a container the path is the host's, and the cgroup itself is mounted at the top.
        for base in (f"{_CGROUP}/memory", _CGROUP) if controllers else (_CGROUP, f"{_CGROUP}/unified"):
            for candidate in (os.path.join(base, path.lstrip("/"), name), os.path.join(base, name)):
                if os.path.exists(candidate):
                    return candidate
    return None


class KernelLog:
    """Follows /dev/kmsg from where it is now; where that may not be read, it finds nothing.

    Lines get the time at which they are read, so `look` wants to be called now and then: the kernel's own stamps drift
    away from every clock that we have.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT)
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    def news(self) -> kernel_log.Findings:
        """What was logged since the last call, in the last `RECENT_S` seconds."""
        self.look()
        now = time.monotonic()
        found = kernel_log.read(line for at, line in self._lines if now - at <= RECENT_S)
        self._lines.clear()
        return found

    def look(self) -> None:
        """Read what was logged, and keep what is of interest."""
        nothing = kernel_log.Findings()
        while self._fd is not None:
            try:
                record = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the ring overran us: go on with what is left of it
            except OSError:
                break
            line = re.sub(rb"^[^;]*;", b"", record, count=1).decode(errors="replace")
            if kernel_log.read([line]) != nothing:
                self._lines.append((time.monotonic(), line))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
