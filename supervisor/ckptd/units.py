"""How long is `10m`, and how much is `512MiB`? Durations to seconds, sizes to bytes, and durations back to text."""

from __future__ import annotations

import math
import re
from typing import Final

SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
LONGEST: Final = 100 * 365.25 * 86400.0
"""A duration above a century is a slip of the pen, and an infinite one would reach the formulas. Seconds."""

_NUMBER: Final = r"(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?"
_DURATION: Final = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_SIZE: Final = re.compile(rf"({_NUMBER})({'|'.join(_BYTES)})")
_COLONS: Final = re.compile(r"[0-9]+(:[0-9]+)+(\.[0-9]*)?")


def parse_duration(text: str) -> float:
    """Seconds in `30s`, `10m`, `2h`, `1d`, `500ms` or `1.5h`: one number, one unit, no space.

    Raises:
        ValueError: anything else, a bare number included (only the caller knows whether it stood without quotes).
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        if _COLONS.fullmatch(text):
            raise ValueError(f"{text!r} could mean hours or minutes (YAML reads it in base 60); write 90s, 10m or 2h")
        raise ValueError(f"{shortened(text)} is not a duration; write 3s, 10m, 2h or a number of seconds")
    return checked_duration(float(match[1]) * SECONDS[match[2]], text)


def checked_duration(seconds: float, text: str) -> float:
    """`seconds`, if it is a span of time that a job may have. Raises ValueError that shows `text`."""
    if not math.isfinite(seconds) or seconds > LONGEST:
        raise ValueError(f"{shortened(text)} is longer than a century")
    if seconds < 0:
        raise ValueError(f"{shortened(text)} is negative")
    return seconds


def parse_size(text: str) -> int:
    """Bytes in `512MiB` (powers of 1,024) or `10GB` (powers of 1,000).

    Raises:
        ValueError: anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{shortened(text)} is not a size; write 512MiB, 10GB or 4096B")
    return round(float(match[1]) * _BYTES[match[2]])


def format_duration(seconds: float) -> str:
    """A duration for people, in the largest unit that leaves at least one of it: `2h`, `90s` is `1.5m`, `250ms`."""
    for unit in ("d", "h", "m", "s"):
        if seconds >= SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:.3g}{unit}"
    return f"{seconds * 1e3:.3g}ms"


def format_size(value: float, *, digits: int = 4) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.{digits}g} {unit}"
        value /= 1024
    return f"{value:.{digits}g} TiB"


def shortened(value: object, limit: int = 60) -> str:
    """`repr` of a value, cut where an error message would drown in it."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def described(value: object) -> str:
    """A value out of a YAML file, for an error message."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else shortened(str(value))
