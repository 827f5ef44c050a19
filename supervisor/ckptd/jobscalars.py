"""How is a scalar of job.yaml read, once the schema has said what it should be?

Each reader takes what `yamltext` delivers (or a value of the right type, for a spec that is built in Python), and
raises ValueError with a message that says what to write instead.
"""

# ruff: noqa: TRY004 - pydantic makes a problem out of a ValueError, and lets a TypeError through

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from ckptd.units import checked_duration, described, parse_duration, parse_size, shortened
from ckptd.yamltext import Plain


@dataclass(frozen=True)
class Steps:
    """A number of optimizer steps where a duration could stand: `{steps: 500}`."""

    steps: int


@dataclass(frozen=True)
class Host:
    """An entry of `cluster.hosts`: a name as ssh takes it, and where that machine differs from the others."""

    host: str
    python: str | None = None
    """Interpreter of agent and workers there."""
    devices: int | None = None
    """How many devices it has, in place of `devices_per_node`."""


_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
_FLOAT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_OCTAL: Final = re.compile(r"[-+]?0[0-9_]+(\.[0-9]*)?|[-+]?0[xXoObB][0-9a-fA-F_]+")
_BASE60: Final = re.compile(r"[0-9]+(:[0-9]+)+(\.[0-9]*)?")
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_HOST: Final = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9._@:%\[\]-]{0,252}")
_LISTEN: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]*):([0-9]{1,5})")


def _bare(value: Any) -> str:
    """The text of an unquoted scalar that should be a number. ValueError for everything that is none."""
    if value is None:
        raise ValueError("needs a value")
    if not isinstance(value, str):
        raise ValueError(f"should be a number, is {described(value)}")
    if not isinstance(value, Plain):
        raise ValueError(f"should be a number, is the quoted text {shortened(str(value))}; leave the quotes out")
    text = str(value)
    if _OCTAL.fullmatch(text):
        raise ValueError(
            f"{text!r} could mean two numbers (YAML reads it as octal or hexadecimal); write it in decimal"
        )
    if _BASE60.fullmatch(text):
        raise ValueError(f"{text!r} is a number in base 60 to YAML; write seconds, or 90s, 10m, 2h where time is meant")
    return text


def read_whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = _bare(value)
    if not _INT.fullmatch(text) or len(text) > 18:
        raise ValueError(f"should be a whole number, is {shortened(text)}")
    return int(text)


def read_number(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    text = _bare(value)
    is_one = _INT.fullmatch(text) or (_FLOAT.fullmatch(text) and any(c.isdigit() for c in text.partition("e")[0]))
    if not is_one or len(text) > 40:
        raise ValueError(f"should be a number, is {shortened(text)}")
    return float(text)


def read_truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Plain) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    raise ValueError(f"should be true or false, is {described(value)}")


def read_text(value: Any) -> str:
    """A word. A bare number or date is taken as it is written; a bare `no` or `true` is refused, its writer may differ."""
    if isinstance(value, Plain) and value.lower() in _WORDS:
        raise ValueError(f'should be text, and YAML reads {str(value)!r} as true or false; quote it: "{value}"')
    if not isinstance(value, str):
        raise ValueError("needs a value" if value is None else f"should be text, is {described(value)}")
    return str(value)


def read_duration(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return checked_duration(float(value), repr(value))
    if isinstance(value, Plain) and (_INT.fullmatch(value) or _OCTAL.fullmatch(value) or _is_float(value)):
        return checked_duration(read_number(value), str(value))
    if isinstance(value, str):
        return parse_duration(str(value))
    raise ValueError(
        "needs a value" if value is None else f"is not a duration; write 3s, 10m, 2h, not {described(value)}"
    )


def read_size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        return parse_size(str(value))
    raise ValueError(
        "needs a value" if value is None else f"is not a size; write 512MiB or 10GB, not {described(value)}"
    )


def _is_float(text: str) -> bool:
    return bool(text) and text[-1].isdigit() and bool(_FLOAT.fullmatch(text))


def read_path(value: Any) -> str:
    text = read_text(value)
    if not text:
        raise ValueError("is empty")
    if re.search(r"\$[{A-Za-z_]", text):
        raise ValueError(f"{shortened(text)}: variables are not expanded here; write the path out, or begin it with ~")
    if text[0] == "~" and os.path.expanduser(text) == text:
        raise ValueError(f"{shortened(text)}: there is no such user")
    return text


def read_name(value: Any) -> str:
    text = read_text(value)
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{shortened(text)} cannot be a name; use letters, digits, '.', '_' and '-' (at most 100, no '.' first)"
        )
    return text


def read_listen(value: Any) -> str:
    text = read_text(value)
    match = _LISTEN.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f'{shortened(text)} is not an address; write "127.0.0.1:9775" (port 0: any free one)')
    return text


def read_steps_or_duration(value: Any) -> Any:
    """`{steps: N}` or a duration."""
    if isinstance(value, Steps):
        return value
    if isinstance(value, dict):
        if set(value) != {"steps"}:
            raise ValueError("should be {steps: N} or a duration")
        steps = read_whole_number(value["steps"])
        if steps < 1:
            raise ValueError("steps must be at least 1")
        return Steps(steps=steps)
    seconds = read_duration(value)
    if not seconds:
        raise ValueError("must be longer than nothing")
    return seconds


def read_interval(value: Any) -> Any:
    return "auto" if value == "auto" else read_steps_or_duration(value)


def read_auto_or_count(value: Any) -> Any:
    if value == "auto":
        return "auto"
    count = read_whole_number(value)
    if count < 1:
        raise ValueError("must be at least 1, or auto")
    return count


def read_host(value: Any) -> Host:
    """`h1`, or `{host: h1, python: /opt/venv/bin/python, devices: 4}`."""
    if isinstance(value, Host):
        return value
    if not isinstance(value, dict):
        return Host(host=_host_name(value))
    unknown = set(value) - {"host", "python", "devices"}
    if unknown:
        raise ValueError(f"unknown key {shortened(min(map(str, unknown)))}; a host has: host, python, devices")
    if "host" not in value:
        raise ValueError("a host needs its name: {host: h1, python: /opt/venv/bin/python, devices: 4}")
    python, devices = value.get("python"), value.get("devices")
    count = None if devices is None else read_whole_number(devices)
    if count is not None and count < 1:
        raise ValueError("devices must be at least 1")
    return Host(host=_host_name(value["host"]), python=None if python is None else read_path(python), devices=count)


def _host_name(value: Any) -> str:
    name = read_text(value)
    # ssh would take a name that begins with a dash for an option.
    if not _HOST.fullmatch(name):
        raise ValueError(
            f"{shortened(name)} cannot be a host; write a name or an address as ssh takes it, user@ included"
        )
    return name


def optional(read: Any) -> Any:
    return lambda value: None if value is None else read(value)


def check_keep_last(count: int) -> int:
    if count < 1:
        raise ValueError("keep_last must be at least 1: the newest checkpoint always stays, and -1 does not mean all")
    return count


Count = Annotated[int, BeforeValidator(read_whole_number), Field(ge=1, le=10**9)]
Bool = Annotated[bool, BeforeValidator(read_truth)]
Text = Annotated[str, BeforeValidator(read_text)]
PathText = Annotated[str, BeforeValidator(read_path)]
Name = Annotated[str, BeforeValidator(read_name)]
Duration = Annotated[float, BeforeValidator(read_duration)]
Positive = Annotated[float, BeforeValidator(read_duration), Field(gt=0)]
