"""How large do the logs of workers grow, and for how many attempts are they kept?

A worker writes its `rank<k>.out` and `.err` itself, so no pipe can hold it up and none breaks when the agent dies. The
files are open for appending: cutting one to nothing behind a writer's back is safe, it goes on at the new end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from ckptd.node.reports import tail_of
from ckptd_shim import contract

LOOK_INTERVAL_S: Final = 0.25
"""A rank that writes a gigabyte a second gets ahead by a quarter of one."""
_CHUNK: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The section `logs` of job.yaml."""

    max_size: int | None = 100 << 20
    """Bytes from which on a log is moved aside; None: never."""
    keep: int = 2
    """So many older pieces of a log stay, `.1` the newest, of `max_size` bytes and an eighth at most each."""
    keep_attempts: int | None = 50
    """So many of the newest attempts keep their directories; None: all."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rules:
        """As the daemon sends it."""
        return cls(**data)


def trim(path: str, rules: Rules) -> int:
    """Move a log aside if it is too large: its last `max_size` bytes become `.1`, what was `.1` becomes `.2`.

    Returns:
        Bytes that were thrown away, all older pieces apart; 0 as a rule.

    Raises:
        OSError: the log cannot be read or cut. Where only its copy cannot be written, it is cut all the same: a full
            disk is what all this is about.
    """
    if rules.max_size is None or _used(path) <= rules.max_size:
        return 0
    for number in range(rules.keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size - rules.max_size)
        try:
            end = _copy(fd, f"{path}.1", start, size)
        except OSError:
            end = start
        left_out = start + max(0, os.fstat(fd).st_size - end)
        os.ftruncate(fd, 0)
        return left_out
    finally:
        os.close(fd)


def _copy(source: int, path: str, start: int, size: int) -> int:
    """Copy from `start` to the end that the file now has; where the copy ends. The kernel moves the bytes."""
    with open(path, "wb", buffering=0) as target:
        if start:
            target.write(f"[ckptd: {start} bytes before this were thrown away: logs.max_size]\n".encode())
        position = start
        # What is written meanwhile is kept too, but a writer that is faster than this is not followed for ever.
        limit = size + (size - start) // 8
        while position < limit:
            moved = os.sendfile(target.fileno(), source, position, min(_CHUNK, limit - position))
            if moved == 0:
                break
            position += moved
    return position


def _used(path: str) -> int:
    """Bytes of a file that are really there: one whose writer does not append has a hole where it was cut."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return min(found.st_size, found.st_blocks * 512)


def trim_all(paths: Iterable[str], rules: Rules) -> dict[str, int | str]:
    """`trim` each; what a person may want to know of: bytes thrown away, or the error, by path."""
    told: dict[str, int | str] = {}
    for path in paths:
        try:
            left_out = trim(path, rules)
        except OSError as error:
            told[path] = str(error)
        else:
            if left_out:
                told[path] = left_out
    return told


class LogKeeper:
    """Looks after the logs of one node: those of the newest attempt and the agent's own. Used by one thread at a time."""

    def __init__(self, run_dir: str, agent_log: str) -> None:
        self._attempts = os.path.join(run_dir, "attempts")
        self._agent_log = os.path.join(run_dir, agent_log)
        self._paths: list[str] = []
        self._number = 0
        self._forgotten = 0
        self._told: set[str] = set()

    def begin(self, number: int, directory: str, ranks: Iterable[int]) -> None:
        """From now on look after this attempt, whose `ranks` are on this node. Told again, it changes nothing."""
        if number != self._number:
            names = (contract.stdout_name, contract.stderr_name)
            self._paths = [os.path.join(directory, name(rank)) for rank in ranks for name in names]
            self._number = number

    def look(self, rules: Rules) -> list[str]:
        """Cut what is too large, also after the attempt has ended; what a person should know, each thing once."""
        found = trim_all([*self._paths, self._agent_log], rules)
        if self._forgotten != self._number:
            self._forgotten = self._number
            forget_attempts(self._attempts, rules, in_use={self._number})
        new = [path for path in found if path not in self._told]
        self._told.update(new)
        return [f"{path} grows too fast (logs.max_size): {_how_much(found[path])}" for path in new]


def _how_much(found: int | str) -> str:
    return f"{found} bytes of it were thrown away" if isinstance(found, int) else f"it cannot be cut: {found}"


def tail(path: str, size: int = 4096) -> str:
    """The end of a log, from the piece before it too where it was cut a moment ago."""
    missing = size - _length(path)
    before = tail_of(f"{path}.1", missing) if missing > 0 else ""
    return before + tail_of(path, size)


def _length(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def forget_attempts(directory: str, rules: Rules, *, in_use: Collection[int]) -> list[int]:
    """Delete the directories of the oldest attempts below `directory`; returns which. Never the newest, nor one in use.

    A directory whose name is no number is somebody else's.
    """
    if rules.keep_attempts is None:
        return []
    try:
        names = contract.attempt_dirs(directory)
    except OSError:
        return []
    doomed = [number for number in sorted(names)[: -max(1, rules.keep_attempts)] if number not in in_use]
    for number in doomed:
        shutil.rmtree(os.path.join(directory, names[number]), ignore_errors=True)
    return doomed
