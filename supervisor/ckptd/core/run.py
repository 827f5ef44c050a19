"""The state machine of a run: `apply` folds one event into the state, `decide` says what the state calls for.

    starting ──> waiting ──> launching ──> initialising ──> restoring ──> first_step ──> training ──┐
        ^           ^                                                                       │        │ all ranks
        │           │ nothing is left alive                                        request  │        │ ended with 0
        │           └──────────────────────────── stopping <── a worker died ── draining <──┘        v
        │                                             │                             │              ended
        └── `ckptd run` again                         └── budget spent ──> ended <──┘ saved, all ended

`decide` never acts. What it returns is either an event to record, or a message whose need can be read off the state
again after a crash: an event is in the ledger before anything is done about it, so a daemon that starts on a ledger
replays it, decides, and goes on where the one before it stopped.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptd.core import diagnosis, events, placement
from ckptd.core.policy import Policy

MAX_LAUNCH_FAILURES = 5
"""Launches in a row that may fail before a worker of ours exists: they are no crash of the job, but they end too."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


class Status(enum.StrEnum):
    """States of a run, under the names that status, metrics and pages show."""

    STARTING = "starting"
    WAITING = "waiting"
    LAUNCHING = "launching"
    INITIALISING = "initialising"
    RESTORING = "restoring"
    FIRST_STEP = "first_step"
    TRAINING = "training"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


LIVE = frozenset(
    {Status.LAUNCHING, Status.INITIALISING, Status.RESTORING, Status.FIRST_STEP, Status.TRAINING, Status.DRAINING}
)
"""States in which workers are meant to be running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What is known of one node."""

    connected: bool = False
    lost: bool = False
    """Its agent is known to be dead; what it launched may live."""
    devices: tuple[int, ...] = ()
    unhealthy: frozenset[int] = frozenset()
    health_known: bool = False
    """Asked since the last failure."""
    inventory_known: bool = False
    started: bool = False
    """Its workers of the live attempt exist."""
    finished: bool = False
    """Its workers of the live attempt all ended with status 0."""
    ended: bool = False
    """Nothing of the live attempt is left on it."""
    running: int | None = None
    """The attempt that its agent carries. None although `started`: it has ended, which the agent is about to tell."""
    agent: int = 0
    """Process id of its agent."""
    replaced: bool = False
    """Another agent than the one that was told to launch dialled in: what that one launched, if anything, is unknown."""

    @property
    def healthy(self) -> tuple[int, ...]:
        return tuple(index for index in self.devices if index not in self.unhealthy)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything a decision depends on. Built by `apply` alone."""

    policy: Policy = field(default_factory=Policy)
    status: Status = Status.STARTING
    t: float = 0.0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    # the attempt
    attempt: int = 0
    placement: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    world_size: int = 0
    first_world: int | None = None
    resume: dict[str, Any] | None = None
    step: int = 0
    grounds: str = "start"
    # how it went wrong
    failure: events.FailureDetected | None = None
    exits: tuple[dict[str, Any], ...] = ()
    interrupted: events.Interrupted | None = None
    signatures: tuple[tuple[int, str], ...] = ()
    """(step, message) of the last failures, to say that one repeats."""
    attempts_without_progress: int = 0
    launch_failures: int = 0
    failures: int = 0
    restarts: int = 0
    not_before: float = 0.0
    waiting_since: float | None = None
    # checkpoints
    committed: events.SaveCommitted | None = None
    commit_sequence: int = 0
    ever_committed: bool = False
    inventory: events.InventoryReported | None = None
    # requests
    save_request: int = 0
    request: events.Requested | None = None
    """A stop or a relaunch that is not served yet."""
    closed: bool = False
    stopped: bool = False
    """The workers saved and stopped on request, not because they had reached their end."""
    initialised: bool = False
    """The script of the live attempt made a shim."""
    total_steps: int | None = None
    """Where the script says that its end is."""
    highest: int = 0
    """The last step that any attempt completed."""
    stopped_at: int | None = None
    """The step of the newest stop on request: training was to go on there."""
    outcome: events.RunEnded | None = None

    @property
    def devices_healthy(self) -> int:
        return sum(len(node.healthy) for node in self.nodes.values() if node.connected)

    @property
    def devices_known(self) -> int:
        return sum(len(node.devices) for node in self.nodes.values())


# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Append this event, then decide again."""

    event: events.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask a node a question; the answer is an event."""

    node: str
    what: Literal["health", "inventory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Tell a node to start its workers of the attempt."""

    node: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Tell a node to leave nothing of the attempt alive, and to say so. `grace`: SIGTERM first."""

    node: str
    attempt: int
    grace: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Steer:
    """Have the control file of the attempt say this."""

    attempt: int
    save_request: int
    stop_after_save: bool
    reason: str


Command = Record | Ask | Launch | Stop | Steer


# --- the fold -------------------------------------------------------------------------------------------------------


def _node(state: RunState, name: str | None, **changes: Any) -> dict[str, Node]:
    nodes = dict(state.nodes)
    if name is not None:
        nodes[name] = dataclasses.replace(nodes.get(name, Node()), **changes)
    return nodes


def apply(state: RunState, event: events.Event) -> RunState:
    """The state after `event`. Events of an attempt that is no longer the live one change nothing."""
    state = dataclasses.replace(state, t=max(state.t, event.t))
    handler = _HANDLERS.get(type(event))
    if handler is None:
        return state
    if event.attempt is not None and event.attempt != state.attempt and not isinstance(event, events.AttemptLaunched):
        return state
    changed: RunState = handler(state, event)
    return dataclasses.replace(changed, highest=changed.step) if changed.step > changed.highest else changed


def _daemon_started(state: RunState, event: events.DaemonStarted) -> RunState:
    state = dataclasses.replace(state, policy=Policy.from_dict(event.policy))
    # What agents told an earlier daemon is old: they say it again when they dial in.
    nodes = {name: dataclasses.replace(node, connected=False) for name, node in state.nodes.items()}
    if state.outcome is not None and state.outcome.outcome != "finished":
        # Somebody started the run again by hand: budgets begin afresh, history stays. A run that was given up because
        # no agent would start may have left workers behind: they are ended before anything else.
        left = {name: nodes[name] for name in state.placement if not nodes[name].ended}
        return dataclasses.replace(
            state, nodes={name: nodes[name] for name in state.placement} if left else {},
            status=Status.STOPPING if left else Status.STARTING, outcome=None, request=None,
            attempts_without_progress=0, launch_failures=0, signatures=(), not_before=0.0, waiting_since=event.t,
            grounds="resume",
        )  # fmt: skip
    if state.status is Status.STARTING:
        return dataclasses.replace(state, nodes=nodes, waiting_since=event.t)
    return dataclasses.replace(state, nodes=nodes)


def _requested(state: RunState, event: events.Requested) -> RunState:
    if event.request == "save":
        return dataclasses.replace(state, save_request=state.save_request + 1)
    if state.request is not None and state.request.request == "stop_now":
        return state  # nothing is more urgent
    if state.request is not None and event.request == "relaunch":
        return state  # a stop is on its way already
    state = dataclasses.replace(state, request=event, save_request=state.save_request + 1)
    if state.status is Status.TRAINING and event.request != "stop_now":
        return dataclasses.replace(state, status=Status.DRAINING)
    if state.status in LIVE and (event.request == "stop_now" or state.status is not Status.DRAINING):
        return dataclasses.replace(state, status=Status.STOPPING)
    return state


def _run_ended(state: RunState, event: events.RunEnded) -> RunState:
    return dataclasses.replace(state, status=Status.ENDED, outcome=event, waiting_since=None)


def _agent_connected(state: RunState, event: events.AgentConnected) -> RunState:
    before = state.nodes.get(event.node or "", Node())
    return dataclasses.replace(
        state,
        nodes=_node(
            state, event.node, connected=True, lost=False, devices=tuple(int(d["index"]) for d in event.devices),
            health_known=False, inventory_known=False, running=event.running, agent=event.pid,
            replaced=before.replaced or (state.status in LIVE and event.pid != before.agent),
        ),
    )  # fmt: skip


def _agent_lost(state: RunState, event: events.AgentLost) -> RunState:
    return dataclasses.replace(
        state,
        nodes=_node(
            state, event.node, connected=False, lost=True, health_known=False, inventory_known=False, running=None
        ),
    )


def _health_reported(state: RunState, event: events.HealthReported) -> RunState:
    return dataclasses.replace(
        state, nodes=_node(state, event.node, unhealthy=frozenset(event.unhealthy), health_known=True)
    )


def _inventory_reported(state: RunState, event: events.InventoryReported) -> RunState:
    if event.problem:
        return state
    newest = state.inventory
    if newest is None or (event.chosen or {}).get("sequence", 0) >= (newest.chosen or {}).get("sequence", 0):
        newest = event
    return dataclasses.replace(
        state,
        nodes=_node(state, event.node, inventory_known=True),
        inventory=newest,
        ever_committed=state.ever_committed or event.commits > 0,
        commit_sequence=max(state.commit_sequence, event.newest_sequence),
    )


def _attempt_launched(state: RunState, event: events.AttemptLaunched) -> RunState:
    assert event.attempt is not None
    nodes = {
        name: dataclasses.replace(node, started=False, finished=False, ended=False, running=None, replaced=False)
        for name, node in ({name: Node() for name in event.placement} | dict(state.nodes)).items()
    }
    return dataclasses.replace(
        state,
        status=Status.LAUNCHING,
        nodes=nodes,
        attempt=event.attempt,
        placement={name: tuple(indices) for name, indices in event.placement.items()},
        world_size=event.world_size,
        first_world=state.first_world or event.world_size,
        resume=event.resume,
        step=(event.resume or {}).get("step", 0),
        failure=None,
        exits=(),
        closed=False,
        request=None if state.request is not None and state.request.request == "relaunch" else state.request,
        inventory=None,
        waiting_since=None,
        attempts_without_progress=state.attempts_without_progress + 1,
        restarts=state.restarts + (1 if state.attempt else 0),
        save_request=0,
        stopped=False,
        initialised=False,
        total_steps=None,
    )


def _workers_started(state: RunState, event: events.WorkersStarted) -> RunState:
    state = dataclasses.replace(
        state, nodes=_node(state, event.node, started=True, running=event.attempt), launch_failures=0
    )
    if state.status is Status.LAUNCHING and all(state.nodes[name].started for name in state.placement):
        return dataclasses.replace(state, status=Status.INITIALISING)
    return state


def _advance(state: RunState, to: Status, *, within: frozenset[Status]) -> RunState:
    return dataclasses.replace(state, status=to) if state.status in within else state


_BEFORE_RESTORING = frozenset({Status.LAUNCHING, Status.INITIALISING})
_BEFORE_FIRST_STEP = _BEFORE_RESTORING | {Status.RESTORING}
_BEFORE_TRAINING = _BEFORE_FIRST_STEP | {Status.FIRST_STEP}


def _workers_initialised(state: RunState, _event: events.WorkersInitialised) -> RunState:
    state = dataclasses.replace(state, initialised=True)
    return _advance(state, Status.RESTORING, within=_BEFORE_RESTORING)


def _state_restored(state: RunState, event: events.StateRestored) -> RunState:
    return _advance(dataclasses.replace(state, step=event.step), Status.FIRST_STEP, within=_BEFORE_FIRST_STEP)


def _first_step(state: RunState, event: events.FirstStep) -> RunState:
    return _advance(dataclasses.replace(state, step=event.step), Status.TRAINING, within=_BEFORE_TRAINING)


def _progress(state: RunState, event: events.Progress) -> RunState:
    return dataclasses.replace(state, step=max(state.step, event.step))


def _save_committed(state: RunState, event: events.SaveCommitted) -> RunState:
    advanced = state.committed is None or event.step > state.committed.step
    return dataclasses.replace(
        state,
        committed=event,
        commit_sequence=max(state.commit_sequence, event.sequence),
        ever_committed=True,
        step=max(state.step, event.step),
        attempts_without_progress=0 if advanced else state.attempts_without_progress,
        signatures=() if advanced else state.signatures,
    )


def _failure_detected(state: RunState, event: events.FailureDetected) -> RunState:
    if state.status not in LIVE:
        return state
    return dataclasses.replace(
        state, status=Status.STOPPING, failure=event, step=max(state.step, event.step), interrupted=None
    )


def _workers_finished(state: RunState, event: events.WorkersFinished) -> RunState:
    return dataclasses.replace(
        state,
        nodes=_node(state, event.node, finished=True),
        closed=state.closed or event.closed,
        stopped=state.stopped or event.stopping,
        stopped_at=event.step if event.stopping else state.stopped_at,
        total_steps=event.total_steps if event.total_steps is not None else state.total_steps,
        step=max(state.step, event.step),
    )


def _attempt_ended(state: RunState, event: events.AttemptEnded) -> RunState:
    return dataclasses.replace(
        state,
        nodes=_node(state, event.node, ended=True, running=None),
        exits=state.exits + tuple(event.exits),
        step=max(state.step, event.step),
    )


def _interrupted(state: RunState, event: events.Interrupted) -> RunState:
    nodes = {n: dataclasses.replace(node, health_known=False, inventory_known=False) for n, node in state.nodes.items()}
    state = dataclasses.replace(
        state,
        status=Status.WAITING,
        nodes=nodes,
        inventory=None,
        interrupted=event,
        waiting_since=event.detected_t,
        grounds="restart",
        placement={},
        world_size=0,
    )
    if event.planned:
        # A stop that was asked for says nothing against the job.
        return dataclasses.replace(state, attempts_without_progress=0)
    if event.severity == "launch":
        count = state.launch_failures + 1
        return dataclasses.replace(
            state,
            launch_failures=count,
            attempts_without_progress=max(0, state.attempts_without_progress - 1),
            not_before=state.t + _backoff(count),
        )
    return dataclasses.replace(
        state,
        failures=state.failures + 1,
        signatures=(*state.signatures, (event.step, event.message.strip().rpartition("\n")[2]))[-8:],
        # The first restart is immediate: most failures are passing ones, and R is what the user pays.
        not_before=state.t + _backoff(state.attempts_without_progress - 1),
    )


def _backoff(repeats: int) -> float:
    return 0.0 if repeats < 1 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (repeats - 1))


_HANDLERS: dict[type[events.Event], Any] = {
    events.DaemonStarted: _daemon_started,
    events.Requested: _requested,
    events.RunEnded: _run_ended,
    events.AgentConnected: _agent_connected,
    events.AgentLost: _agent_lost,
    events.HealthReported: _health_reported,
    events.InventoryReported: _inventory_reported,
    events.AttemptLaunched: _attempt_launched,
    events.WorkersStarted: _workers_started,
    events.WorkersInitialised: _workers_initialised,
    events.StateRestored: _state_restored,
    events.FirstStep: _first_step,
    events.Progress: _progress,
    events.SaveCommitted: _save_committed,
    events.FailureDetected: _failure_detected,
    events.WorkersFinished: _workers_finished,
    events.AttemptEnded: _attempt_ended,
    events.Interrupted: _interrupted,
}


# --- decisions ------------------------------------------------------------------------------------------------------


def decide(state: RunState, t: float) -> list[Command]:
    """What the state calls for at time `t` of the run's clock. Empty: wait for an event or for `next_deadline`.

    A `Record` stands alone: it changes the state, so the caller applies it and decides again.
    """
    if state.status in (Status.STARTING, Status.WAITING):
        return _decide_waiting(state, t)
    if state.status is Status.STOPPING:
        return _decide_stopping(state, t)
    if state.status in LIVE:
        return _decide_live(state, t)
    return []


def next_deadline(state: RunState) -> float | None:
    """When `decide` may answer differently though nothing happens: a time on the run's clock, None for never."""
    deadlines: list[float] = []
    if state.status in (Status.STARTING, Status.WAITING):
        if state.not_before > state.t:
            deadlines.append(state.not_before)
        if state.waiting_since is not None:
            deadlines.append(state.waiting_since + state.policy.wait_for_devices_s)
    if state.status is Status.DRAINING and state.request is not None:
        deadlines.append(state.request.t + state.request.timeout_s)
    return min(deadlines, default=None)


def _decide_waiting(state: RunState, t: float) -> list[Command]:
    request = state.request
    if request is not None and request.request != "relaunch":
        return [_end(t, "stopped", request.exit_status or 75, _where_to_go_on(state))]
    given_up = _budget_spent(state)
    if given_up is not None:
        return [_end(t, "failed", 1, given_up)]
    timed_out = state.waiting_since is not None and t - state.waiting_since >= state.policy.wait_for_devices_s
    connected = {name: node for name, node in state.nodes.items() if node.connected}
    questions: list[Command] = [Ask(node=n, what="health") for n, node in connected.items() if not node.health_known]
    questions += [Ask(node=n, what="inventory") for n, node in connected.items() if not node.inventory_known]
    if not connected or questions:
        if timed_out:
            return [_end(t, "unavailable", 69, "no node agent answered within cluster.wait_for_devices")]
        return questions
    available = {name: node.healthy for name, node in connected.items()}
    chosen = placement.choose(available, state.policy)
    if chosen is None:
        why = placement.explain(available, state.policy)
        if timed_out:
            return [_end(t, "unavailable", 69, f"{why}, after waiting {state.policy.wait_for_devices_s:.0f} s")]
        return []
    assert state.inventory is not None
    resume = state.inventory.chosen
    if resume is None and state.ever_committed:
        return [_end(t, "failed", 1, _unreadable(state))]
    if t < state.not_before:
        return []
    return [
        Record(
            event=events.AttemptLaunched(
                t=t,
                attempt=state.attempt + 1,
                world_size=chosen.world_size,
                placement={name: list(indices) for name, indices in chosen.devices.items()},
                resume=resume,
                grounds=state.grounds,
                devices_wanted=placement.wanted(state.devices_known, state.policy),
            )
        )
    ]


def _decide_live(state: RunState, t: float) -> list[Command]:
    if state.placement and all(state.nodes[name].ended for name in state.placement):
        return _decide_all_ended(state, t)
    for name in state.placement:
        node = state.nodes[name]
        if node.ended:
            continue
        if node.lost:
            return [_failed(state, t, name, f"the agent of node {name} died")]
        if node.connected and node.replaced and node.running != state.attempt:
            return [_failed(state, t, name, f"the agent of node {name} was replaced while its workers ran")]
    commands: list[Command] = [
        Launch(node=name, attempt=state.attempt)
        for name in state.placement
        if state.nodes[name].connected and not state.nodes[name].started and state.nodes[name].running != state.attempt
    ]
    if state.status is Status.DRAINING:
        return commands + _decide_draining(state, t)
    if state.save_request:
        commands.append(
            Steer(attempt=state.attempt, save_request=state.save_request, stop_after_save=False, reason="save")
        )
    if state.status is Status.TRAINING:
        bad = [
            f"device {i} of node {n}"
            for n, used in state.placement.items()
            for i in used
            if i in state.nodes[n].unhealthy
        ]
        if bad:
            reason = f"{', '.join(bad)} reported unhealthy"
            return [Record(event=events.Requested(t=t, request="relaunch", source="health", reason=reason))]
    return commands


def _decide_draining(state: RunState, t: float) -> list[Command]:
    """A save was asked for, to stop after: wait for its commit, but not for ever."""
    request = state.request
    assert request is not None
    if t - request.t < request.timeout_s:
        reason = request.reason or request.source
        return [Steer(attempt=state.attempt, save_request=state.save_request, stop_after_save=True, reason=reason)]
    late = f"the save was not committed within {request.timeout_s:.0f} s"
    if request.request == "relaunch":
        return [_failed(state, t, None, late)]
    return [Record(event=dataclasses.replace(request, t=t, request="stop_now", reason=late))]


def _failed(state: RunState, t: float, node: str | None, detail: str) -> Command:
    return Record(
        event=events.FailureDetected(
            t=t, detected_t=t, attempt=state.attempt, node=node, step=state.step, detail=detail
        )
    )


def _decide_stopping(state: RunState, t: float) -> list[Command]:
    waiting = [name for name in state.placement if not state.nodes[name].ended]
    if waiting:
        return [
            Stop(node=n, attempt=state.attempt, grace=state.failure is None)
            for n in waiting
            if state.nodes[n].connected
        ]
    return _decide_all_ended(state, t)


def _decide_all_ended(state: RunState, t: float) -> list[Command]:
    """Nothing of the attempt is alive on any node: was that the end, a stop, or an interruption?"""
    all_finished = all(state.nodes[name].finished for name in state.placement)
    request = state.request
    if state.failure is None and all_finished and request is None:
        if state.stopped:
            return [_end(t, "stopped", 75, _where_to_go_on(state))]
        early = _ended_early(state)
        if early is not None:
            return [_end(t, "ended early", 1, early)]
        return [_end(t, "finished", 0, f"training finished at step {state.step}")]
    if state.failure is None and request is not None and request.request != "relaunch":
        return [_end(t, "stopped", request.exit_status or 75, _where_to_go_on(state))]
    return [Record(event=_interruption(state, t))]


def _ended_early(state: RunState) -> str | None:
    """Why workers that all ended with status 0 have not come to their end; None: as far as is known they have.

    Progress decides where the script does not say what its target is: an attempt without one new step, at a step that
    training is known to go on from, is an end that nobody meant, such as a loader that has nothing more to give.
    """
    if not state.initialised:
        return None  # a script without a shim says nothing of its steps
    step, begun_at, target = state.step, (state.resume or {}).get("step", 0), state.total_steps
    if not state.closed:
        return f"every worker ended with status 0 at step {step} without shim.close(): what came after the last commit is lost"
    if step > begun_at or (target is not None and step >= target):
        return None
    text = f"every worker ended with status 0 at step {step} without one new step"
    if target is not None:
        return f"{text}, and the target is {target}"
    if state.resume is None:
        return f"{text}: is there anything to train on?"
    if state.highest > step:
        return f"{text}, where an earlier attempt went on to step {state.highest}"
    if state.stopped_at == step:
        return f"{text}, where it had been stopped on request; if this is its end, tell TrainerShim total_steps={step}"
    return None


def _interruption(state: RunState, t: float) -> events.Interrupted:
    failure = state.failure
    committed_step = state.committed.step if state.committed is not None else 0
    lost_steps = max(0, state.step - max(committed_step, (state.resume or {}).get("step", 0)))
    if failure is None:
        reason = state.request.reason if state.request is not None else ""
        when = state.request.t if state.request is not None else t
        return events.Interrupted(
            t=when, detected_t=t, attempt=state.attempt, cause="relaunch", severity="device", planned=True,
            lost_steps=lost_steps, step=state.step, detail=reason,
        )  # fmt: skip
    if failure.launch:
        return events.Interrupted(
            t=failure.t, detected_t=failure.detected_t, attempt=state.attempt, node=failure.node, cause="launch",
            severity="launch", lost_steps=0, step=state.step, detail=failure.detail, message=failure.detail,
        )  # fmt: skip
    found = diagnosis.diagnose(
        [diagnosis.Exit.from_json(e) for e in state.exits],
        requested_stop=state.request is not None and state.request.request != "relaunch",
        agent_lost=failure.exitcode is None and failure.rank is None and not state.exits,
    )
    return events.Interrupted(
        t=failure.t, detected_t=failure.detected_t, attempt=state.attempt,
        node=found.node or failure.node, rank=found.rank if found.rank is not None else failure.rank,
        cause=found.cause, severity=found.severity, planned=False, lost_steps=lost_steps, step=state.step,
        detail=found.detail or failure.detail, message=found.message,
    )  # fmt: skip


def _end(
    t: float, outcome: Literal["finished", "ended early", "failed", "stopped", "unavailable"], status: int, detail: str
) -> Command:
    return Record(event=events.RunEnded(t=t, outcome=outcome, exit_status=status, detail=detail))


def _where_to_go_on(state: RunState) -> str:
    if state.committed is None and not state.ever_committed:
        return "stopped; nothing was committed yet, `ckptd run` will begin at step 0"
    step = state.committed.step if state.committed is not None else (state.resume or {}).get("step", 0)
    lost = state.step - step
    unsaved = f"; the last save failed and {lost} steps after it are lost" if lost > 0 else ""
    return f"stopped; the state at step {step} is committed, `ckptd run` goes on from there{unsaved}"


def _budget_spent(state: RunState) -> str | None:
    """Why the run must end now, None while it may go on."""
    last = state.interrupted
    if last is None or last.planned:
        return None
    policy = state.policy
    if state.launch_failures >= MAX_LAUNCH_FAILURES:
        return f"the job could not be launched {state.launch_failures} times in a row: {last.detail}"
    if policy.max_restarts is not None and state.restarts >= policy.max_restarts:
        return f"restart.max_restarts ({policy.max_restarts}) is spent; the last failure: {last.detail}"
    if state.attempts_without_progress >= policy.max_without_progress:
        return (
            f"{state.attempts_without_progress} attempts without a new committed checkpoint "
            f"(restart.max_without_progress){_repeats(state)}; the last failure: {last.detail}"
        )
    return None


def _repeats(state: RunState) -> str:
    if len(state.signatures) < 2:
        return ""
    last = state.signatures[-1]
    same = sum(1 for signature in state.signatures if signature == last)
    return f", the same failure {same} times at step {last[0]}" if same >= 2 else ""


def _unreadable(state: RunState) -> str:
    assert state.inventory is not None
    if state.inventory.rejected:
        problems = "; ".join(f"{r.get('path')}: {r.get('problem')}" for r in state.inventory.rejected[:5])
        found = f"none of the committed checkpoints is whole ({problems})"
    else:
        found = "this run has committed checkpoints, and none is where its tiers say"
    return (
        f"{found}. ckptd does not begin again from step 0 on its own: repair or put back a checkpoint, "
        "or start a new run under another name"
    )
