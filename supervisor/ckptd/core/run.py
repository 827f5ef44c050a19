"""The state machine of a run: `apply` folds one event into the state. What the state calls for is in `decisions`.

starting ──> waiting ──> launching ──> initialising ──> restoring ──> first_step ──> training ──┐
    ^           ^                                                                       │        │ all ranks
    │           │ nothing is left alive                                        request  │        │ ended with 0
    │           └──────────────────────────── stopping <── a worker died ── draining <──┘        v
    │                                             │                             │              ended
    └── `ckptd run` again                         └── budget spent ──> ended <──┘ saved, all ended
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptd.core import devices, events, holdings, keeping, placement
from ckptd.core.devices import DeviceBook
from ckptd.core.policy import Policy
from ckptd.core.records import replace
from ckptd.core.state import LIVE, Loss, Node, RunState, Signature, Status

SUSPECT_AFTER = 2
"""The same failure at the same step so often after one checkpoint, and an older one is tried."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


def _node(state: RunState, name: str | None, **changes: Any) -> dict[str, Node]:
    nodes = dict(state.nodes)
    if name is not None:
        nodes[name] = replace(nodes.get(name, Node()), **changes)
    return nodes


def apply(state: RunState, event: events.Event) -> RunState:
    """The state after `event`. Events of an attempt that is no longer the live one change nothing."""
    state = replace(state, t=max(state.t, event.t))
    handler = _HANDLERS.get(type(event))
    if handler is None:
        return state
    if event.attempt is not None and event.attempt != state.attempt and not isinstance(event, _OF_ANY_ATTEMPT):
        return _cleaned(state, event) if isinstance(event, events.AttemptEnded) else state
    changed: RunState = handler(state, event)
    return replace(changed, highest=changed.step) if changed.step > changed.highest else changed


_OF_ANY_ATTEMPT = (events.AttemptLaunched, events.CheckpointPinned)


def _cleaned(state: RunState, event: events.AttemptEnded) -> RunState:
    """A node that was lost with an attempt has ended what was left of it."""
    node = state.nodes.get(event.node or "")
    if node is None or node.unclean != event.attempt:
        return state
    return replace(
        state,
        nodes=_node(state, event.node, unclean=None, running=None),
        book=devices.haunted(state.book, event),
        devices_changed_t=event.t,
    )


def _daemon_started(state: RunState, event: events.DaemonStarted) -> RunState:
    state = dataclasses.replace(state, policy=Policy.from_dict(event.policy))
    if state.status in (Status.STARTING, Status.ENDED):
        state = dataclasses.replace(state, sharing={})  # another job.yaml may have come, or another mount
    # What agents told an earlier daemon is old, the checkpoints on disk too: they say it again when they dial in.
    nodes = {name: dataclasses.replace(node, connected=False) for name, node in state.nodes.items()}
    moved = bool(event.allocation) and state.allocation not in ("", event.allocation)
    state = dataclasses.replace(state, inventory=None, inventory_problems=0, allocation=event.allocation)
    if moved and state.request is not None:
        # The scheduler ended the allocation before this one, in which somebody had asked for a stop: it has stopped.
        status = Status.TRAINING if state.status is Status.DRAINING else state.status
        state = dataclasses.replace(state, request=None, status=status)
    if state.outcome is not None and state.outcome.outcome != "finished":
        # Somebody started the run again by hand: budgets begin afresh, history stays. What was held against a checkpoint
        # may have been the script's fault, which is put right now: the newest is tried first again. A run that was given
        # up because no agent would start may have left workers behind: they are ended before anything else.
        left = any(not nodes[name].ended for name in state.placement)
        kept = {n: node for n, node in nodes.items() if node.unclean is not None or (left and n in state.placement)}
        return dataclasses.replace(
            state, nodes=kept, placement=state.placement if left else {},
            status=Status.STOPPING if left else Status.STARTING, outcome=None, request=None, losses=(),
            interrupted=None, attempts_without_progress=0, launch_failures=0, signatures=(), suspects=(),
            not_before=0.0, waiting_since=event.t, grounds="resume",
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
    # What an agent carries that is not the live attempt is a remnant of the time when it was out of reach.
    stray = event.running not in (None, state.attempt)
    if before.agent and event.pid != before.agent:
        # Whoever starts agents may not have said yet that the one before is dead: this one's being there says so.
        detail = f"the agent of node {event.node} died"
        state = _note_loss(
            state, Loss(node=event.node or "", kind="agent", t=event.t, detected_t=event.t, detail=detail)
        )
    if state.own_tiers and state.status in (Status.STARTING, Status.WAITING) and event.pid != before.agent:
        # What is on its own tiers may be newer than what was chosen without it.
        nodes = {name: replace(node, inventory_known=False) for name, node in state.nodes.items()}
        state = replace(state, nodes=nodes, inventory=None)
    return replace(
        state,
        book=devices.connected(state.book, event),
        devices_changed_t=event.t if before.gone_t is not None else state.devices_changed_t,
        nodes=_node(
            state, event.node, connected=True, lost=False, gone_t=None,
            devices=tuple(int(d["index"]) for d in event.devices), health_known=False, inventory_known=False,
            running=event.running, agent=event.pid, address=event.address,
            holdings=before.holdings if event.pid == before.agent else None,
            port=before.port if event.pid == before.agent else 0,
            unclean=event.running if stray else before.unclean,
            replaced=before.replaced or (state.status in LIVE and event.pid != before.agent),
        ),
    )  # fmt: skip


def _agent_lost(state: RunState, event: events.AgentLost) -> RunState:
    detail = f"the agent of node {event.node} died"
    state = _note_loss(state, Loss(node=event.node or "", kind="agent", t=event.t, detected_t=event.t, detail=detail))
    return dataclasses.replace(
        state,
        nodes=_node(
            state,
            event.node,
            connected=False,
            lost=True,
            health_known=False,
            inventory_known=False,
            running=None,
            holdings=None,
        ),
    )


def _node_lost(state: RunState, event: events.NodeLost) -> RunState:
    node = state.nodes.get(event.node or "", Node())
    carries = event.node in state.placement and not node.ended and state.status is not Status.WAITING
    begun = max(0.0, event.t - event.silent_s)
    detail = f"node {event.node} is lost: {event.why}"
    state = _note_loss(state, Loss(node=event.node or "", kind="node", t=begun, detected_t=event.t, detail=detail))
    return dataclasses.replace(
        state,
        nodes=_node(
            state, event.node, connected=False, lost=True, gone_t=event.t, health_known=False, inventory_known=False,
            running=None, unclean=state.attempt if carries else node.unclean, holdings=None,
        ),
    )  # fmt: skip


def _note_loss(state: RunState, loss: Loss) -> RunState:
    known = any(found.node == loss.node for found in state.losses)
    if known or loss.node not in state.placement or state.nodes[loss.node].ended:
        return state
    return dataclasses.replace(state, losses=(*state.losses, loss))


def _health_reported(state: RunState, event: events.HealthReported) -> RunState:
    before = state.nodes.get(event.node or "", Node()).unhealthy
    unhealthy = frozenset(event.unhealthy)
    in_use = set(state.placement.get(event.node or "", ())) & (unhealthy - before) if state.status in LIVE else ()
    return replace(
        state,
        book=devices.failed_in_use(state.book, event, in_use),
        nodes=_node(state, event.node, unhealthy=unhealthy, health_known=True),
        devices_changed_t=event.t if unhealthy != before else state.devices_changed_t,
    )


def _device_drained(state: RunState, event: events.DeviceDrained) -> RunState:
    return dataclasses.replace(state, book=devices.drained(state.book, event), devices_changed_t=event.t)


def _inventory_reported(state: RunState, event: events.InventoryReported) -> RunState:
    if event.problem:
        return dataclasses.replace(state, inventory_problems=state.inventory_problems + 1)
    if state.keeping.suspect((event.chosen or {}).get("sequence", 0)):
        return state  # the question was put before the run went back: it is put again
    event, state = _with_held(state, event)
    newest = state.inventory
    if newest is None or (event.chosen or {}).get("sequence", 0) >= (newest.chosen or {}).get("sequence", 0):
        newest = event
    found = event.chosen or {}
    if found.get("sequence", 0) > (state.committed.sequence if state.committed is not None else 0):
        # Rank 0 died, or its agent, between the commit and the word of it: progress all the same.
        state = _committed(state, _as_commit(event))
    return dataclasses.replace(
        state,
        nodes=_node(state, event.node, inventory_known=True),
        inventory=newest,
        ever_committed=state.ever_committed or event.commits > 0,
        commit_sequence=max(state.commit_sequence, event.newest_sequence),
    )


def _with_held(state: RunState, event: events.InventoryReported) -> tuple[events.InventoryReported, RunState]:
    """The answer about tiers that all nodes see, and what the nodes have in directories of their own."""
    own = state.own_tiers
    chosen = event.chosen
    if not own:
        return event, state
    if chosen is not None and chosen["tier"] in own and chosen.get("fetched_from"):
        # Brought from an object store to that node: from now on it has all of it.
        whole = {**chosen, "name": keeping.name_of(chosen["path"]), "held": [[0, chosen["files"] - 1]], "created": 0.0}
        node = state.nodes.get(event.node or "", Node())
        state = dataclasses.replace(state, nodes=_node(state, event.node, holdings=(*(node.holdings or ()), whole)))
    best = state.best_held()
    count, newest = holdings.seen(state.held, run_id=state.policy.run_id)
    order = {str(tier["name"]): i for i, tier in enumerate(state.policy.tiers)}
    avoid = {keeping.name_of(path) for path in state.suspects}

    def rank(found: dict[str, Any]) -> tuple[bool, int, int]:
        return keeping.name_of(found["path"]) in avoid, -found["sequence"], order.get(found["tier"], len(order))

    if best is not None and (chosen is None or rank(best.commit) < rank(chosen)):
        chosen = best.commit
    changed = dataclasses.replace(
        event, chosen=chosen, commits=event.commits + count, newest_sequence=max(event.newest_sequence, newest)
    )
    return changed, state


def _sharing_reported(state: RunState, event: events.SharingReported) -> RunState:
    return dataclasses.replace(state, nodes=_node(state, event.node, seen=event.seen, seen_of=frozenset(event.nodes)))


def _sharing_found(state: RunState, event: events.SharingFound) -> RunState:
    nodes = {n: dataclasses.replace(node, inventory_known=False, seen=None) for n, node in state.nodes.items()}
    return dataclasses.replace(state, sharing={**state.sharing, **event.shared}, nodes=nodes, inventory=None)


def _holdings_reported(state: RunState, event: events.HoldingsReported) -> RunState:
    return dataclasses.replace(state, nodes=_node(state, event.node, holdings=tuple(event.holdings), port=event.port))


def _files_gathered(state: RunState, event: events.FilesGathered) -> RunState:
    return dataclasses.replace(state, nodes=_node(state, event.node, gathered=True))


def _attempt_launched(state: RunState, event: events.AttemptLaunched) -> RunState:
    assert event.attempt is not None
    nodes = {
        name: replace(node, started=False, finished=False, ended=False, running=None, replaced=False, gathered=False)
        for name, node in ({name: Node() for name in event.placement} | dict(state.nodes)).items()
    }
    return replace(
        state,
        status=Status.LAUNCHING,
        nodes=nodes,
        attempt=event.attempt,
        placement={name: tuple(indices) for name, indices in event.placement.items()},
        world_size=event.world_size,
        first_world=state.first_world or event.world_size,
        resume=event.resume,
        step=(event.resume or {}).get("step", 0),
        store=None,
        failure=None,
        exits=(),
        losses=(),
        closed=False,
        inventory_problems=0,
        request=None if state.request is not None and state.request.request == "relaunch" else state.request,
        inventory=None,
        waiting_since=None,
        attempts_without_progress=state.attempts_without_progress + 1,
        restarts=state.restarts + (1 if state.attempt else 0),
        save_request=0,
        rejection=None,
        rejections=0,
        keeping=keeping.launched(state.keeping, state.commit_sequence),
        stopped=False,
        initialised=False,
        total_steps=None,
    )


def _store_opened(state: RunState, event: events.StoreOpened) -> RunState:
    return dataclasses.replace(state, store=(event.host, event.port))


def _workers_started(state: RunState, event: events.WorkersStarted) -> RunState:
    state = replace(state, nodes=_node(state, event.node, started=True, running=event.attempt))
    if state.status is Status.LAUNCHING and all(state.nodes[name].started for name in state.placement):
        return replace(state, status=Status.INITIALISING)
    return state


def _advance(state: RunState, to: Status, *, within: frozenset[Status]) -> RunState:
    return dataclasses.replace(state, status=to) if state.status in within else state


_BEFORE_RESTORING = frozenset({Status.LAUNCHING, Status.INITIALISING})
_BEFORE_FIRST_STEP = _BEFORE_RESTORING | {Status.RESTORING}
_BEFORE_TRAINING = _BEFORE_FIRST_STEP | {Status.FIRST_STEP}


def _workers_initialised(state: RunState, _event: events.WorkersInitialised) -> RunState:
    # Only now have the workers met: before, each of them may fail to find the others, or its port, time after time.
    state = dataclasses.replace(state, initialised=True, launch_failures=0)
    return _advance(state, Status.RESTORING, within=_BEFORE_RESTORING)


def _state_restored(state: RunState, event: events.StateRestored) -> RunState:
    return _advance(dataclasses.replace(state, step=event.step), Status.FIRST_STEP, within=_BEFORE_FIRST_STEP)


def _first_step(state: RunState, event: events.FirstStep) -> RunState:
    return _advance(dataclasses.replace(state, step=event.step), Status.TRAINING, within=_BEFORE_TRAINING)


def _progress(state: RunState, event: events.Progress) -> RunState:
    return dataclasses.replace(state, step=max(state.step, event.step))


def _as_commit(event: events.InventoryReported) -> events.SaveCommitted:
    found = event.chosen or {}
    return events.SaveCommitted(
        t=event.t, at=event.at, attempt=found.get("attempt"), node=event.node, step=found["step"],
        samples=found.get("samples_seen", 0), tier=found["tier"], path=found["path"], sequence=found["sequence"],
        marker_crc32c=found["marker_crc32c"], world_size=found.get("world_size", 0),
        comparable=found.get("comparable", True),
    )  # fmt: skip


def _save_committed(state: RunState, event: events.SaveCommitted) -> RunState:
    state = _committed(state, event)
    return dataclasses.replace(
        state,
        step=max(state.step, event.step),
        book=devices.proved(state.book, state.placement),
        rejection=None,
        rejections=0,
    )


def _save_rejected(state: RunState, event: events.SaveRejected) -> RunState:
    return dataclasses.replace(
        state, step=max(state.step, event.step), rejection=event, rejections=state.rejections + 1
    )


def _checkpoint_pinned(state: RunState, event: events.CheckpointPinned) -> RunState:
    return dataclasses.replace(state, keeping=keeping.pinned(state.keeping, event))


def _rolled_back(state: RunState, event: events.RolledBack) -> RunState:
    """Go back: progress counts from that commit on, and what runs is ended without a save."""
    committed = events.SaveCommitted(
        t=event.t, at=event.at, step=event.to_step, samples=event.samples, tier=event.tier, path=event.path,
        sequence=event.sequence,
    )  # fmt: skip
    state = dataclasses.replace(
        state, keeping=keeping.rolled_back(state.keeping, event), rollback=event, committed=committed, inventory=None,
        nodes={name: dataclasses.replace(node, inventory_known=False) for name, node in state.nodes.items()},
    )  # fmt: skip
    if event.source != "guard":  # somebody thought about it: every budget begins afresh
        state = dataclasses.replace(state, attempts_without_progress=0, not_before=0.0, signatures=(), suspects=())
    if state.status in LIVE:
        return dataclasses.replace(state, status=Status.STOPPING, interrupted=None)
    if state.status is Status.ENDED and state.outcome is not None and state.outcome.outcome == "finished":
        back = events.RunEnded(
            t=event.t, at=event.at, outcome="stopped", exit_status=75,
            detail=f"rolled back to step {event.to_step}, `ckptd run` goes on from there",
        )  # fmt: skip
        return dataclasses.replace(state, outcome=back)
    return state


def _committed(state: RunState, event: events.SaveCommitted) -> RunState:
    if state.keeping.suspect(event.sequence):
        # Of the branch that is being left: it was under way when the run went back.
        return dataclasses.replace(state, commit_sequence=max(state.commit_sequence, event.sequence))
    advanced = state.committed is None or event.step > state.committed.step
    return dataclasses.replace(
        state,
        committed=event,
        rollback=None,
        commit_sequence=max(state.commit_sequence, event.sequence),
        ever_committed=True,
        attempts_without_progress=0 if advanced else state.attempts_without_progress,
        signatures=() if advanced else state.signatures,
        suspects=() if advanced else state.suspects,
    )


def _failure_detected(state: RunState, event: events.FailureDetected) -> RunState:
    if state.status not in LIVE:
        first = state.failure
        earlier = first is not None and not (first.hang or first.guard or first.launch) and event.t < first.t
        if state.status is Status.STOPPING and first is not None and earlier:
            # Two nodes told of a death at the same time: the root cause is the first by time, not by the network's whim.
            return dataclasses.replace(state, failure=dataclasses.replace(event, detected_t=first.detected_t))
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
    if event.node is not None and event.node not in state.placement:
        return _cleaned(state, event)  # lost with the attempt that was the last one, which is over
    return replace(
        state,
        nodes=_node(state, event.node, ended=True, running=None, unclean=None),
        exits=state.exits + tuple(event.exits),
        book=devices.unkillable(state.book, event, state.placement),
        step=max(state.step, event.step),
    )


def _interrupted(state: RunState, event: events.Interrupted) -> RunState:
    nodes = {
        n: replace(node, health_known=False, inventory_known=False, holdings=None) for n, node in state.nodes.items()
    }
    book = devices.struck(state.book, event, state.placement)
    relieved = book.next_release(event.t) != state.book.next_release(event.t) and _can_do_without(state, book)
    came_from = (state.resume or {}).get("path")
    state = replace(
        state,
        status=Status.WAITING,
        nodes=nodes,
        book=book,
        inventory=None,
        interrupted=event,
        waiting_since=event.detected_t,
        grounds="restart",
        placement={},
        world_size=0,
    )
    if event.planned:
        # A stop that was asked for says nothing against the job.
        return replace(state, attempts_without_progress=0)
    if event.severity == "launch":
        count = state.launch_failures + 1
        return replace(
            state,
            launch_failures=count,
            attempts_without_progress=max(0, state.attempts_without_progress - 1),
            not_before=state.t + _backoff(count),
        )
    text = event.message.strip().rpartition("\n")[2] or event.detail
    signature = Signature(step=event.step, cause=event.cause, text=text, path=came_from)
    return replace(
        state,
        failures=state.failures + 1,
        signatures=(*state.signatures, signature)[-8:],
        suspects=_suspected(state, signature),
        # Without the device that was at fault the job is another one: it is given all its tries.
        attempts_without_progress=0 if relieved else state.attempts_without_progress,
        # The first restart is immediate: most failures are passing ones, and R is what the user pays.
        not_before=state.t + _backoff(state.attempts_without_progress - 1),
    )


def _can_do_without(state: RunState, book: DeviceBook) -> bool:
    """Whether an allowed world remains when the devices that `book` leaves out are not used."""
    left = {name: book.usable(name, state.nodes[name].healthy, state.t) for name in state.placeable()}
    return placement.choose(left, state.policy) is not None


def _suspected(state: RunState, signature: Signature) -> tuple[str, ...]:
    """The suspect checkpoints once `signature` has happened: the same failure, twice, at the same step after one."""
    path = signature.path
    if path is None or path in state.suspects:
        return state.suspects
    before = sum(1 for s in state.signatures if s.path == path and s.same_as(signature))
    return (*state.suspects, path) if before + 1 >= SUSPECT_AFTER else state.suspects


def _backoff(repeats: int) -> float:
    return 0.0 if repeats < 1 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (repeats - 1))


_HANDLERS: dict[type[events.Event], Any] = {
    events.DaemonStarted: _daemon_started,
    events.Requested: _requested,
    events.RunEnded: _run_ended,
    events.AgentConnected: _agent_connected,
    events.AgentLost: _agent_lost,
    events.NodeLost: _node_lost,
    events.HealthReported: _health_reported,
    events.DeviceDrained: _device_drained,
    events.InventoryReported: _inventory_reported,
    events.SharingReported: _sharing_reported,
    events.SharingFound: _sharing_found,
    events.HoldingsReported: _holdings_reported,
    events.FilesGathered: _files_gathered,
    events.AttemptLaunched: _attempt_launched,
    events.StoreOpened: _store_opened,
    events.WorkersStarted: _workers_started,
    events.WorkersInitialised: _workers_initialised,
    events.StateRestored: _state_restored,
    events.FirstStep: _first_step,
    events.Progress: _progress,
    events.SaveCommitted: _save_committed,
    events.SaveRejected: _save_rejected,
    events.CheckpointPinned: _checkpoint_pinned,
    events.RolledBack: _rolled_back,
    events.FailureDetected: _failure_detected,
    events.WorkersFinished: _workers_finished,
    events.AttemptEnded: _attempt_ended,
    events.Interrupted: _interrupted,
}
