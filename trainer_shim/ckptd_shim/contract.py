"""What ckptd and the shim hand to each other: names of files and variables, and the schema of every document.

Both sides import this module and nothing else of each other. It needs the standard library only, so the daemon can
read it without importing torch. Documents are JSON; a reader refuses what it cannot understand with `ContractError`,
which says what is wrong with which document.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
import struct
from dataclasses import dataclass, field
from typing import Any, Final, Self, get_args, get_origin, get_type_hints

FORMAT: Final = 1
"""Version of the checkpoint directory's layout, in `COMMITTED`."""

ENV_LAUNCH: Final = "CKPTD_LAUNCH"
"""Path of the `LaunchContext` document, in the environment of every worker that ckptd starts."""
ENV_RUN_ID: Final = "CKPTD_RUN_ID"
"""Marks every process of a run, so that one which made its own session is still found."""
ENV_ATTEMPT: Final = "CKPTD_ATTEMPT"
"""Marks every process of an attempt, likewise."""
ENV_DRILL: Final = "CKPTD_DRILL"
"""`1` in the environment of a worker whose checkpoint is only to be tried: evaluate, do not train."""
ENV_NODE: Final = "CKPTD_NODE"
"""Marks every process on a node with its name, so that two nodes may be one machine."""

COMMITTED: Final = "COMMITTED"
DCP_METADATA: Final = ".metadata"
OWNER: Final = ".run"
"""File in a checkpoint directory that holds the id of the run which began it: written first, before any data."""
CONTROL_FILE: Final = "control.json"
REPORT_FILE: Final = "report.jsonl"


class ContractError(ValueError):
    """A document that crosses between ckptd and the shim cannot be read. The message names it and what is wrong."""


# --- names of files -------------------------------------------------------------------------------------------------

_STEP_DIR = re.compile(r"step_(\d+)\.a(\d+)")


def checkpoint_dirname(step: int, attempt: int) -> str:
    """Name of the directory that attempt `attempt` writes step `step` into: unique, so a zombie harms nobody."""
    return f"step_{step:09d}.a{attempt:04d}"


def parse_checkpoint_dirname(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint directory's name, None for any other name."""
    match = _STEP_DIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def extras_name(rank: int) -> str:
    """Name of one rank's file of RNG, data position and counters."""
    return f"extras_rank{rank}"


def attempt_dirname(attempt: int) -> str:
    """Name of an attempt's directory below `<run_dir>/attempts`."""
    return f"{attempt:04d}"


def attempt_dirs(directory: str | os.PathLike[str]) -> dict[int, str]:
    """Names of the attempts' directories below `<run_dir>/attempts`, by number; whatever else is there is somebody else's.

    Raises OSError.
    """
    return {int(name): name for name in os.listdir(directory) if name.isascii() and name.isdecimal()}


def pulse_name(rank: int) -> str:
    """Name of a rank's heartbeat page in the attempt's directory."""
    return f"rank{rank}.pulse"


def stdout_name(rank: int) -> str:
    """Name of the file that takes a rank's standard output."""
    return f"rank{rank}.out"


def stderr_name(rank: int) -> str:
    """Name of the file that takes a rank's standard error."""
    return f"rank{rank}.err"


def error_name(rank: int) -> str:
    """Name of the file in which a rank leaves the exception that ended it."""
    return f"rank{rank}.error.json"


def stacks_name(rank: int) -> str:
    """Name of the file that takes a rank's Python stacks when they are asked for."""
    return f"rank{rank}.stacks"


# --- documents ------------------------------------------------------------------------------------------------------


def _check(value: Any, hint: Any, where: str) -> Any:
    """Return `value` if it has the JSON shape of the annotation `hint`, nested documents built; else ContractError."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise ContractError(f"{where} should be a list, is {value!r}")
        items = [_check(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise ContractError(f"{where} should be an object, is {value!r}")
        return {key: _check(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if args:  # a union: X | None
        if value is None and type(None) in args:
            return None
        return _check(value, next(a for a in args if a is not type(None)), where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and hint is not bool:
        raise ContractError(f"{where} should be {hint.__name__}, is {value!r}")
    if not isinstance(value, hint):
        raise ContractError(f"{where} should be {hint.__name__}, is {value!r}")
    return value


def _build(cls: type[Any], document: Any, where: str) -> Any:
    if not isinstance(document, dict):
        raise ContractError(f"{where} should be an object, is {document!r}")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name in document:
            values[f.name] = _check(document[f.name], hints[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ContractError(f"{where} lacks {f.name!r}")
    return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A JSON document with a fixed schema. Keys that a newer writer added are ignored by an older reader."""

    def to_json(self) -> str:
        """The document as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Self:
        """Read a document; `where` names it in errors.

        Raises:
            ContractError: not JSON, a missing key, or a value of the wrong type.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ContractError(f"{where} is not JSON: {error}") from None
        result = _build(cls, document, where)
        assert isinstance(result, cls)
        return result

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a document from a file. Raises OSError, or ContractError that names the path."""
        with open(path, "rb") as file:
            return cls.from_json(file.read(), where=os.fspath(path))

    def write(self, path: str | os.PathLike[str], *, durable: bool = False) -> None:
        """Write through a temporary name and a rename, so that a reader sees the old document or the new one."""
        write_atomically(path, self.to_json().encode() + b"\n", durable=durable)


def write_atomically(path: str | os.PathLike[str], data: bytes, *, durable: bool = False) -> None:
    """Replace the file at `path` by `data` in one step; with `durable`, file and directory are on disk on return."""
    path = os.fspath(path)
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        unlink_quietly(temporary)
        raise
    if durable:
        fsync_directory(os.path.dirname(path) or ".")


def unlink_quietly(path: str) -> None:
    """Remove a file that may not be there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class ResumeFrom(Document):
    """The one checkpoint that an attempt may resume from, chosen and verified by ckptd."""

    step: int
    tier: str
    path: str
    marker_crc32c: str
    """CRC32C of the bytes of COMMITTED, eight hex digits: the shim refuses a directory whose marker differs."""
    partial: bool = False
    """The tier is each node's own: files that no rank of this node needs may be missing here."""


@dataclass(frozen=True, kw_only=True)
class Drill(Document):
    """What `ckptd prove` asks of a run besides training: to write down what it does, and to end at a given step."""

    trace: str
    """File that rank 0 appends to: a JSON object a line, see `ckptd_shim.trace`."""
    stop_at_step: int
    """All ranks save and stop with this step, as on request."""
    digest_at: list[int]
    """Steps at which the full state is digested."""
    kill_at_step: int | None = None
    """The last rank ends itself by SIGKILL after this step, once no save is in flight any more."""


@dataclass(frozen=True, kw_only=True)
class RestoreDrill(Document):
    """What `ckptd drill` asks of a run: to restore, say how good the state is, and leave without a save."""

    result: str
    """File that rank 0 writes a `DrillResult` to."""


@dataclass(frozen=True, kw_only=True)
class DrillResult(Document):
    """What a script found of the checkpoint that it restored in a drill."""

    step: int
    """The step that was restored."""
    loss: float | None
    """None: it is not finite."""
    by: str
    """`evaluation`: by `shim.evaluated`; `step`: the script has no evaluation, this is its next training step's loss."""


@dataclass(frozen=True, kw_only=True)
class Guard(Document):
    """Which state is fit to be committed, see `ckptd_shim.guard`."""

    finite: bool = True
    """Refuse NaN and infinity in the loss, the parameters and the optimizer's state."""
    loss_spike: float | None = None
    """Refuse a loss that is so many robust standard deviations above its recent median."""
    param_norm: float | None = None
    """Refuse parameters whose Euclidean norm is larger."""
    param_norm_spike: float | None = None
    """Refuse parameters whose norm is so many robust standard deviations away from that of the recent commits."""


@dataclass(frozen=True, kw_only=True)
class LaunchContext(Document):
    """What a worker is told at launch: `CKPTD_LAUNCH` names a file that holds this."""

    run_id: str
    run_name: str
    attempt: int
    attempt_dir: str
    control_path: str
    tier: str
    """Name of the tier that the shim writes to: the fastest."""
    save_dir: str
    """That tier's directory for this run, `<tier>/<run name>`; it exists."""
    resume: ResumeFrom | None
    world_at_start: int | None
    """World size of the run's first attempt; another one makes a checkpoint not comparable. None: this is the first."""
    global_batch: int | None
    micro_batch: int | None
    interval_s: float | None
    interval_steps: int | None
    commit_sequence: int
    """Number of the newest commit of this run so far; the shim counts on from it."""
    durable_writes: bool = True
    shared: bool = True
    """All nodes see the same files in `save_dir`. False: each has its own there, where its ranks' files go."""
    guard: Guard | None = None
    """None: the defaults of `Guard`."""
    skip_data_to: int | None = None
    """Data position, in global samples, at which to go on if that of the checkpoint lies before it."""
    drill: Drill | None = None
    """None, but for `ckptd prove`."""
    restore_drill: RestoreDrill | None = None
    """None, but for `ckptd drill`."""


@dataclass(frozen=True, kw_only=True)
class Control(Document):
    """The control file: what the daemon asks of a running attempt."""

    seq: int
    attempt: int
    interval_s: float | None
    interval_steps: int | None
    save_request: int
    """Number of the newest request for a save, 0 for none yet; the shim serves each number once."""
    stop_after_save: bool
    reason: str
    issued_at: float


@dataclass(frozen=True, kw_only=True)
class FileDigest(Document):
    """One file of a checkpoint."""

    name: str
    size: int
    crc32c: str


@dataclass(frozen=True, kw_only=True)
class Marker(Document):
    """`COMMITTED`, written last: everything listed here is durable and has the digest given here."""

    format: int
    run_id: str
    sequence: int
    """Commits of one run are ordered by this number, never by name, step or time."""
    step: int
    samples_seen: int
    epoch: int
    attempt: int
    world_size: int
    global_batch: int | None
    loss: float | None
    created: float
    files: list[FileDigest]
    comparable: bool
    comparable_reason: str | None = None
    torch: str = ""
    validation_loss: float | None = None
    """The newest that `shim.evaluated` was told before the save."""
    validation_step: int | None = None
    """The step at which it was."""
    loss_median: float | None = None
    """Of the training losses of the last minute or so, once there are enough of them."""
    loss_deviation: float | None = None
    """Their standard deviation, robustly."""
    param_norms: list[float] = field(default_factory=list)
    """Norms of the parameters in this commit (last) and in those before it, where the guard looks at them."""
    nodes: dict[str, list[int]] = field(default_factory=dict)
    """On a tier that each node has for itself: the node whose ranks wrote them -> places in `files`; else empty."""
    needs: list[list[int]] = field(default_factory=list)
    """For each rank the places in `files` that its tensors are read from while the layout stays; empty: not known."""


# --- heartbeat page -------------------------------------------------------------------------------------------------


class Phase(enum.IntEnum):
    """What a rank is doing, on its heartbeat page."""

    IMPORT = 0
    INIT = 1
    RESTORE = 2
    FIRST_STEP = 3
    STEP = 4
    EVAL = 5
    SAVE = 6
    END = 7


PULSE_SIZE: Final = 4096
PULSE_MAGIC: Final = b"ckptdp01"
PULSE_STRUCT: Final = struct.Struct("<8sQIIQQQdd")
"""magic, seq, pid, phase, step, samples, monotonic ns of the last beat, loss (NaN: unknown), step seconds (NaN: unknown).

`seq` is odd while the writer is inside an update: a reader that sees an odd number, or two different ones around its
read, reads again.
"""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """One reading of a heartbeat page."""

    pid: int
    phase: Phase
    step: int
    samples: int
    beat: float
    """CLOCK_MONOTONIC of the writing host, seconds."""
    loss: float | None
    step_s: float | None


def read_pulse(page: bytes | bytearray | memoryview) -> Pulse | None:
    """Decode a page; None when it is not one yet, or is being written just now."""
    if len(page) < PULSE_STRUCT.size:
        return None
    magic, seq, pid, phase, step, samples, beat_ns, loss, step_s = PULSE_STRUCT.unpack_from(page)
    if magic != PULSE_MAGIC or seq % 2 or phase > Phase.END:
        return None
    return Pulse(
        pid=pid,
        phase=Phase(phase),
        step=step,
        samples=samples,
        beat=beat_ns / 1e9,
        loss=None if loss != loss else loss,  # noqa: PLR0124  NaN is the one value that differs from itself
        step_s=None if step_s != step_s else step_s,  # noqa: PLR0124
    )


# --- report file ----------------------------------------------------------------------------------------------------


class Report(enum.StrEnum):
    """Kinds of line in rank 0's report file; each line is `{"kind": ..., "mono": CLOCK_MONOTONIC seconds, ...}`."""

    INITIALISED = "initialised"
    """`TrainerShim` exists and `resume` begins: {world_size}."""
    RESTORED = "restored"
    """`resume` is done: {step, samples, seconds, path} (path null: a fresh start)."""
    FIRST_STEP = "first_step"
    """The first step of the attempt is complete: {step}."""
    SAVE_STAGED = "save_staged"
    """Training goes on, the write begins: {step, stall_s} (this rank's stall)."""
    SAVE_COMMITTED = "save_committed"
    """{step, samples, path, tier, bytes, stall_s (slowest rank), upload_s (save begun to committed), sequence, marker_crc32c, loss, comparable,
    slowdown_s (seconds of training that the upload of the save before cost, signed; only where it is known)}."""
    SAVE_FAILED = "save_failed"
    """{step, path, tier, stall_s, error, errno (or null)}. The partial directory is gone unless `left` says otherwise."""
    SAVE_REJECTED = "save_rejected"
    """{step, path, tier, stall_s, why, rank (null: no single one), position (of the data)}. The guard refused the state; nothing of it is kept."""
    PINNED = "pinned"
    """`shim.pin`: {step, path, label, pinned (true), source}."""
    CONTROL_IGNORED = "control_ignored"
    """{why}."""
    STOPPING = "stopping"
    """The requested save is committed and `step` returned True: {step}."""
    FINISHED = "finished"
    """`close` is done: {step, samples, saved, total_steps}. `stopping` in it says whether it was on request."""


@dataclass(frozen=True, kw_only=True)
class WorkerError(Document):
    """A rank's `error.json`: the exception that ended its script."""

    type: str
    """Qualified name of the exception's class."""
    mro: list[str]
    """Qualified names of its bases too, most derived first, for a diagnosis that knows only the base."""
    message: str
    traceback: str
    at: float
    """Wall-clock label."""
    mono: float
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
