"""Which jobs does the output of `sacct -P` tell of, how long did each run, and which of them failed?

A row is a job, or an attempt of one that was queued again; steps (`123.batch`) repeat what their job says and are
passed over. sacct quotes nothing: a name may hold the delimiter or a line break, and is put together again where the
rest of the row then makes sense.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Final

from ckptd.core.sitelog import Kind, Row
from ckptd.errors import UsageError
from ckptd.sitelogs.reading import Options, Parsed, Remark, digest_of
from ckptd.sitelogs.times import TimeReader, is_missing, parse_elapsed
from ckptd.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

# https://slurm.schedmd.com/sacct.html, "JOB STATE CODES"
STATES: Final[dict[str, Kind]] = {
    "FAILED": "failure", "NODE_FAIL": "failure", "OUT_OF_MEMORY": "failure", "REQUEUED": "failure",
    "BOOT_FAIL": "launch", "LAUNCH_FAILED": "launch", "RECONFIG_FAIL": "launch",
    "CANCELLED": "planned", "TIMEOUT": "planned", "PREEMPTED": "planned", "DEADLINE": "planned", "REVOKED": "planned",
    "SPECIAL_EXIT": "planned", "COMPLETED": "completed",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running", "SIGNALING": "running",
    "STAGE_OUT": "running", "RESIZING": "running", "CONFIGURING": "running",
    "PENDING": "other", "REQUEUE_HOLD": "other", "REQUEUE_FED": "other", "RESV_DEL_HOLD": "other",
}  # fmt: skip
_SEVERITY: Final = {"NODE_FAIL": "node", "BOOT_FAIL": "launch", "LAUNCH_FAILED": "launch", "RECONFIG_FAIL": "launch"}
_JOB: Final = re.compile(r"\d+(?:[_+](?:\d+|\[[^\]]*\]))?(?:\.\S+)?")
_DAY_S: Final = 86_400.0
_GPUS: Final = re.compile(r"(?:^|,)gres/gpu=(\d{1,9})(?![0-9])")
_COUNT: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([KM]?)")
_FREE_TEXT: Final = ("jobname", "submitline", "comment", "workdir", "admincomment", "reason")
HOW: Final = "sacct -P -a --format=JobID,State,Start,End,Elapsed,NNodes,AllocTRES"


def looks_like(first_line: str) -> bool:
    """Is this the header of sacct?"""
    names = {name.strip().lower() for name in re.split(r"[|#;,\t ]+", first_line)}
    return bool(names & {"jobid", "jobidraw"}) and "state" in names


def read(text: str, options: Options) -> Parsed:
    """The jobs of `text`.

    Raises:
        UsageError: it cannot be read without a zone or a number of devices that nobody gave, or is not of `sacct -P`.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    delimiter, header = _header(lines[0], options.source)
    parsed = Parsed(form="jobs")
    with_gpus = any("gres/gpu=" in line for line in lines)
    if options.devices is None and options.devices_per_node is None and not with_gpus:
        raise UsageError(
            f"{options.source} does not say how many devices each job had; give --devices-per-node with a column NNodes, "
            f"or --devices where all had the same number, or export AllocTRES: {HOW}"
        )
    if options.devices is None and options.devices_per_node is not None and not {"nnodes", "allocnodes"} & set(header):
        raise UsageError(f"--devices-per-node needs a column NNodes, which {options.source} has not: {HOW}")
    only = tuple((column.lower(), value) for column, value in options.only)
    for column, value in only:
        if column not in header:
            raise UsageError(f"--only {column}={value}: {options.source} has no column {column!r}")
    jobs = _Jobs(dataclasses.replace(options, only=only), parsed)
    for line, cells in _rows(lines, delimiter, header, parsed):
        jobs.take(line, dict(zip(header, cells, strict=True)))
    return parsed


def _header(line: str, source: str) -> tuple[str, list[str]]:
    """The delimiter and the names of the columns, in lower case."""
    match = re.search(r"[A-Za-z0-9]([^A-Za-z0-9/_%.\s]+|\t)[A-Za-z]", line)
    if match is None:
        raise UsageError(f"{source} is not of `sacct -P`: its columns have no delimiter; export it with {HOW}")
    delimiter = match[1]
    names = [name.strip().lower() for name in line.split(delimiter)]
    if names[-1] == "":  # sacct -p ends each row with a delimiter
        names.pop()
    if "state" not in names or not {"jobid", "jobidraw"} & set(names):
        raise UsageError(f"{source} is not of `sacct -P`: its columns are {', '.join(names)}; export it with {HOW}")
    return delimiter, names


def _rows(lines: list[str], delimiter: str, header: list[str], parsed: Parsed) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that has as many cells as the header."""
    position = 1
    while position < len(lines):
        line, text = position + 1, lines[position]
        position += 1
        if not text.strip():
            continue
        parsed.read += 1
        while (
            text.count(delimiter) < len(header) - 1
            and position < len(lines)
            and not _begins_row(lines[position], delimiter)
        ):
            text += "\n" + lines[position]
            position += 1
        cells = text.split(delimiter)
        if len(cells) == len(header) + 1 and cells[-1] == "":
            cells.pop()
        if len(cells) > len(header):
            cells = _rejoined(cells, delimiter, header) or cells
        if len(cells) != len(header):
            how = "cut off" if len(cells) < len(header) else "too long"
            parsed.left_out.append(Remark(line, f"the row is {how}: {len(cells)} cells, the header has {len(header)}"))
            continue
        yield line, cells


def _begins_row(text: str, delimiter: str) -> bool:
    return bool(_JOB.fullmatch(text.split(delimiter, maxsplit=1)[0].strip()))


def _rejoined(cells: list[str], delimiter: str, header: list[str]) -> list[str] | None:
    """Cells with the pieces of a free text put together again, where state and times are right after that."""
    extra = len(cells) - len(header)
    for name in _FREE_TEXT:
        if name in header:
            at = header.index(name)
            tried = [*cells[:at], delimiter.join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]
            if _state(tried[header.index("state")]) in STATES:
                return tried
    return None


def _state(cell: str) -> str:
    words = cell.split()
    return words[0].rstrip("+").upper() if words else ""


class _Jobs:
    """Makes rows of jobs, and puts them into what was parsed."""

    def __init__(self, options: Options, parsed: Parsed) -> None:
        self._options = options
        self._parsed = parsed
        self._reader = TimeReader(zone=options.zone, pattern=options.time_format)
        self._seen: set[str] = set()

    def take(self, line: int, row: dict[str, str]) -> None:
        """Take in a row of sacct, by the names of its columns, or say why not."""
        options, parsed = self._options, self._parsed
        job = (row.get("jobid") or row.get("jobidraw") or "").strip()
        if not _JOB.fullmatch(job):
            parsed.left_out.append(Remark(line, f"{shortened(job)} is not the number of a job"))
            return
        if "." in job:
            parsed.passed_over["steps of jobs"] += 1
            return
        if any(row[column].strip() != value for column, value in options.only):
            parsed.passed_over["other than --only asks for"] += 1
            return
        state = _state(row["state"])
        kind = _kind(state, options)
        try:
            if kind is None:
                what = shortened(row["state"])
                raise ValueError(f"state {what} is not known; --failures-are or --planned-are say what it is")
            if kind == "other" or ("start" in row and is_missing(row["start"])):
                parsed.passed_over["jobs that never started"] += 1
                return
            found = self._row(job, state, kind, row, line)
        except ValueError as error:
            parsed.left_out.append(Remark(line, f"job {job}: {error}"))
            return
        if found is None:
            parsed.passed_over["jobs without a device"] += 1
        else:
            parsed.add(found, self._seen)

    def _row(self, job: str, state: str, kind: Kind, row: dict[str, str], line: int) -> Row | None:
        """None: the job used no device. Raises ValueError: the row cannot be right."""
        if "start" not in row:
            raise ValueError(f"{state}, and there is no column Start; export it with {HOW}")
        start = self._reader.read(row["start"]).at
        end_text = row.get("end", "")
        end = None if is_missing(end_text) else self._reader.read(end_text).at
        span, remark = _span(start, end, row, kind, self._options)
        if start + span > self._options.now + _DAY_S:
            raise ValueError("it ends in the future")
        devices = _devices(row, self._options)
        if devices is None:
            return None
        if remark:
            self._parsed.notes.append(Remark(line, f"job {job}: {remark}"))
        return Row(
            digest=digest_of((job, row["start"].strip())),
            kind=kind,
            at=start + span,
            span_s=span,
            devices=devices,
            job=job.partition("+")[0],  # the parts of a heterogeneous job are one job
            cause=state.lower(),
            severity=_SEVERITY.get(state, "process") if kind in ("failure", "launch") else "",
            node=row.get("nodelist", "").strip(),
            source=self._options.source,
            line=line,
        )


def _kind(state: str, options: Options) -> Kind | None:
    if state.lower() in options.failure_words:
        return "failure"
    if state.lower() in options.planned_words:
        return "planned"
    return STATES.get(state)


def _span(start: float, end: float | None, row: dict[str, str], kind: Kind, options: Options) -> tuple[float, str]:
    """How long a job ran, in seconds, and a remark. Elapsed is right in any zone, and leaves suspended time out."""
    elapsed = parse_elapsed(row.get("elapsed", ""))
    if end is None and elapsed is None:
        if kind != "running":
            raise ValueError("it has neither End nor Elapsed")
        if options.to_at is None:
            raise ValueError("it is running, and there is no column Elapsed; --to says until when")
        end = options.to_at
    if end is not None and end < start:
        raise ValueError("it ends before it starts")
    if elapsed is None:
        assert end is not None, "refused above"
        return end - start, ""
    if end is None or abs(elapsed - (end - start)) <= 60.0:
        return elapsed, ""
    if elapsed > end - start:
        raise ValueError(f"it ran {elapsed:.0f} s by Elapsed, {end - start:.0f} s by Start and End; is the zone right?")
    return (
        elapsed,
        f"Elapsed is {end - start - elapsed:.0f} s less than from Start to End; taken, as if it was suspended",
    )


def _devices(row: dict[str, str], options: Options) -> float | None:
    if options.devices is not None:
        return options.devices
    if options.devices_per_node is not None:
        match = _COUNT.fullmatch((row.get("allocnodes") or row.get("nnodes") or "").strip())
        nodes = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6}[match[2]] if match else 0.0
        return nodes * options.devices_per_node or None
    match = _GPUS.search(row.get("alloctres") or row.get("reqtres") or "")
    return float(match[1]) if match and int(match[1]) else None
