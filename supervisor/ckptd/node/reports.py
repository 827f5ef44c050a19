"""What the workers write down: rank 0's report file as events, every rank's heartbeat page as a live picture."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from ckptd_shim import contract
from ckptd_shim.contract import Report
from ckptd_shim.pulse import read_pulse_file

log = logging.getLogger(__name__)

Line = dict[str, Any]

EVENT_OF_REPORT: dict[str, str] = {
    Report.INITIALISED: "workers_initialised",
    Report.RESTORED: "state_restored",
    Report.FIRST_STEP: "first_step",
    Report.SAVE_STAGED: "save_staged",
    Report.SAVE_COMMITTED: "save_committed",
    Report.SAVE_FAILED: "save_failed",
    Report.SAVE_REJECTED: "save_rejected",
    Report.PINNED: "checkpoint_pinned",
}
"""Report lines that are events of the ledger, field for field."""


class ReportTail:
    """Reads the lines that were added to a report file since the last look."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Line]:
        """New complete lines. A file that is not there yet has none; a line that cannot be read is logged and passed."""
        try:
            if os.stat(self._path).st_size <= self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines: list[Line] = []
        for raw in complete.splitlines():
            try:
                line = json.loads(raw)
                kind, mono = str(line["kind"]), float(line["mono"])
            except (ValueError, KeyError, TypeError):
                log.warning("a line of %s cannot be read: %.200r", self._path, raw)
                continue
            lines.append({**line, "kind": kind, "mono": mono})
        return lines


LONGEST_MESSAGE = 8192
LONGEST_TRACEBACK = 16_384


def read_pulses(attempt_dir: str, ranks: list[int]) -> dict[int, contract.Pulse]:
    """The newest heartbeat of each rank that has a page."""
    pulses: dict[int, contract.Pulse] = {}
    for rank in ranks:
        pulse = read_pulse_file(os.path.join(attempt_dir, contract.pulse_name(rank)))
        if pulse is not None:
            pulses[rank] = pulse
    return pulses


def live_picture(pulses: dict[int, contract.Pulse]) -> dict[str, Any]:
    """The pulses as the daemon wants them: ages instead of this host's clock."""
    now = time.monotonic()
    return {
        str(rank): {
            "step": pulse.step,
            "samples": pulse.samples,
            "phase": pulse.phase.name.lower(),
            "beat_age_s": max(0.0, now - pulse.beat),
            "loss": pulse.loss,
            "step_s": pulse.step_s,
            "pid": pulse.pid,
        }
        for rank, pulse in pulses.items()
    }


def tail_of(path: str, limit: int = 4096) -> str:
    """The end of a log file, from the start of a line where there is one; empty when there is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return ""
    if size > limit:
        head, newline, rest = data.partition(b"\n")
        data = rest if newline else head
    return data.decode("utf-8", errors="replace")


def read_error(path: str) -> dict[str, Any] | None:
    """A rank's error file, in our form or in torch's own (`{"message": {"message", "extraInfo": {...}}}`).

    Long texts are cut, a message at its end and a traceback at its beginning: the errors of all ranks have to fit into
    one message, and the file itself stays where it is.
    """
    document = _read_error(path)
    if document is None:
        return None
    message, traceback = str(document.get("message") or ""), str(document.get("traceback") or "")
    return {**document, "message": message[:LONGEST_MESSAGE], "traceback": traceback[-LONGEST_TRACEBACK:]}


def _read_error(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            document = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("type"), str):
        return document
    inner = document.get("message")
    if isinstance(inner, dict):
        extra = inner.get("extraInfo") or {}
        text = str(inner.get("message", ""))
        return {
            "type": text.partition(":")[0] or "Exception",
            "mro": [],
            "message": text.partition(": ")[2] or text,
            "traceback": str(extra.get("py_callstack", "")),
        }
    return {"type": "Exception", "mro": [], "message": str(inner), "traceback": ""}
