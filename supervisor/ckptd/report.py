"""What is the whole story of a run? Its overview out of the ledger, with the last lines of the culprits' logs."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from ckptd.core import overview
from ckptd.core.overview import Overview
from ckptd.errors import UsageError
from ckptd.ledger import Ledger
from ckptd.node.reports import tail_of
from ckptd.rundir import RunDir
from ckptd.units import checked_duration, parse_duration

INTERRUPTIONS: Final = 200
"""How many of the newest interruptions a report tells, with their logs."""
LOG_BYTES: Final = 16_384
WHAT_IF: Final = ("restart", "stall", "upload", "interval")

_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


def parse_what_if(text: str) -> dict[str, float]:
    """The question `restart=2m,stall=5s`, in seconds.

    Raises:
        UsageError: an unknown name, a name given twice, or something that is no duration.
    """
    asked: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in WHAT_IF or not equals:
            raise UsageError(
                f"--what-if {text}: {item.strip()!r} is none of {', '.join(f'{n}=DURATION' for n in WHAT_IF)}"
            )
        if name in asked:
            raise UsageError(f"--what-if {text}: {name} is given twice")
        try:
            asked[name] = checked_duration(float(value), value) if _NUMBER.fullmatch(value) else parse_duration(value)
        except ValueError as error:
            raise UsageError(f"--what-if {text}: {name}: {error}") from None
    if asked.get("interval") == 0:
        raise UsageError(f"--what-if {text}: an interval of 0 leaves no time to train")
    return asked


def build(run_dir: RunDir, status: dict[str, Any], *, what_if: list[dict[str, float]]) -> dict[str, Any]:
    """The overview document of a run, as its page shows it, with more interruptions and their logs.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    folded = Overview(interruptions=INTERRUPTIONS)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        for _, event in ledger.events():
            folded.apply(event)
    document = folded.document(status, asked=what_if or None)
    for row in document["interruptions"]:
        row["log"] = _log(run_dir, row["attempt"], row["rank"])
    return document


def _log(run_dir: RunDir, attempt: int | None, rank: int | None) -> dict[str, str] | None:
    """The last lines that the culprit wrote to its standard error; None where there is no such file here, or it is empty."""
    if attempt is None or rank is None:
        return None
    path = str(run_dir.attempt_dir(attempt) / f"rank{rank}.err")
    for piece in (path, f"{path}.1"):  # a log that has just been cut is empty, and its end lies beside it
        text = overview.tail(tail_of(piece, LOG_BYTES))
        if text.strip():
            return {"path": os.path.relpath(piece, run_dir.path), "text": text}
    return None
