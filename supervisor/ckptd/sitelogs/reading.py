"""What is common to all files of interruptions: their text, what was asked for, and what came out of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptd.core.sitelog import Form, Row
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo

MAX_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to read a file: what the command line says. None: find out, or do without."""

    zone: tzinfo | None = None
    end_zone: tzinfo | None = None
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles (`time`, `date`, `end`, `down`, `kind`, `cause`, `severity`, `devices`, `count`) and their columns."""
    time_format: str | None = None
    devices: float | None = None
    devices_per_node: float | None = None
    failure_words: frozenset[str] = frozenset()
    """Kinds, or states of sacct, that are failures whatever is usual; lower case."""
    planned_words: frozenset[str] = frozenset()
    only: tuple[tuple[str, str], ...] = ()
    """(column, value): rows with anything else there do not belong to the log."""
    to_at: float | None = None
    now: float = float("inf")
    """Nothing has happened later than this."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something about one row of the file."""

    line: int
    what: str


@dataclass(kw_only=True, slots=True)
class Parsed:
    """What a file says."""

    form: Form
    rows: list[Row] = field(default_factory=list)
    read: int = 0
    """Rows in the file, the header apart."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Rows that are right and of no concern here, and why."""
    left_out: list[Remark] = field(default_factory=list)
    """Rows that cannot be used, and why."""
    notes: list[Remark] = field(default_factory=list)
    """Rows that were used with something in them left out or taken for something."""

    def add(self, row: Row, seen: set[str]) -> None:
        """Take a row in, unless the file has it already."""
        if row.digest in seen:
            self.passed_over["the same row again"] += 1
            self.notes.append(Remark(row.line, "is in the file already; counted once"))
            return
        seen.add(row.digest)
        self.rows.append(row)


def text_of(data: bytes, source: str) -> str:
    """The text of a file in UTF-8; bytes that are not come out as U+FFFD.

    Raises:
        UsageError: it is no text.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{source} is in UTF-16; convert it to UTF-8, as with iconv -f UTF-16 -t UTF-8")
    if b"\0" in data:
        raise UsageError(f"{source} holds zero bytes, so it is not a text; give a CSV or the output of sacct -P")
    return data.decode("utf-8-sig", errors="replace")


def digest_of(parts: Sequence[str]) -> str:
    """A name for a row by its content."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", errors="replace")).hexdigest()[:32]
