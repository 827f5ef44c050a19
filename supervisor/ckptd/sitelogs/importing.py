"""How does a file become rows of a log? Its kind is found out, then its reader asked."""

from __future__ import annotations

from ckptd.errors import UsageError
from ckptd.sitelogs import events_csv, sacct
from ckptd.sitelogs.reading import Options, Parsed, text_of
from ckptd.units import shortened


def read(data: bytes, options: Options) -> Parsed | None:
    """The rows of a file; None: it is empty.

    Raises:
        UsageError: it is neither a CSV nor of `sacct -P`, or something has to be said first: a zone, devices, a column.
    """
    text = text_of(data, options.source).lstrip("\r\n")
    if not text.strip():
        return None
    first = text.splitlines()[0]
    if sacct.looks_like(first):
        return sacct.read(text, options)
    if not any(delimiter in first for delimiter in ",;\t|"):
        raise UsageError(f"{options.source} is neither a CSV nor of `sacct -P`: it begins with {shortened(first)}")
    return events_csv.read(text, options)
