"""Every error that ckptd raises on purpose, and the exit status that each one ends a command with.

CkptdError (70)
├── UsageError (64)             a command line that makes no sense
├── JobSpecError (78)           job.yaml: all its errors at once
├── RunNotFound (64)            no run of that name, or several where one was expected
├── RunLocked (64)              another daemon owns the run directory
├── LedgerError (70)            the ledger cannot be opened, or was written by a newer ckptd
│   ├── LedgerFull (70)         no room for another event: training goes on, its history has a gap
│   └── LedgerDamaged (70)      its bytes make no sense: `ckptd run` sets it aside
├── HistoryError (64)           imported logs: the file cannot be used, or has no log of that name
├── DaemonUnreachable (69)      a request to a daemon that does not answer
├── LaunchError (69)            a node agent cannot be started
├── PortTaken (78)              `web.listen` names an address that is in use
├── DrillFailed (1)             a drill could not be carried out, so it shows nothing
└── CheckpointUnreadable (1)    there are commits, and none of them can be read
"""

from __future__ import annotations

import enum


class ExitStatus(enum.IntEnum):
    """Exit statuses of the command `ckptd`."""

    FINISHED = 0
    FAILED = 1
    USAGE = 64
    UNAVAILABLE = 69
    BUG = 70
    REQUEUE = 75
    CONFIG = 78
    INTERRUPTED = 130


class CkptdError(Exception):
    """What happened, to which thing, and what to do next. Shown without a traceback."""

    exit_status = ExitStatus.BUG


class UsageError(CkptdError):
    exit_status = ExitStatus.USAGE


class JobSpecError(CkptdError):
    """job.yaml is wrong: `problems` holds every problem found, each with file, line and key path."""

    exit_status = ExitStatus.CONFIG

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunNotFound(CkptdError):
    exit_status = ExitStatus.USAGE


class RunLocked(CkptdError):
    exit_status = ExitStatus.USAGE


class LedgerError(CkptdError):
    exit_status = ExitStatus.BUG


class LedgerFull(LedgerError):
    pass


class LedgerDamaged(LedgerError):
    """`what`: SQLite's own words."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


class HistoryError(CkptdError):
    exit_status = ExitStatus.USAGE


class DaemonUnreachable(CkptdError):
    exit_status = ExitStatus.UNAVAILABLE
    connected = False
    """Somebody took the call, and then said nothing that makes sense."""


class LaunchError(CkptdError):
    exit_status = ExitStatus.UNAVAILABLE


class PortTaken(CkptdError):
    exit_status = ExitStatus.CONFIG


class DrillFailed(CkptdError):
    exit_status = ExitStatus.FAILED


class CheckpointUnreadable(CkptdError):
    exit_status = ExitStatus.FAILED
