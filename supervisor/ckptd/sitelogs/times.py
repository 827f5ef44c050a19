"""Which moment is meant by a time in a log? Formats that can mean one thing only, and a zone that somebody must name."""

from __future__ import annotations

import re
import zoneinfo
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Final

from ckptd.errors import UsageError
from ckptd.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable

_CLOCK: Final = r"(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,]\d+)?)?"
_YEAR_FIRST: Final = re.compile(
    rf"(\d{{4}})[-./](\d{{1,2}})[-./](\d{{1,2}})(?:[T ]+{_CLOCK})?\s*(Z|UTC|[+-]\d\d:?\d\d)?"
)
_YEAR_LAST: Final = re.compile(rf"(\d{{1,2}})/(\d{{1,2}})/(\d{{4}})(?:[T ]+{_CLOCK})?\s*(Z|UTC|[+-]\d\d:?\d\d)?")
_EPOCH: Final = re.compile(r"\d{9,10}(\.\d+)?")
_FIRST_YEAR: Final = 1980
"""What is older is a slip, or a clock that was not set: Slurm shows 1970 where it knows nothing."""
_LAST_YEAR: Final = 2999
_OFFSET: Final = re.compile(r"(?:UTC|GMT)?([+-])(\d{1,2})(?::?(\d{2}))?")
_NOTHING: Final = frozenset({"", "unknown", "none", "n/a", "na", "null", "nan", "-", "invalid"})


def parse_zone(text: str) -> tzinfo:
    """The zone that is called `UTC`, `+08:00`, `UTC+8` or `Europe/Berlin`. Raises ValueError for anything else."""
    text = text.strip()
    if text.upper() in ("UTC", "GMT", "Z"):
        return UTC
    match = _OFFSET.fullmatch(text.upper())
    if match is not None and int(match[2]) <= 14 and int(match[3] or 0) < 60:
        offset = timedelta(hours=int(match[2]), minutes=int(match[3] or 0))
        return timezone(offset if match[1] == "+" else -offset)
    try:
        return zoneinfo.ZoneInfo(text)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{shortened(text)} is not a time zone; write UTC, +08:00 or Europe/Berlin") from None


class NoZone(UsageError):
    """A time without a zone, and none was given."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"the time {shortened(text)} has no zone; name it with --time-zone, as in --time-zone UTC, +08:00 or Europe/Berlin"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A time that was read."""

    at: float
    """Seconds since 1970."""
    day_only: bool = False
    """There was a date and no time of day; `at` is its noon."""
    twice: bool = False
    """The clocks were put back, so that this time came twice; the first is meant."""


def is_missing(text: str) -> bool:
    """Is this a way to say that there is no time?"""
    return text.strip().lower() in _NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeReader:
    """Reads the times of one column."""

    zone: tzinfo | None
    """Of times that do not say theirs. None: such a time is refused."""
    day_first: bool | None = None
    """Order of 3/4/2026. None: such a date is refused."""
    pattern: str | None = None
    """A format of strptime that all times have; None: the formats that are known."""

    def read(self, text: str) -> Moment:
        """The moment of `text`.

        Raises:
            NoZone: neither the text nor the reader says which zone is meant.
            ValueError: it is not a time, or one that never was.
        """
        text = text.strip()
        if self.pattern is not None:
            try:
                moment = datetime.strptime(text, self.pattern)  # noqa: DTZ007 - the zone comes below
            except ValueError:
                raise ValueError(f"{shortened(text)} is not a time like {self.pattern}") from None
            return self._placed(text, moment, moment.tzinfo, day_only=False)
        if _EPOCH.fullmatch(text):
            return Moment(at=float(text))
        match = _YEAR_FIRST.fullmatch(text)
        if match is not None:
            year, month, day = match[1], match[2], match[3]
        elif (match := _YEAR_LAST.fullmatch(text)) is not None:
            if self.day_first is None:
                raise ValueError(f"{shortened(text)} can be day/month or month/day; say which with --time-format")
            year, month, day = match[3], match[2], match[1]
            if not self.day_first:
                month, day = day, month
        else:
            raise ValueError(f"{shortened(text)} is not a time" if text else "there is no time")
        day_only = match[4] is None
        try:
            clock = (12, 0, 0) if day_only else (int(match[4]), int(match[5]), int(match[6] or 0))
            moment = datetime(int(year), int(month), int(day), *clock)  # noqa: DTZ001 - the zone comes below
        except ValueError as error:
            raise ValueError(f"{shortened(text)} is not a time: {error}") from None
        return self._placed(text, moment, parse_zone(match[7]) if match[7] else None, day_only=day_only)

    def _placed(self, text: str, moment: datetime, own: tzinfo | None, *, day_only: bool) -> Moment:
        zone = own or self.zone
        if zone is None:
            raise NoZone(text)
        local = moment.replace(tzinfo=zone)
        if moment.year < _FIRST_YEAR or moment.year > _LAST_YEAR:
            raise ValueError(f"{shortened(text)} is not of a year from {_FIRST_YEAR} to {_LAST_YEAR}")
        if local.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != moment.replace(tzinfo=None):
            raise ValueError(f"{shortened(text)} never was in {zone}: the clocks were put forward")
        twice = local.utcoffset() != local.replace(fold=1).utcoffset()
        return Moment(at=local.timestamp(), day_only=day_only, twice=twice)


def check_format(pattern: str) -> str:
    """The format, if strptime can read by it. Raises ValueError."""
    now = datetime(2026, 3, 29, 12, 34, 56, tzinfo=UTC)
    try:
        read = datetime.strptime(now.strftime(pattern), pattern)  # noqa: DTZ007 - a trial
    except (ValueError, re.error) as error:
        raise ValueError(f"{shortened(pattern)} is no format of strptime, such as %d.%m.%Y %H:%M: {error}") from None
    if read.date() != now.date():
        raise ValueError(f"{shortened(pattern)} does not give day, month and year, as %d.%m.%Y %H:%M does")
    return pattern


def day_first(texts: Iterable[str]) -> bool | None:
    """Do dates such as 3/4/2026 begin with the day? None: the column has none, or it does not show.

    It shows where a number above 12 stands in one place, and never in the other.
    """
    first = second = False
    for text in texts:
        match = _YEAR_LAST.fullmatch(text.strip())
        if match is not None:
            first |= int(match[1]) > 12
            second |= int(match[2]) > 12
    return first if first != second else None


_ELAPSED: Final = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,2}):(\d{2}(?:\.\d+)?)")


def parse_elapsed(text: str) -> float | None:
    """Seconds in Slurm's `[days-][hours:]minutes:seconds`; None: it is none."""
    match = _ELAPSED.fullmatch(text.strip())
    if match is None:
        return None
    return int(match[1] or 0) * 86_400.0 + int(match[2] or 0) * 3600.0 + int(match[3]) * 60.0 + float(match[4])
