"""`ckptd import`: what does a log of interruptions say about failures here, and on a job of mine?"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from typing import Any, Final

import click

from ckptd.cli import _text
from ckptd.cli._ask import json_option
from ckptd.cli._options import Amount, Duration, Zone
from ckptd.core import sitelog
from ckptd.core.sitelog import Log, Summary
from ckptd.errors import ExitStatus, UsageError
from ckptd.sitelogs import importing
from ckptd.sitelogs.reading import MAX_BYTES, Options, Parsed, Remark
from ckptd.sitelogs.times import TimeReader, check_format, day_first
from ckptd.units import format_size, shortened

_SHOWN: Final = 12
"""Rows that are named in a terminal; `--json` names all."""
_ROLES: Final = ("time", "date", "end", "down", "kind", "cause", "severity", "devices", "count")
_DAY_S: Final = 86_400.0


@click.command("import")
@click.argument("file", type=click.Path())
@click.option("--name", help="Name of the log; default: the file's. A log may be imported in pieces.")
@click.option("--time-zone", type=Zone(), help="Zone of times that do not say theirs: UTC, +08:00, Europe/Berlin.")
@click.option("--end-time-zone", type=Zone(), help="Zone of --end-column, if another.")
@click.option("--time-format", metavar="FORMAT", help="Format of times as in strptime; default: found.")
@click.option("--devices", type=Amount(), help="Devices that were in use (sacct: by each job).")
@click.option("--devices-per-node", type=Amount(), help="For sacct without AllocTRES: devices of a node.")
@click.option("--days", type=Amount(), help="Length of the exposure where rows have no times.")
@click.option("--from", "from_text", metavar="TIME", help="Exposure begins here; default: with the first event.")
@click.option("--to", "to_text", metavar="TIME", help="Exposure ends here; default: with the last event.")
@click.option("--merge", type=Duration(), help="Rows within this time are one event; default: 5m.")
@click.option("--time-column", metavar="NAME")
@click.option("--date-column", metavar="NAME", help="Where date and time of day stand apart.")
@click.option("--end-column", metavar="NAME", help="When things went on.")
@click.option("--down-column", metavar="NAME", help="Minutes until things went on.")
@click.option("--kind-column", metavar="NAME", help="Failure, planned, ...; without one every row is a failure.")
@click.option("--cause-column", metavar="NAME", multiple=True, help="Several: the one that is filled names the cause.")
@click.option("--severity-column", metavar="NAME")
@click.option("--devices-column", metavar="NAME")
@click.option("--count-column", metavar="NAME", help="A row stands for so many failures.")
@click.option("--only", metavar="COLUMN=VALUE", multiple=True, help="Leave other rows alone.")
@click.option("--failures-are", metavar="WORDS", help="Kinds or job states that are failures, with commas between.")
@click.option("--planned-are", metavar="WORDS", help="Kinds or job states that are planned stops.")
@click.option("--for-devices", type=Amount(), help="Scale M to a job of so many devices.")
@click.option("--history", type=click.Path(dir_okay=False), metavar="FILE", help="Where imported logs are kept.")
@click.option("--replace", is_flag=True, help="Forget first what the log holds.")
@click.option("--dry-run", is_flag=True, help="Show what the file says, and keep nothing.")
@json_option
def import_log(
    *,
    file: str,
    name: str | None,
    for_devices: float | None,
    history: str | None,
    replace: bool,
    dry_run: bool,
    as_json: bool,
    **words: Any,
) -> int:
    """Read FILE (- is standard input), a log of interruptions as CSV or the output of sacct -P, and add it to this site's.

    Rows that cannot be right are named and left out. A row that was imported before adds nothing.
    """
    name = _name(name, file)
    options = _options(file, words)
    parsed = importing.read(_content(file), options)
    if parsed is None:
        print(f"ckptd: {options.source} is empty: nothing to import", file=sys.stderr)
        parsed = Parsed(form="events")
    log = _log(name, parsed, options, words)
    document: dict[str, Any] = {"log": name, "file": options.source, "form": parsed.form, "rows": _rows(parsed)}
    if dry_run or not parsed.rows:
        summary = sitelog.summarize(log, parsed.rows)
    else:
        from ckptd.history import History

        with History.open(history) as kept:
            added = kept.add(log, parsed.rows, replace=replace)
            summary = kept.summary(name)
            document["history"] = kept.path
        document["rows"] |= {"new": added.new, "replaced": added.replaced, "already_there": added.known}
    document |= _of_summary(summary, for_devices)
    print(json.dumps(document, indent=1) if as_json else _readable(document, summary, parsed, for_devices))
    return ExitStatus.FINISHED


def _name(name: str | None, file: str) -> str:
    if name is None:
        if file == "-":
            raise UsageError("what comes from standard input has no name; give one with --name")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.splitext(os.path.basename(file))[0]).lstrip(".-") or "log"
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"--name {shortened(name)} cannot be a name; use letters, digits, '.', '_' and '-'")
    return name


def _content(file: str) -> bytes:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(file, "rb") as opened:
                data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{file} has more than {format_size(MAX_BYTES)}; cut it in pieces and import them by one --name"
        )
    return data


def _options(file: str, words: dict[str, Any]) -> Options:
    columns: dict[str, tuple[str, ...]] = {}
    for role in _ROLES:
        given = words[f"{role}_column"]
        if given:
            columns[role] = given if isinstance(given, tuple) else (given,)
    only = []
    for text in words["only"]:
        column, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--only {text}: write COLUMN=VALUE")
        only.append((column.strip(), value.strip()))
    failures, planned = _words(words["failures_are"]), _words(words["planned_are"])
    if failures & planned:
        raise UsageError(f"{', '.join(sorted(failures & planned))} cannot be failures and planned as well")
    pattern = words["time_format"]
    if pattern is not None:
        try:
            check_format(pattern)
        except ValueError as error:
            raise UsageError(f"--time-format: {error}") from None
    return Options(
        zone=words["time_zone"],
        end_zone=words["end_time_zone"],
        columns=columns,
        time_format=pattern,
        devices=words["devices"],
        devices_per_node=words["devices_per_node"],
        failure_words=failures,
        planned_words=planned,
        only=tuple(only),
        to_at=_time("--to", words["to_text"], words["time_zone"]),
        now=time.time(),
        source="standard input" if file == "-" else os.path.basename(file),
    )


def _words(text: str | None) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in (text or "").split(",") if word.strip())


def _time(option: str, text: str | None, zone: Any) -> float | None:
    if text is None:
        return None
    try:
        moment = TimeReader(zone=zone, day_first=day_first([text])).read(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    # A day is meant from its beginning, and read as its noon.
    return moment.at - _DAY_S / 2 if moment.day_only else moment.at


def _log(name: str, parsed: Parsed, options: Options, words: dict[str, Any]) -> Log:
    days, merge = words["days"], words["merge"]
    from_at = _time("--from", words["from_text"], options.zone)
    if parsed.form == "jobs" and from_at is not None:
        raise UsageError(
            "--from is for a log of events; jobs bring their own time. Choose them by sacct's own -S and -E"
        )
    if parsed.form != "counts" and days is not None:
        raise UsageError("--days is for rows without times; here --from and --to say how long")
    if from_at is not None and options.to_at is not None and options.to_at <= from_at:
        raise UsageError("--to is not after --from")
    timeless = parsed.form == "counts" and parsed.rows and all(row.span_s is None for row in parsed.rows)
    if timeless and days is None and (from_at is None or options.to_at is None):
        raise UsageError(
            "the rows have no times: say with --days, or with --from and --to, how long it took to count them"
        )
    return Log(
        name=name,
        form=parsed.form,
        devices=options.devices,
        from_at=from_at,
        to_at=options.to_at if parsed.form != "jobs" else None,
        span_s=None if days is None else days * _DAY_S,
        merge_s=sitelog.MERGE_S if merge is None else merge,
    )


# --- what is shown ----------------------------------------------------------------------------------------------------


def _rows(parsed: Parsed) -> dict[str, Any]:
    return {
        "read": parsed.read,
        "clean": len(parsed.rows),
        "passed_over": dict(parsed.passed_over),
        "left_out": [{"line": remark.line, "why": remark.what} for remark in parsed.left_out],
        "notes": [{"line": remark.line, "what": remark.what} for remark in parsed.notes],
    }


def _of_summary(summary: Summary, for_devices: float | None) -> dict[str, Any]:
    rate = summary.rate
    sizes = {"own": summary.devices, "for": for_devices}
    return {
        "events": {
            "failures": summary.failures,
            "counted_in_rate": summary.counted,
            "planned": summary.planned,
            "completed": summary.completed,
            "running": summary.running,
            "never_started": summary.launch,
            "other": summary.other,
            "merged_rows": summary.merged,
            "outside_exposure": summary.outside,
            "by_cause": summary.by_cause,
            "by_severity": summary.by_severity,
        },
        "first_at": summary.first_at,
        "last_at": summary.last_at,
        "exposure": {
            "wall_hours": summary.span_s / 3600,
            "device_hours": summary.exposure_device_s / 3600,
            "running_hours": summary.censored_s / 3600,
        },
        "rate_per_device_hour": None if rate is None else rate * 3600,
        "down": {"median_s": summary.down_median_s, "known": summary.down_known},
        "mtbf": {name: _mtbf(summary, devices) for name, devices in sizes.items() if devices is not None},
    }


def _mtbf(summary: Summary, devices: float) -> dict[str, float | None]:
    found = summary.mtbf(devices) or (None, None, None)
    return {"devices": devices, "mtbf_s": found[0], "low_s": found[1], "high_s": found[2]}


def _readable(document: dict[str, Any], summary: Summary, parsed: Parsed, for_devices: float | None) -> str:
    rows = document["rows"]
    if "new" in rows:
        kept = f"{rows['new']} new, {rows['replaced']} replaced, {rows['already_there']} already there"
    else:
        kept = f"{rows['clean']} clean, none kept"
    lines = [f"{document['file']}: {rows['read']} rows, {kept}"]
    lines += [f"  {count} passed over: {why}" for why, count in sorted(parsed.passed_over.items())]
    lines += _remarks("left out, as they cannot be right", parsed.left_out)
    lines += _remarks("taken with a remark", parsed.notes)
    lines.append(f"log {summary.log.name}: {summary.rows} rows")
    lines += [f"  {label:10} {text}" for label, text in _facts(summary, for_devices)]
    return _text.printable("\n".join(lines))


def _remarks(title: str, remarks: list[Remark]) -> list[str]:
    """The remarks in the order of their lines; lines of which the same is to be said are named together."""
    if not remarks:
        return []
    by_what: dict[str, list[int]] = {}
    for remark in sorted(remarks, key=lambda r: r.line):
        by_what.setdefault(remark.what, []).append(remark.line)
    lines = [f"  {len({remark.line for remark in remarks})} {title}:"]
    for what, where in list(by_what.items())[:_SHOWN]:
        more = f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else ""
        plural = "s" if len(where) > 1 else ""
        lines.append(f"    line{plural} {', '.join(map(str, where[:_SHOWN]))}{more}: {what}")
    if len(by_what) > _SHOWN:
        lines.append(f"    and {len(by_what) - _SHOWN} more, which --json names")
    return lines


def _facts(summary: Summary, for_devices: float | None) -> list[tuple[str, str]]:
    others = [
        ("planned stops", summary.planned), ("completed", summary.completed), ("running", summary.running),
        ("never started", summary.launch), ("other", summary.other),
        ("rows of the same events", summary.merged), ("outside of the exposure", summary.outside),
    ]  # fmt: skip
    events = ", ".join([f"{summary.failures} failures", *(f"{count} {what}" for what, count in others if count)])
    facts = [("events", events)]
    facts += [
        (label, ", ".join(f"{name} {count}" for name, count in Counter(found).most_common(_SHOWN)))
        for label, found in (("by cause", summary.by_cause), ("severity", summary.by_severity))
        if found
    ]
    if summary.exposure_device_s <= 0:
        facts.append(("exposure", "none, so there is no rate: give --from and --to, or more of the log"))
        return facts
    running = f", of which {_text.seconds(summary.censored_s)} of jobs still running" if summary.censored_s else ""
    facts.append(
        ("exposure", f"{summary.exposure_device_s / 3600:.6g} device-hours: {_text.seconds(summary.span_s)}{running}")
    )
    if summary.down_median_s is not None:
        facts.append(("down", f"{_text.seconds(summary.down_median_s)}, median of {summary.down_known} that are known"))
    rate = summary.rate or 0.0
    edge = summary.failures - summary.counted
    less = "" if not edge else f" ({summary.counted} failures: {edge} that open the exposure are its edge)"
    facts.append(("rate", f"{rate * 3600:.4g} per device-hour{less}"))
    facts += [
        ("M" if label == "own" else "M for you", _mtbf_text(summary, devices))
        for label, devices in (("own", summary.devices), ("for", for_devices))
        if devices is not None
    ]
    return facts


def _mtbf_text(summary: Summary, devices: float) -> str:
    found = summary.mtbf(devices)
    size = f"on {devices:.6g} devices"
    if found is None:
        return f"unknown {size}: no failure was seen"
    mean, low, high = found
    return f"{_text.seconds(mean)} {size} (90 %: {_text.seconds(low)} to {_text.seconds(high)})"
