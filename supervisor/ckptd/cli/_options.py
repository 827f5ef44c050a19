"""How are durations and amounts typed on a command line? Click's parameter types for them."""

from __future__ import annotations

import math
import re
from datetime import tzinfo
from typing import Any, Final

import click

from ckptd.sitelogs.times import parse_zone
from ckptd.units import checked_duration, parse_duration, shortened

_NUMBER: Final = re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


class Duration(click.ParamType[float]):
    """`30s`, `10m`, `2h` or a number of seconds, as in job.yaml. Seconds."""

    name = "duration"

    def __init__(self, *, positive: bool = False) -> None:
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            text = str(value).strip()
            seconds = checked_duration(float(text), text) if _NUMBER.fullmatch(text) else parse_duration(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self.positive and seconds <= 0:
            self.fail(f"{shortened(text)} must be longer than nothing", param, ctx)
        return seconds


class Amount(click.ParamType[float]):
    """A number above zero, and finite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{shortened(value)} is not a number", param, ctx)
        if not 0 < number < math.inf:
            self.fail(f"{shortened(value)} is not a number above zero", param, ctx)
        return number


class Zone(click.ParamType[tzinfo]):
    """A time zone: `UTC`, `+08:00` or `Europe/Berlin`."""

    name = "zone"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tzinfo:
        if isinstance(value, tzinfo):
            return value
        try:
            return parse_zone(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
