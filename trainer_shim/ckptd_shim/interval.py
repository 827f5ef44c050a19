"""What may be written for `interval=`?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_interval(interval: float | str | Mapping[str, int] | None) -> tuple[float | None, int | None]:
    """(seconds, steps) of `interval=`, at most one of which is not None. Raises ValueError or TypeError."""
    if interval is None:
        return None, None
    if isinstance(interval, int | float) and not isinstance(interval, bool):
        seconds: float | None = float(interval)
    elif isinstance(interval, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", interval)
        seconds = float(match[1]) * _UNITS[match[2]] if match else None
    elif isinstance(interval, Mapping) and set(interval) == {"steps"}:
        steps = interval["steps"]
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"interval={interval!r}: steps should be 1 or more")
        return None, steps
    else:
        raise TypeError(f'interval={interval!r} should be seconds, a duration such as "10m", or {{"steps": 500}}')
    if seconds is None or not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f'interval={interval!r} should be a positive duration such as "30s", "10m" or "2h"')
    return seconds, None
