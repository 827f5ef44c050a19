"""Which rank ended the attempt, why, and how much has to be replaced before it can go on?

When one rank goes, its peers fail too: with connection errors, by the signals of whoever stops them, or in a timeout.
So evidence is sorted by what it can explain, then by time. A rank that failed on its own comes before one that left
early with status 0, that before one that somebody outside told to end, and last come errors that only say that a peer
is gone.
"""

from __future__ import annotations

import enum
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self

Severity = Literal["process", "device", "node", "cluster", "code", "launch"]
"""What has to change before a restart can help: nothing but the processes, the device, the node, the cluster, the
user's code; `launch`: no worker ever ran, so it says nothing about how often the job fails."""
Confidence = Literal["high", "medium", "low"]

ABOUT_THE_SAME_TIME_S: Final = 10.0
"""A rank that failed up to so much later may still be what another rank's connection error was about."""
TAIL_LINES: Final = 20
TRACEBACK_LINES: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """The evidence that one worker left."""

    rank: int = 0
    node: str = ""
    exitcode: int | None = None
    """As subprocess gives it: negative for a signal. None: it is not known."""
    order: int = 0
    """0 for the first that died on its node."""
    t: float = 0.0
    """When it was seen dead, on the run's clock."""
    killed_by_us: bool = False
    error: dict[str, Any] | None = None
    """The exception that ended its script: `WorkerError` as a JSON object."""
    stderr_tail: str = ""
    step: int = 0
    """The last step that it completed."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `dataclasses.asdict` wrote; unknown keys are ignored, missing ones take their defaults."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why an attempt ended."""

    cause: str
    """`exception`, `cuda_oom`, `device_error`, `resume_error`, `setup_error`, `script_differs`, `script_not_found`,
    `launch`, `signal`, `exit_status`, `early_exit`, `guard`, `connection_lost`, `collective_timeout`, `agent_lost`, `requested_stop` or `unknown`."""
    severity: Severity
    confidence: Confidence
    rank: int | None = None
    node: str | None = None
    detail: str = ""
    """One line: what happened, to which rank."""
    message: str = ""
    """The culprit's own words: its traceback's end, or the end of its standard error."""


def diagnose(
    exits: Sequence[Exit],
    *,
    requested_stop: bool,
    agent_lost: bool = False,
    oom_killed: bool = False,
    node: str | None = None,
) -> Diagnosis:
    """Weigh the evidence of every worker of an attempt.

    `oom_killed`: the kernel is known to have killed a process of the job for memory. `node`: whose agent was lost.
    """
    if agent_lost:
        detail = "the node's agent died" if node is None else f"the agent of node {node} died"
        return Diagnosis(cause="agent_lost", severity="node", confidence="high", node=node, detail=detail)
    if not exits:
        return Diagnosis(cause="unknown", severity="process", confidence="low", detail="no worker left any evidence")
    suspects = [_Suspect(e) for e in exits if not e.killed_by_us and (e.exitcode is not None or e.error)]
    if requested_stop and all(s.kind > _Kind.OWN_FAILURE for s in suspects):
        return Diagnosis(cause="requested_stop", severity="process", confidence="high", detail="stopped on request")
    if not suspects:
        return _only_victims(exits)
    when = _failure_times([s.exit for s in suspects])
    suspects.sort(key=lambda s: (s.kind, when[s.exit.rank], s.exit.order, s.exit.rank))
    culprit = suspects[0]
    complaints = [when[s.exit.rank] for s in suspects if s.kind is _Kind.PEER_GONE]
    if complaints and when[culprit.exit.rank] > min(complaints) + ABOUT_THE_SAME_TIME_S:
        # Peers complained long before it failed, so it is not what they complained about.
        culprit = next(s for s in suspects if when[s.exit.rank] == min(complaints))
    return culprit.explain(alone=len(exits) == 1, all_ended=all(e.exitcode == 0 for e in exits), oom_killed=oom_killed)


_IN_A_COLLECTIVE = re.compile(
    r"in (all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|monitored_barrier|all_to_all\w*|gather\w*|scatter\w*"
    r"|reduce|send|recv|_engine_run_backward|synchronize|wait)$",
    re.MULTILINE,
)
_INNERMOST_FRAMES: Final = 6


def standing_rank(exits: Sequence[dict[str, Any]]) -> int | None:
    """The rank of a hung attempt that is not inside a collective while others are, by their Python stacks.

    With gloo a rank that waits sleeps as soundly as one that hangs, so only the stacks can tell them apart. None: the
    stacks do not single one out.
    """
    waiting: dict[int, bool] = {}
    for found in exits:
        stack = _main_stack(str(found.get("stacks") or ""))
        if stack:
            waiting[int(found["rank"])] = _IN_A_COLLECTIVE.search(stack) is not None
    outside = [rank for rank, inside in waiting.items() if not inside]
    return min(outside) if outside and len(outside) < len(waiting) else None


def stacks_of(exits: Sequence[dict[str, Any]], rank: int | None) -> str:
    """The main thread's stack of a rank, innermost call first; of the first rank that left one where rank is None."""
    for found in exits:
        if rank is None or found.get("rank") == rank:
            stack = _main_stack(str(found.get("stacks") or ""), frames=TRACEBACK_LINES)
            if stack:
                return f"rank {found.get('rank')} stood at (innermost call first):\n{stack}"
    return ""


def _main_stack(text: str, *, frames: int = _INNERMOST_FRAMES) -> str:
    """The innermost frames of the thread that took the signal, out of what faulthandler wrote last."""
    _, found, tail = text.rpartition("Current thread ")
    if not found:
        return ""
    lines = [line for line in tail.splitlines()[1:] if line.startswith("  File ")]
    end = next((i for i, line in enumerate(tail.splitlines()[1:]) if not line.startswith("  File ")), len(lines))
    return "\n".join(lines[: min(end, frames)] if end else lines[:frames])


class _Kind(enum.IntEnum):
    """How much an exit explains by itself; the lowest is the cause."""

    OWN_FAILURE = 0
    EARLY_EXIT = 1
    TOLD_TO_END = 2
    PEER_GONE = 3


# --- what messages mean -------------------------------------------------------------------------------------------------

_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)"
    r"|broken pipe|socket (was )?closed|failed to (recv|send)|recvValue failed|sendBytes failed"
    r"|remote (process|worker) (has )?(exited|crash)|remote side (of|closed)"
    r"|(ncclRemoteError|ncclSystemError|ncclInternalError|ncclInProgress)|NCCL communicator was aborted"
    r"|application timeout caused pair closure|gloo connectFullMesh failed"
    r"|(heartbeat|monitoredBarrier).{0,80}(timed out|failed|timeout)"
    r"|TCPStore.{0,120}(timed out|timeout|broken)",
    re.IGNORECASE | re.DOTALL,
)
_TIMEOUT = re.compile(
    r"timed out waiting|watchdog caught collective operation timeout|collective.{0,40}timed? ?out"
    r"|wait timeout after|barrier.{0,80}timed? ?out",
    re.IGNORECASE | re.DOTALL,
)
_CLIENTS = re.compile(
    r"timed? ?out.{0,60}clients|clients? joined|rendezvous.{0,40}timed? ?out", re.IGNORECASE | re.DOTALL
)
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|failed to (bind|listen)", re.IGNORECASE)
_CUDA_OOM = re.compile(r"CUDA out of memory|CUDA error: out of memory|HIP out of memory", re.IGNORECASE)
_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|CUDA error: (unspecified launch failure|unknown error"
    r"|hardware stack error|all CUDA-capable devices are busy|system not yet initialized)|no CUDA-capable device"
    r"|CUDA driver initialization failed|Xid \d+",
    re.IGNORECASE,
)
_NO_SCRIPT = re.compile(
    r"can't open file .*No such file|can't find '__main__' module|^\S*python\S*: No module named", re.MULTILINE
)
_DISTRIBUTED_ERRORS = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
)
_CODE_ERRORS = frozenset({"ImportError", "SyntaxError", "NameError"})
_LAUNCH_ERRORS = frozenset({"RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError"})
_RESUME_ERRORS = frozenset({"CheckpointError", "CheckpointMismatch"})
_ASKED_TO_END = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:? ?", re.MULTILINE)
_EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?::\s*(.*))?$", re.DOTALL)
_SIGNAL_HINTS = {
    signal.SIGBUS: "often a full /dev/shm: data-loader workers pass batches through it",
    signal.SIGABRT: "a library called abort(), its last words are on standard error",
    signal.SIGTERM: "sent from outside",
    signal.SIGINT: "sent from outside",
    signal.SIGHUP: "sent from outside",
}


@dataclass(frozen=True, slots=True)
class _Error:
    """An exception, from the rank's error file or read off its standard error."""

    type: str
    bases: frozenset[str]
    """Unqualified names of the class and its bases."""
    message: str
    traceback: str


def _error_of(exit_: Exit) -> _Error | None:
    if exit_.error is not None:
        name = str(exit_.error.get("type") or "Exception")
        names = [name, *map(str, exit_.error.get("mro") or ())]
        return _Error(
            type=name,
            bases=frozenset(n.rpartition(".")[2] for n in names),
            message=str(exit_.error.get("message") or ""),
            traceback=str(exit_.error.get("traceback") or ""),
        )
    tail = _RANK_PREFIX.sub("", exit_.stderr_tail)
    if exit_.exitcode is None or exit_.exitcode <= 0:
        return None
    _, found, after = tail.rpartition("Traceback (most recent call last):")
    lines = after.strip("\n").split("\n")
    for i, line in enumerate(lines):
        if found and line and not line[0].isspace():
            match = _EXCEPTION_LINE.match("\n".join(lines[i:]).strip())
            if match:
                name = match[1]
                traceback = found + "\n" + "\n".join(lines)
                bases = frozenset({name.rpartition(".")[2]})
                if "ModuleNotFoundError" in bases:
                    bases |= {"ImportError"}
                return _Error(type=name, bases=bases, message=match[2] or "", traceback=traceback)
            break
    return None


class _Suspect:
    """One exit, and what it says about itself."""

    def __init__(self, exit_: Exit) -> None:
        self.exit = exit_
        self.error = _error_of(exit_)
        self.words = exit_.stderr_tail if self.error is None else f"{self.error.type}: {self.error.message}"
        self.kind = self._kind()

    def _kind(self) -> _Kind:
        code = self.exit.exitcode
        if self.error is None and code == 0:
            return _Kind.EARLY_EXIT
        if self.error is None and code in _ASKED_TO_END:
            return _Kind.TOLD_TO_END
        # A native crash is the rank's own, whatever it printed before; only a watchdog's abort() is about others.
        own_crash = self.error is None and code is not None and code < 0 and code != -signal.SIGABRT
        # What torch.distributed raises is a RuntimeError; a data server that refuses a connection raises OSErrors.
        by_torch = self.error is None or bool(self.error.bases & _DISTRIBUTED_ERRORS)
        about_others = by_torch and any(p.search(self.words) for p in (_PEER_GONE, _TIMEOUT, _CLIENTS))
        if about_others and not own_crash and not _PORT_TAKEN.search(self.words):
            return _Kind.PEER_GONE
        return _Kind.OWN_FAILURE

    def explain(self, *, alone: bool, all_ended: bool, oom_killed: bool) -> Diagnosis:
        """The diagnosis if this exit is the cause. `all_ended`: every rank ended with status 0."""
        if self.kind is _Kind.PEER_GONE:
            return self._about_others(alone=alone)
        if self.kind is _Kind.EARLY_EXIT:
            how = f"rank {self.exit.rank} ended early with status 0"
            if all_ended and not alone:
                how = "every rank ended with status 0, none said that training was over"
            return self._found("early_exit", "process", "high", f"{how} (step {self.exit.step})")
        if self.error is not None:
            return self._exception(self.error)
        return self._death(oom_killed=oom_killed)

    def _about_others(self, *, alone: bool) -> Diagnosis:
        if _CLIENTS.search(self.words):
            return self._found("launch", "launch", "medium", f"rank {self.exit.rank}: the workers did not all meet")
        if _TIMEOUT.search(self.words):
            detail = f"rank {self.exit.rank} waited in a collective until its timeout; some rank did not take part"
            return self._found("collective_timeout", "process", "low", detail)
        detail = f"rank {self.exit.rank} lost its connection to a peer; no rank is known to have failed before it"
        return self._found("connection_lost", "process", "medium" if alone else "low", detail)

    def _exception(self, error: _Error) -> Diagnosis:
        detail = f"rank {self.exit.rank}: {_headline(error)}"
        words = self.words
        if _CUDA_OOM.search(words) or "OutOfMemoryError" in error.bases:
            return self._found("cuda_oom", "process", "high", detail)
        if _DEVICE.search(words):
            return self._found("device_error", "device", "high", detail)
        if "StateRejected" in error.bases:
            return self._found("guard", "code", "high", detail)
        if "CheckpointMismatch" in error.bases:
            lines = [line.strip() for line in error.message.splitlines() if line.strip()]
            return self._found("script_differs", "code", "high", " ".join([detail, *lines[1:2]]))
        if error.bases & _RESUME_ERRORS:
            return self._found("resume_error", "code", "high", detail)
        if "SetupError" in error.bases:
            return self._found("setup_error", "code", "high", detail)
        if error.bases & _LAUNCH_ERRORS or (_PORT_TAKEN.search(words) and self.exit.step == 0):
            return self._found("launch", "launch", "high", detail)
        not_there = _NO_SCRIPT.search(error.message) or _raised_by_runpy(error.traceback)
        if error.bases & {"FileNotFoundError", "ImportError"} and not_there:
            return self._found("script_not_found", "code", "high", detail)
        if error.type == "SystemExit":
            said = "" if error.message.lstrip("-").isdecimal() else f": {_headline(error).partition(': ')[2]}"
            return self._found(
                "exit_status", "process", "high", f"rank {self.exit.rank} ended with status {self.exit.exitcode}{said}"
            )
        severity: Severity = "code" if error.bases & _CODE_ERRORS else "process"
        return self._found("exception", severity, "high", detail)

    def _death(self, *, oom_killed: bool) -> Diagnosis:
        code, who, tail = self.exit.exitcode, f"rank {self.exit.rank}", self.exit.stderr_tail
        assert code is not None
        if code < 0:
            return self._signal(code, oom_killed=oom_killed)
        if _NO_SCRIPT.search(tail):
            return self._found("script_not_found", "code", "high", f"{who}: {_last_line(tail)}")
        if _PORT_TAKEN.search(tail) and self.exit.step == 0:
            return self._found("launch", "launch", "medium", f"{who}: {_last_line(tail)}")
        if _CUDA_OOM.search(tail):
            return self._found("cuda_oom", "process", "medium", f"{who} ended with status {code}: CUDA out of memory")
        return self._found("exit_status", "process", "high", f"{who} ended with status {code}")

    def _signal(self, code: int, *, oom_killed: bool) -> Diagnosis:
        try:
            number = signal.Signals(-code)
            name = number.name
        except ValueError:
            return self._found("signal", "process", "high", f"rank {self.exit.rank} was killed by signal {-code}")
        hint = _SIGNAL_HINTS.get(number, "")
        if number is signal.SIGKILL and oom_killed:
            hint = "probably out of memory: the kernel killed a process of this job"
        detail = f"rank {self.exit.rank} was killed by {name}" + (f" ({hint})" if hint else "")
        confidence: Confidence = "medium" if self.kind is _Kind.TOLD_TO_END else "high"
        return self._found("signal", "process", confidence, detail)

    def _found(self, cause: str, severity: Severity, confidence: Confidence, detail: str) -> Diagnosis:
        return Diagnosis(
            cause=cause,
            severity=severity,
            confidence=confidence,
            rank=self.exit.rank,
            node=self.exit.node or None,
            detail=detail,
            message=_message(self.exit, self.error),
        )


# --- when, and in whose words -------------------------------------------------------------------------------------------


def _failure_times(exits: Sequence[Exit]) -> dict[int, float]:
    """When each rank failed, on one clock: an exception's own time where there is one, else when the rank was seen dead.

    An error file carries its host's monotonic clock. A process dies after its exception, so on each node the smallest
    gap between the two clocks is nearest to their true distance. Evidence without times falls back to the order.
    """
    timed = len({e.t for e in exits}) > 1
    seen = {e.rank: e.t if timed else e.order * 1e-3 for e in exits}
    raised: dict[int, float] = {}
    for e in exits:
        mono = (e.error or {}).get("mono")
        if isinstance(mono, int | float) and math.isfinite(mono):
            raised[e.rank] = float(mono)
    offsets: dict[str, float] = {}
    for e in exits:
        if e.rank in raised:
            offsets[e.node] = min(offsets.get(e.node, math.inf), seen[e.rank] - raised[e.rank])
    return {e.rank: raised[e.rank] + offsets[e.node] if e.rank in raised else seen[e.rank] for e in exits}


def _only_victims(exits: Sequence[Exit]) -> Diagnosis:
    """Every rank was killed by us: they hung, or the node's agent was stopped. An exception among them is worth showing."""
    for e in exits:
        error = _error_of(e)
        if error is not None and not (_PEER_GONE.search(error.message) or _TIMEOUT.search(error.message)):
            detail = f"every rank had to be killed; before that, rank {e.rank} had raised {error.type}"
            message = _message(e, error)
            return Diagnosis(cause="unknown", severity="process", confidence="low", detail=detail, message=message)
    detail = "every rank had to be killed, none failed by itself"
    return Diagnosis(cause="unknown", severity="process", confidence="low", detail=detail)


def _headline(error: _Error) -> str:
    name = error.type.removeprefix("builtins.")
    first = error.message.strip().partition("\n")[0]
    return f"{name}: {first}" if first else name


def _message(exit_: Exit, error: _Error | None) -> str:
    if error is None:
        return "\n".join(exit_.stderr_tail.rstrip().split("\n")[-TAIL_LINES:])
    name = error.type.removeprefix("builtins.")
    last = f"{name}: {error.message}" if error.message else name
    lines = error.traceback.rstrip().split("\n")[-TRACEBACK_LINES:]
    shown = "\n".join(lines)
    return shown if shown.endswith(last) else f"{shown}\n{last}".lstrip("\n")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()


def _raised_by_runpy(traceback: str) -> bool:
    frames = re.findall(r'^\s*File "([^"]+)"', traceback, re.MULTILINE)
    return bool(frames) and "runpy" in frames[-1]
