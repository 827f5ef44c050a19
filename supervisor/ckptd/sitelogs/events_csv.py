"""Which interruptions does a CSV tell of? One row for each, or one row for many with their number and the time they took."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Final

from ckptd.core.sitelog import MERGE_S, Kind, Row
from ckptd.errors import UsageError
from ckptd.sitelogs import columns as columns_module
from ckptd.sitelogs.reading import Options, Parsed, Remark, digest_of
from ckptd.sitelogs.times import Moment, TimeReader, day_first, is_missing
from ckptd.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.sitelogs.columns import Columns

_DAY_S: Final = 86_400.0
LONGEST_DOWN_S: Final = 30 * _DAY_S
"""Who is down for longer has more to tell than a time."""

WORDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(
        ("failure", "failed", "fail", "fault", "crash", "crashed", "hang", "hung", "error", "interruption", "interrupted",
         "unplanned", "unexpected", "outage"), "failure"),
    **dict.fromkeys(
        ("planned", "maintenance", "scheduled", "upgrade", "resize", "preemption", "preempted", "rollback", "stop",
         "stopped", "cancelled", "canceled", "timeout"), "planned"),
    **dict.fromkeys(("start", "started", "launch", "launched"), "start"),
    **dict.fromkeys(("none", "info", "note", "degraded", "end", "finished", "completed", "resumed"), "other"),
}  # fmt: skip
"""What a kind means. A rollback is what people decide on, training having run until then."""


def read(text: str, options: Options) -> Parsed:
    """The rows of `text`, the first line of which names the columns.

    Raises:
        UsageError: it has no columns to make events of, or times without a zone, or does not say how many devices.
    """
    delimiter = _delimiter(text.splitlines()[0])
    rows = list(_rows(text, delimiter, options.source))
    if not rows:
        raise UsageError(f"{options.source} has no row that names the columns")
    header = rows[0][1]
    columns = columns_module.find(header, options.columns, options.source)
    counts, timed = "count" in columns.at, bool({"time", "date"} & columns.at.keys())
    if counts and timed:
        named = {"count"} & options.columns.keys(), {"time", "date"} & options.columns.keys()
        if bool(named[0]) == bool(named[1]):
            raise UsageError(
                f"{options.source} has a column of times, {header[columns.at.get('time', columns.at.get('date', 0))]!r}, and one "
                f"of counts, {header[columns.at['count']]!r}; name the one that matters with --time-column or --count-column"
            )
        counts = bool(named[0])
    if not counts and not timed:
        raise UsageError(
            f"{options.source} has no column that is known to hold times or counts: {', '.join(map(str.strip, header))}; "
            "name one with --time-column or --count-column"
        )
    parsed = Parsed(form="counts" if counts else "events")
    body = _wanted(rows[1:], header, options, parsed)
    if counts:
        _counts(body, columns, options, parsed)
    else:
        _events(body, columns, options, parsed)
    return parsed


def _delimiter(first: str) -> str:
    return max((",", ";", "\t", "|"), key=first.count)


def _rows(text: str, delimiter: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """(line on which it begins, cells) of each row that is not empty. No cells: a quote is open to the end of the file."""
    physical = list(io.StringIO(text, newline=""))
    reader = csv.reader(physical, delimiter=delimiter)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
            if reader.line_num == len(physical) > line:
                list(csv.reader(physical[line - 1 :], delimiter=delimiter, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            if line == 1:
                raise UsageError(f"{source}:1: {error}; is a quote left open?") from None
            yield line, []
            return
        if any(cell.strip() for cell in cells):
            yield line, cells


def _wanted(
    rows: list[tuple[int, list[str]]], header: list[str], options: Options, parsed: Parsed
) -> list[tuple[int, list[str]]]:
    """Rows as long as the header that --only asks for."""
    wanted = []
    places = []
    for column, value in options.only:
        names = [name.strip().lower() for name in header]
        if column.lower() not in names:
            raise UsageError(f"--only {column}={value}: {options.source} has no column {column!r}")
        places.append((names.index(column.lower()), value))
    for line, cells in rows:
        parsed.read += 1
        if not cells:
            parsed.left_out.append(
                Remark(line, "a quote opens here and is not closed: the rest of the file is lost in it")
            )
        elif len(cells) != len(header):
            parsed.left_out.append(Remark(line, f"the row has {len(cells)} cells, the header {len(header)}"))
        elif any(cells[place].strip() != value for place, value in places):
            parsed.passed_over["other than --only asks for"] += 1
        else:
            wanted.append((line, cells))
    return wanted


# --- a row for each event ---------------------------------------------------------------------------------------------


def _events(rows: list[tuple[int, list[str]]], columns: Columns, options: Options, parsed: Parsed) -> None:
    if options.devices is None and "devices" not in columns.at:
        raise UsageError(
            f"{options.source} does not say how many devices were in use; give --devices, or --devices-column"
        )
    time, end = _reader("time", rows, columns, options), _reader("end", rows, columns, options)
    seen = set[str]()
    for line, cells in rows:
        try:
            kind = _kind(columns, cells, options)
            moment = time.read(_when(columns, cells))
            devices = _devices(columns, cells, options)
        except ValueError as error:
            parsed.left_out.append(Remark(line, str(error)))
            continue
        if moment.at > options.now + _DAY_S:
            parsed.left_out.append(Remark(line, f"{_when(columns, cells)} lies in the future"))
            continue
        if moment.day_only:
            parsed.notes.append(Remark(line, "has a date and no time of day; taken for noon"))
        if moment.twice:
            parsed.notes.append(
                Remark(line, "is of the hour that came twice when clocks were put back; taken for the first")
            )
        down, why = _down(columns, cells, moment, end)
        if why:
            parsed.notes.append(Remark(line, why))
        parsed.add(
            Row(
                digest=digest_of([cell.strip() for cell in cells]),
                kind=kind,
                at=moment.at,
                devices=devices,
                cause=columns.cause(cells),
                severity=columns.cell("severity", cells).lower(),
                node=columns.cell("node", cells),
                down_s=down,
                source=options.source,
                line=line,
            ),
            seen,
        )
    _drop_before_start(parsed)
    _note_disorder(parsed)


def _when(columns: Columns, cells: list[str]) -> str:
    """The text of a row's time: one cell, or a date and a time of day."""
    time, date = columns.cell("time", cells), columns.cell("date", cells)
    if not date or any(c in time for c in "-/") or time.count(".") > 1:
        return time
    return f"{date} {time}".strip()


def _reader(role: str, rows: list[tuple[int, list[str]]], columns: Columns, options: Options) -> TimeReader:
    texts = [_when(columns, cells) if role == "time" else columns.cell(role, cells) for _, cells in rows]
    zone = options.end_zone if role == "end" and options.end_zone is not None else None
    return TimeReader(
        zone=zone or columns.zones.get(role) or options.zone, day_first=day_first(texts), pattern=options.time_format
    )


def _kind(columns: Columns, cells: list[str], options: Options) -> Kind:
    if "kind" not in columns.at:
        return "failure"
    word = columns.cell("kind", cells).lower()
    if word in options.failure_words:
        return "failure"
    if word in options.planned_words:
        return "planned"
    kind = WORDS.get(word)
    if kind is None:
        raise ValueError(f"kind {shortened(word)} is not known; --failures-are or --planned-are say what it is")
    return kind


def _devices(columns: Columns, cells: list[str], options: Options) -> float | None:
    """Devices of a row; None: as many as --devices says for the whole log."""
    if options.devices is not None:
        return None
    return _number(columns, cells, "devices")


def _number(columns: Columns, cells: list[str], role: str) -> float:
    text = columns.cell(role, cells)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e12:
        raise ValueError(f"{shortened(text)} is no number of {role}" if text else f"there is no number of {role}")
    return number


def _down(columns: Columns, cells: list[str], moment: Moment, end: TimeReader) -> tuple[float | None, str]:
    """How long it took until things went on, and what is wrong with that; (None, ...): not known."""
    text, minutes = columns.cell("end", cells), columns.cell("down", cells)
    down = None
    if text and not is_missing(text) and not moment.day_only:
        try:
            ended = end.read(text)
        except ValueError as error:
            return None, f"{error}; how long it was down is not known"
        if not ended.day_only:
            down = ended.at - moment.at
            if down < 0:
                return None, f"goes on {-down:.0f} s before it happens; how long it was down is not known"
    if minutes:
        try:
            told = float(minutes) * 60.0
        except ValueError:
            return None, f"{shortened(minutes)} is no number of minutes; how long it was down is not known"
        if not 0 <= told < math.inf:
            return None, f"{shortened(minutes)} minutes down is not possible; how long it was down is not known"
        if down is not None and abs(told - down) > 60.0:
            return None, f"was down {minutes} minutes by one column and {down / 60:.0f} by others; not known which"
        down = told
    if down is not None and down > LONGEST_DOWN_S:
        return None, f"was down for {down / _DAY_S:.0f} days; more than 30 are not believed"
    return down, ""


def _drop_before_start(parsed: Parsed) -> None:
    """Leave out what happened before the log's own beginning: a date that was mistyped."""
    starts = [row.at for row in parsed.rows if row.kind == "start" and row.at is not None]
    if not starts:
        return
    for row in [row for row in parsed.rows if row.at is not None and row.at < min(starts) - MERGE_S]:
        parsed.rows.remove(row)
        parsed.left_out.append(Remark(row.line, "lies before the row with which the log starts"))


def _note_disorder(parsed: Parsed) -> None:
    """Name the rows that lie before the row above them, in a log that is in order otherwise."""
    before = [
        (row.line, above.line)
        for above, row in zip(parsed.rows, parsed.rows[1:], strict=False)
        if (row.at or 0.0) < (above.at or 0.0)
    ]
    if len(before) <= max(5, len(parsed.rows) // 50):
        for line, above in before:
            parsed.notes.append(Remark(line, f"lies before line {above}; taken as it is"))


# --- a row for many failures ------------------------------------------------------------------------------------------


def _counts(rows: list[tuple[int, list[str]]], columns: Columns, options: Options, parsed: Parsed) -> None:
    spans = {"first", "last"} <= columns.at.keys()
    own = spans or "days" in columns.at
    if options.devices is None and "devices" not in columns.at:
        raise UsageError(f"{options.source} does not say how many devices; give --devices, or --devices-column")
    first, last = _reader("first", rows, columns, options), _reader("last", rows, columns, options)
    seen = set[str]()
    for line, cells in rows:
        try:
            text = columns.cell("count", cells)
            if not text.isdecimal() or len(text) > 12:
                raise ValueError(f"{shortened(text)} is no number of failures")
            span, ended = None, None
            if "days" in columns.at:
                span = _number(columns, cells, "days") * _DAY_S
            elif spans:
                ended = last.read(columns.cell("last", cells)).at
                span = ended - first.read(columns.cell("first", cells)).at
                if span <= 0:
                    raise ValueError("the last failure is not after the first")
            devices = _devices(columns, cells, options)
        except ValueError as error:
            parsed.left_out.append(Remark(line, str(error)))
            continue
        parsed.add(
            Row(
                digest=digest_of([cell.strip() for cell in cells]),
                kind="failure",
                at=ended,
                count=int(text),
                span_s=span if own else None,
                devices=devices,
                cause=columns.cause(cells),
                source=options.source,
                line=line,
            ),
            seen,
        )
