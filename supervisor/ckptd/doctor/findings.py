"""What is said of one thing that was looked at?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from ckptd.units import format_size

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


def ok(check: str, what: str) -> Finding:
    return Finding(check=check, level="ok", what=what)


def warn(check: str, what: str, todo: str) -> Finding:
    return Finding(check=check, level="warn", what=what, todo=todo)


def fail(check: str, what: str, todo: str) -> Finding:
    return Finding(check=check, level="fail", what=what, todo=todo)


def amount(size: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    return format_size(size, digits=3)
