"""Everything that can happen to a run, as the ledger keeps it.

Two times stand on each event. `t` is the run's own clock: seconds since the run began, never going back, carried on
over restarts of the daemon; every duration is a difference of two `t`. `at` is the wall clock, a label for people: no
decision reads it. Events are appended in the order in which the daemon learnt of them, so `t` (when it happened) may
lie a little before the `t` of the event before; a fold clamps, it never goes negative.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Json = dict[str, Any]

_REGISTRY: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened. `attempt`, `node` and `rank` say to what, where that makes sense."""

    kind: ClassVar[str] = ""

    t: float
    at: float = 0.0
    attempt: int | None = None
    node: str | None = None
    rank: int | None = None


_COMMON = ("t", "at", "attempt", "node", "rank")


# --- the run and its daemon -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonStarted(Event):
    """A daemon took the run over: the first of them begins the run. `policy` holds from here on."""

    kind: ClassVar[str] = "daemon_started"
    policy: Json = field(default_factory=dict)
    pid: int = 0
    host: str = ""
    version: str = ""
    boot_id: str = ""
    mono: float = 0.0
    epoch: int = 0
    """How often the run was taken over from a daemon on another host."""
    allocation: str = ""
    """Which allocation of a scheduler it is in, and which start of it; empty: in none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requested(Event):
    """Somebody asked: `save`, `stop` (save first), `stop_now` (do not wait for a save), `relaunch` (save, then launch again)."""

    kind: ClassVar[str] = "requested"
    request: Literal["save", "stop", "stop_now", "relaunch"] = "save"
    source: str = ""
    """`SIGTERM`, `SIGINT`, `ckptd stop`, ..."""
    exit_status: int | None = None
    """What the daemon exits with once the request is served."""
    timeout_s: float = 600.0
    """How long the save may take before the workers are stopped without it."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(Event):
    """The run is over; nothing of it is alive."""

    kind: ClassVar[str] = "run_ended"
    outcome: Literal["finished", "ended early", "failed", "stopped", "unavailable"] = "failed"
    """`ended early`: every worker ended with status 0, and training was not at its end."""
    exit_status: int = 1
    detail: str = ""


# --- nodes and devices ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConnected(Event):
    """A node's agent dialled in. `devices`: [{index, id, name}]; `running`: the attempt it is carrying, if any."""

    kind: ClassVar[str] = "agent_connected"
    pid: int = 0
    devices: list[Json] = field(default_factory=list)
    running: int | None = None
    address: str = ""
    """Where other nodes reach this one: its end of the connection. Empty: it is the daemon's own machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLost(Event):
    """A node's agent is gone: `why` says how that is known. What it launched may live."""

    kind: ClassVar[str] = "agent_lost"
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost(Event):
    """No word from a node for `cluster.heartbeat_timeout`, or it cannot be reached at all: `why` says which.

    Its agent, if it lives, has ended a lone attempt by itself before that (`cluster.fence_timeout`).
    """

    kind: ClassVar[str] = "node_lost"
    why: str = ""
    silent_s: float = 0.0
    """How long nothing had been heard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReported(Event):
    """The answer to a question after a node's health, or a change that the agent noticed. Indices of bad devices."""

    kind: ClassVar[str] = "health_reported"
    unhealthy: list[int] = field(default_factory=list)
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDrained(Event):
    """A person takes a device out of use, or gives it back with a clean record. `device`: its identity."""

    kind: ClassVar[str] = "device_drained"
    device: str = ""
    drained: bool = True
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryReported(Event):
    """What a node found when it was asked which checkpoint to resume from.

    `chosen` is the newest committed checkpoint whose every file has the size and digest of its marker, as
    `{step, tier, path, marker_crc32c, sequence, attempt, samples_seen, world_size, comparable}`, or None; with
    `fetched_from` {tier, path} where it was brought from an object store for that.
    `rejected`: committed, but not whole: [{step, tier, path, problem}]. `commits`: how many were seen at all.
    `unreachable`: tiers that could not be read: [{tier, problem, expected}], `expected` being the newest commit sequence
    that the ledger knows of there.
    """

    kind: ClassVar[str] = "inventory_reported"
    chosen: Json | None = None
    rejected: list[Json] = field(default_factory=list)
    unreachable: list[Json] = field(default_factory=list)
    commits: int = 0
    newest_sequence: int = 0
    """The highest number among all markers seen, whole or not: the next commit counts on from it."""
    seconds: float = 0.0
    problem: str = ""
    """Why the question could not be answered at all; the daemon asks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingReported(Event):
    """Each node left a file on tiers of which nobody says whether all see the same there: whose files one node has seen.

    `nodes`: those that were to leave one. `seen`: {tier: [node]}.
    """

    kind: ClassVar[str] = "sharing_reported"
    nodes: list[str] = field(default_factory=list)
    seen: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingFound(Event):
    """What follows from that, for every node from now on. `shared`: {tier: whether all nodes see the same files there}."""

    kind: ClassVar[str] = "sharing_found"
    shared: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldingsReported(Event):
    """What a node has in its own directories of tiers that the nodes do not share: see `holdings`.

    `port`: where other agents get files from it. `rejected`: files that are not what was committed, as in
    `InventoryReported`; they are not held.
    """

    kind: ClassVar[str] = "holdings_reported"
    holdings: list[Json] = field(default_factory=list)
    rejected: list[Json] = field(default_factory=list)
    port: int = 0
    seconds: float = 0.0


# --- an attempt, in the order in which it lives -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptLaunched(Event):
    """The daemon decided to launch `attempt` on `placement` ({node: [device index]}), from `resume` (None: afresh)."""

    kind: ClassVar[str] = "attempt_launched"
    world_size: int = 0
    placement: dict[str, list[int]] = field(default_factory=dict)
    resume: Json | None = None
    grounds: str = "start"
    """`start`, `restart`, `grow` or `resume` (a run that had stopped)."""
    devices_wanted: int = 0
    """World size that would be used if every device were healthy; the gap to `world_size` is degraded time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesGathered(Event):
    """A node has every file that its ranks need of the checkpoint to resume from; `fetched` of them from other nodes."""

    kind: ClassVar[str] = "files_gathered"
    fetched: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOpened(Event):
    """The first node of an attempt over several nodes listens for all of their workers there."""

    kind: ClassVar[str] = "store_opened"
    host: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersStarted(Event):
    """Every worker of the attempt on this node is a process. `workers`: {rank: {pid, start_time}} (keys are strings)."""

    kind: ClassVar[str] = "workers_started"
    workers: Json = field(default_factory=dict)
    warm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersInitialised(Event):
    """Rank 0 built its shim: imports and process group are done, restoring begins."""

    kind: ClassVar[str] = "workers_initialised"
    world_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRestored(Event):
    """`resume` returned; `step` is where training goes on from (0: a fresh start)."""

    kind: ClassVar[str] = "state_restored"
    step: int = 0
    samples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep(Event):
    """The first step of the attempt is complete."""

    kind: ClassVar[str] = "first_step"
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Event):
    """Where training is, now and then (about once a minute): for step time and for the timeline."""

    kind: ClassVar[str] = "progress"
    step: int = 0
    samples: int = 0
    loss: float | None = None
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStaged(Event):
    """The state at `step` is copied; training goes on while it is written. `stall_s` is rank 0's."""

    kind: ClassVar[str] = "save_staged"
    step: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCommitted(Event):
    """A checkpoint is committed. `stall_s`: slowest rank, its wait for an earlier save included; `upload_s`: U.

    `slowdown_s`: training time lost to the upload, summed over the steps that it made slower. Steps end after the commit,
    so it is of the save before in the same attempt, which cost about the same; signed noise, 0 where nothing is known.
    """

    kind: ClassVar[str] = "save_committed"
    step: int = 0
    samples: int = 0
    tier: str = ""
    path: str = ""
    bytes: int = 0
    stall_s: float = 0.0
    slowdown_s: float = 0.0
    upload_s: float = 0.0
    sequence: int = 0
    marker_crc32c: str = ""
    loss: float | None = None
    world_size: int = 0
    comparable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(Event):
    """A save did not commit. Training went on; what was committed before is untouched."""

    kind: ClassVar[str] = "save_failed"
    step: int = 0
    tier: str = ""
    path: str = ""
    stall_s: float = 0.0
    error: str = ""
    errno: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRejected(Event):
    """The guard found a state unfit to be committed, and nothing of it was kept. `rank`: whose part, None: all of them."""

    kind: ClassVar[str] = "save_rejected"
    step: int = 0
    tier: str = ""
    path: str = ""
    stall_s: float = 0.0
    why: str = ""
    position: int | None = None
    """Where the data stands (global samples), what was passed over included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPinned(Event):
    """A committed checkpoint is to be kept whatever the rules say, on every tier that holds it; or (`pinned` false) no more."""

    kind: ClassVar[str] = "checkpoint_pinned"
    step: int = 0
    path: str = ""
    label: str = ""
    pinned: bool = True
    source: str = ""
    """`ckptd pin`, `ckptd unpin`, or `shim.pin`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted(Event):
    """A checkpoint directory, committed or not, is gone from a tier by our own doing."""

    kind: ClassVar[str] = "checkpoint_deleted"
    step: int = 0
    tier: str = ""
    path: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack(Event):
    """The run goes back to a commit: those with a higher `sequence`, up to the next launch, are suspect from here on."""

    kind: ClassVar[str] = "rolled_back"
    to_step: int = 0
    path: str = ""
    sequence: int = 0
    source: str = ""
    """`ckptd rollback` or `guard`."""
    why: str = ""
    samples: int = 0
    """Trained on in that commit."""
    tier: str = ""
    skip_to: int | None = None
    """Data up to this position (global samples) is passed over when the run goes on; None: nothing is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCopied(Event):
    """A checkpoint was copied from one tier to another, verified and committed there. `attempt`: which one had saved it.

    `path`: where it is now; `source`: where it was read; `seconds`: what the copy took.
    """

    kind: ClassVar[str] = "checkpoint_copied"
    step: int = 0
    tier: str = ""
    path: str = ""
    source: str = ""
    bytes: int = 0
    seconds: float = 0.0
    sequence: int = 0
    marker_crc32c: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMirrored(Event):
    """A node has a verified copy of what `source`, another node, holds of a commit. `nodes`: how many have a part of it.

    With one event from each of them the commit outlives the loss of any one node.
    """

    kind: ClassVar[str] = "checkpoint_mirrored"
    step: int = 0
    tier: str = ""
    path: str = ""
    source: str = ""
    nodes: int = 0
    sequence: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFailed(Event):
    """A copy did not come about; it is tried again after `retry_s` seconds. `attempts`: how often in a row it failed."""

    kind: ClassVar[str] = "copy_failed"
    step: int = 0
    tier: str = ""
    path: str = ""
    source: str = ""
    error: str = ""
    errno: int | None = None
    attempts: int = 1
    retry_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureDetected(Event):
    """The first worker of the attempt died, or its agent did. `t` is when it died, `detected_t` when that was known."""

    kind: ClassVar[str] = "failure_detected"
    detected_t: float = 0.0
    exitcode: int | None = None
    """As subprocess gives it: negative for a signal. None: not a worker's death."""
    step: int = 0
    """The last step that any rank completed."""
    launch: bool = False
    """No worker came to be: the launch itself failed."""
    hang: bool = False
    """Nobody died: training does not move. `t` is when the last rank moved."""
    lost: Literal["", "agent", "node"] = ""
    """Nobody is known to have died: an agent is gone, or a whole node is out of reach."""
    guard: bool = False
    """Nobody died: the guard refused the state, and training must not go on from it."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersFinished(Event):
    """Every worker on the node ended with status 0. `stopping`: on request, after its save; `step`: the last one."""

    kind: ClassVar[str] = "workers_finished"
    step: int = 0
    stopping: bool = False
    closed: bool = False
    """Rank 0 went through `shim.close()`: without it an exit status of 0 is an early exit, not an end."""
    total_steps: int | None = None
    """The script's own target, if it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(Event):
    """Nothing of the attempt is alive on the node any more. `exits`: the evidence of each worker (see diagnosis).

    `leftovers`: processes that had to be killed although their worker was gone: [{pid, name, seconds}].
    `unkillable`: processes that survived SIGKILL: [{pid, name, rank or null}].
    """

    kind: ClassVar[str] = "attempt_ended"
    exits: list[Json] = field(default_factory=list)
    leftovers: list[Json] = field(default_factory=list)
    unkillable: list[Json] = field(default_factory=list)
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted(Event):
    """The diagnosis of an attempt's end that was not the run's. One row of `interruptions`. `t`: when it happened."""

    kind: ClassVar[str] = "interrupted"
    detected_t: float = 0.0
    cause: str = "unknown"
    severity: str = "process"
    planned: bool = False
    lost_steps: int = 0
    lost_seconds: float = 0.0
    step: int = 0
    detail: str = ""
    message: str = ""
    """The culprit's own last error, or the tail of its log: shown when the run gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted(Event):
    """The first step after an interruption: R, and where it went. The parts sum to `total_s`."""

    kind: ClassVar[str] = "restarted"
    interrupted_attempt: int = 0
    total_s: float = 0.0
    detect_s: float = 0.0
    stop_s: float = 0.0
    wait_s: float = 0.0
    launch_s: float = 0.0
    init_s: float = 0.0
    restore_s: float = 0.0
    first_step_s: float = 0.0
    warm: bool = False
    severity: str = "process"
    planned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalDecided(Event):
    """The interval was derived again: a row of `decisions`. None where nothing is known yet."""

    kind: ClassVar[str] = "interval_decided"
    mtbf_s: float = 0.0
    mtbf_low_s: float = 0.0
    mtbf_high_s: float = 0.0
    stall_s: float | None = None
    restart_s: float | None = None
    upload_s: float | None = None
    step_s: float | None = None
    interval_s: float | None = None
    interval_steps: int | None = None
    formula: str = "daly"
    clamped_by: str | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drilled(Event):
    """A checkpoint was restored for trial: does it load, and is the state as good as it was when it was saved?"""

    kind: ClassVar[str] = "drilled"
    tier: str = ""
    step: int | None = None
    """None: there was no checkpoint to try."""
    path: str = ""
    ok: bool = False
    loss: float | None = None
    expected: float | None = None
    compared: str = ""
    """What with what: `validation` (both by `shim.evaluated`), `training` (against the loss of the saved step)."""
    seconds: float = 0.0
    problem: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted(Event):
    """Something a person should know that no fold acts on: a full disk, an ignored control file, a taken port."""

    kind: ClassVar[str] = "noted"
    level: Literal["info", "warning", "error"] = "warning"
    what: str = ""


for _cls in (
    DaemonStarted, Requested, RunEnded, AgentConnected, AgentLost, NodeLost, HealthReported, DeviceDrained,
    InventoryReported, SharingReported, SharingFound, HoldingsReported, AttemptLaunched, FilesGathered, StoreOpened, WorkersStarted, WorkersInitialised, StateRestored, FirstStep,
    Progress, SaveStaged, SaveCommitted, SaveFailed, SaveRejected, CheckpointCopied, CheckpointMirrored, CopyFailed,
    CheckpointPinned, CheckpointDeleted, RolledBack, FailureDetected, WorkersFinished, AttemptEnded, Interrupted, Restarted, IntervalDecided, Drilled, Noted,
):  # fmt: skip
    _REGISTRY[_cls.kind] = _cls


def kinds() -> tuple[str, ...]:
    """Every kind of event, in the order of this module."""
    return tuple(_REGISTRY)


def data_of(event: Event) -> Json:
    """The part of an event that is its own, without the columns that all events share: a JSON object."""
    return {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name not in _COMMON}


def from_parts(kind: str, data: Json, *, t: float, at: float = 0.0, attempt: int | None = None,
               node: str | None = None, rank: int | None = None) -> Event:  # fmt: skip
    """Build an event from the ledger's columns. Keys that a newer ckptd added are ignored.

    Raises:
        KeyError: no event of that kind is known.
    """
    cls = _REGISTRY[kind]
    known = {f.name for f in dataclasses.fields(cls)}
    values = {key: value for key, value in data.items() if key in known and key not in _COMMON}
    return cls(t=t, at=at, attempt=attempt, node=node, rank=rank, **values)
