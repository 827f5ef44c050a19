"""What does the state of a run call for? `decide` never acts.

What it returns is either an event to record, or a message whose need can be read off the state again after a crash: an
event is in the ledger before anything is done about it, so a daemon that starts on a ledger replays it, decides, and
goes on where the one before it stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from ckptd.core import diagnosis, events, holdings, placement
from ckptd.core.commands import Ask, Command, Gather, Launch, OpenStore, Record, Steer, Stop
from ckptd.core.keeping import name_of
from ckptd.core.state import LIVE, RunState, Status

MAX_LAUNCH_FAILURES = 5
"""Launches in a row that may fail before the workers have met: they are no crash of the job, but they end too."""
INVENTORY_TRIES = 5
"""How often a tier that cannot be read, and may have the newest checkpoint, is asked again before the others must do."""
INCURABLE = frozenset({"setup_error", "script_differs", "script_not_found"})
"""Causes that every further attempt would meet again."""
PEER_CAUSES = frozenset({"connection_lost", "collective_timeout"})
"""What ranks say of a peer that is gone: where a node was lost, that is what they mean."""
NODE_PATIENCE_S = 120.0
"""How long a launch waits for nodes of which nothing is known yet, or that still end what they were lost with."""
LONGEST_FAREWELL_S = 900.0
"""What agents that are alone take, after `cluster.orphan_timeout`, to save and to end what they carry."""


def decide(state: RunState, t: float) -> list[Command]:
    """What the state calls for at time `t` of the run's clock. Empty: wait for an event or for `next_deadline`.

    A `Record` stands alone: it changes the state, so the caller applies it and decides again.
    """
    if state.status in (Status.STARTING, Status.WAITING):
        commands = _decide_waiting(state, t)
    elif state.status is Status.STOPPING:
        commands = _decide_stopping(state, t)
    elif state.status in LIVE:
        commands = _decide_live(state, t)
    else:
        return []
    if any(isinstance(c, Record) and isinstance(c.event, events.RunEnded) for c in commands):
        # A run is over when nothing of it is alive on any node that can be reached.
        return _clean_up(state) or commands
    return commands


def next_deadline(state: RunState) -> float | None:
    """When `decide` may answer differently though nothing happens: a time on the run's clock, None for never."""
    deadlines: list[float] = []
    if state.status in (Status.STARTING, Status.WAITING):
        if state.not_before > state.t:
            deadlines.append(state.not_before)
        if state.waiting_since is not None:
            deadlines.append(state.waiting_since + state.policy.wait_for_devices_s)
        if (release := state.book.next_release(state.t)) is not None:
            deadlines.append(release)
    if state.status is Status.STOPPING and (until := _beyond_doubt(state)) is not None:
        deadlines.append(until)
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
    given_up = _no_progress(state)
    # Where somebody can be asked what is on the tiers, that comes first: a commit that nobody told of is progress too.
    witnesses = _witnesses(state, state.placeable())
    if given_up is not None and all(state.nodes[name].inventory_known for name in witnesses):
        return [_end(t, "failed", 1, given_up)]
    back = _guard_goes_back(state, t)
    if back is not None:
        return [back]
    timed_out = _timed_out(state, t)
    connected = {name: state.nodes[name] for name in state.placeable()}
    questions = _clean_up(state)
    questions += [Ask(node=n, what="health") for n, node in connected.items() if not node.health_known]
    about_tiers = _ask_sharing(state, t)
    if about_tiers is None:
        about_tiers = _ask_about_tiers(state, t, [n for n in witnesses if not connected[n].inventory_known])
    if isinstance(about_tiers, Record):
        return [about_tiers]
    questions += about_tiers
    if not connected or questions or (not timed_out and _nodes_to_come(state, t)):
        if timed_out and given_up is not None:
            return [_end(t, "failed", 1, given_up)]
        if timed_out:
            return [_end(t, "unavailable", 69, "no node agent answered within cluster.wait_for_devices")]
        return questions
    available = _available(state, t)
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
                devices_wanted=placement.wanted_of(
                    {n: node.devices for n, node in state.nodes.items() if n in (state.policy.nodes or state.nodes)},
                    state.policy,
                ),
            )
        )
    ]


def _timed_out(state: RunState, t: float) -> bool:
    return state.waiting_since is not None and t - state.waiting_since >= state.policy.wait_for_devices_s


def _ask_sharing(state: RunState, t: float) -> list[Command] | Record | None:
    """What is to be found out of who sees what on a tier, before anything else is asked of it; None: nothing (now)."""
    unknown, nodes = state.unknown_tiers, state.placeable()
    if not unknown:
        return None
    if not _timed_out(state, t) and _nodes_to_come(state, t):
        return []
    if len(nodes) < 2:
        return None  # alone it cannot be told, nor does it matter yet
    asked = [name for name in nodes if state.nodes[name].seen is None or not state.nodes[name].seen_of >= set(nodes)]
    if asked:
        return [Ask(node=name, what="sharing", nodes=tuple(nodes), tiers=unknown) for name in asked]
    shared = {
        tier: all(set(nodes) <= set((state.nodes[name].seen or {}).get(tier, ())) for name in nodes) for tier in unknown
    }
    return Record(event=events.SharingFound(t=t, shared=shared))


def _ask_about_tiers(state: RunState, t: float, witnesses: list[str]) -> list[Command] | Record:
    """What is to be found out of the tiers; an answer that the nodes' own holdings give is recorded as one."""
    own = state.own_tiers
    if not own or not witnesses:
        return [_ask_inventory(state, node) for node in witnesses]
    unknown = [node for node in state.placeable() if state.nodes[node].holdings is None]
    if unknown or (not _timed_out(state, t) and _nodes_to_come(state, t)):
        return [Ask(node=node, what="holdings") for node in unknown]
    best = state.best_held()
    _, newest = holdings.seen(state.held, run_id=state.policy.run_id)
    good = best is not None and best.name not in {name_of(path) for path in state.suspects}
    if len(own) == len(state.policy.tiers) or (
        good and best is not None and best.sequence >= max(newest, state.commit_sequence)
    ):
        chosen = best.commit if best is not None else None
        return Record(event=events.InventoryReported(t=t, node=witnesses[0], chosen=chosen))
    floor = best.sequence if good and best is not None else 0
    return [dataclasses.replace(_ask_inventory(state, node), floor=floor) for node in witnesses]


def _ask_inventory(state: RunState, node: str) -> Ask:
    return Ask(
        node=node, what="inventory", avoid=state.suspects, suspects=state.keeping.suspects(),
        settle=state.inventory_problems >= INVENTORY_TRIES,
    )  # fmt: skip


def _witnesses(state: RunState, connected: list[str]) -> list[str]:
    """The nodes that are asked which checkpoint to resume from: where all nodes share a tier, the first one."""
    there = set(connected)
    first = next((name for name in state.policy.nodes if name in there), None)
    return connected if first is None else [first]


def _nodes_to_come(state: RunState, t: float) -> bool:
    """Whether a node may dial in any moment, of which nothing is known yet: a launch without it would soon be repeated."""
    if state.waiting_since is None or t - state.waiting_since >= NODE_PATIENCE_S:
        return False
    known = state.nodes
    return any(name not in known or not (known[name].connected or known[name].lost) for name in state.policy.nodes)


def _clean_up(state: RunState, *, leave: Collection[str] = ()) -> list[Command]:
    """Have nodes that were lost, and are back, end what they were lost with."""
    return [
        Stop(node=name, attempt=node.unclean, grace=False)
        for name, node in state.nodes.items()
        if node.connected and node.unclean is not None and name not in leave
    ]


def _available(state: RunState, t: float) -> dict[str, tuple[int, ...]]:
    """Devices to place a world on. Quarantine yields where nothing else is left to train on; a drain never does."""
    connected = state.placeable()
    strict = {name: state.usable(name, t) for name in connected}
    if placement.choose(strict, state.policy) is not None:
        return strict
    return {name: state.book.not_drained(name, state.nodes[name].healthy) for name in connected}


def _decide_live(state: RunState, t: float) -> list[Command]:
    if state.placement and all(state.nodes[name].ended for name in state.placement):
        return _decide_all_ended(state, t)
    for name in state.placement:
        node = state.nodes[name]
        if node.ended:
            continue
        if node.lost:
            return [_lost(state, t, name)]
        if node.connected and node.replaced and node.running != state.attempt:
            detail = f"the agent of node {name} was replaced while its workers ran"
            return [_failed(state, t, name, detail, lost="agent")]
    commands = [*_clean_up(state), *_launches(state)]
    # Nodes that came back, or are kept as spares: whether they are fit has to be known before they are taken.
    commands += [
        Ask(node=name, what="health")
        for name in state.placeable()
        if name not in state.placement and not state.nodes[name].health_known
    ]
    refused = _refused(state, t)
    if refused is not None:
        return [refused]
    if state.status is Status.DRAINING:
        return commands + _decide_draining(state, t)
    if state.save_request:
        commands.append(
            Steer(attempt=state.attempt, save_request=state.save_request, stop_after_save=False, reason="save")
        )
    if state.status is Status.TRAINING and state.request is None:
        held = state.book.holds(t)  # mostly nothing, and then only what nodes report of themselves is looked at
        bad = [
            f"device {index} of node {name} {why}"
            for name, used in state.placement.items()
            if held or state.nodes[name].unhealthy
            for index in used
            if (why := _unfit(state, name, index, t)) is not None
        ]
        if bad:
            request = events.Requested(t=t, request="relaunch", source="health", reason=", ".join(bad))
            return [Record(event=request)]
    return commands


def _launches(state: RunState) -> list[Command]:
    """Nodes that are still to be told to start their workers. Where there are several, their store comes first."""
    waiting = [
        name
        for name in state.placement
        if state.nodes[name].connected and not state.nodes[name].started and state.nodes[name].running != state.attempt
    ]
    if (state.resume or {}).get("tier") in state.own_tiers:
        lacking = [name for name in waiting if not state.nodes[name].gathered]
        if lacking:
            return [Gather(node=name, attempt=state.attempt) for name in lacking]
    if len(state.placement) > 1 and state.store is None:
        first = next(iter(state.placement))
        return [OpenStore(node=first, attempt=state.attempt)] if first in waiting else []
    return [Launch(node=name, attempt=state.attempt) for name in waiting]


def _lost(state: RunState, t: float, name: str) -> Command:
    """The attempt fails because a node of it is lost, or its agent."""
    loss = next((found for found in state.losses if found.node == name), None)
    if loss is None:  # told before the attempt was launched, or by an older ckptd
        return _failed(state, t, name, f"the agent of node {name} died", lost="agent")
    return Record(
        event=events.FailureDetected(
            t=loss.t, detected_t=loss.detected_t, attempt=state.attempt, node=name, step=state.step, lost=loss.kind,
            detail=loss.detail,
        )
    )  # fmt: skip


def _refused(state: RunState, t: float) -> Command | None:
    """Stop an attempt whose states the guard refuses, if that is what was asked for; without a save, it would be refused too."""
    found, policy = state.rejection, state.policy
    if found is None or policy.on_reject == "skip":
        return None
    if policy.on_reject == "rollback" and state.rejections < policy.rollback_after:
        return None
    if state.request is not None and state.request.request != "relaunch":
        return None  # the workers are about to end, with nothing of this state committed
    return Record(
        event=events.FailureDetected(
            t=t, detected_t=t, attempt=state.attempt, node=None, rank=found.rank, step=found.step, guard=True,
            detail=f"the guard refused the state at step {found.step}: {found.why}",
        )
    )  # fmt: skip


def _guard_goes_back(state: RunState, t: float) -> Record | None:
    """After the guard has ended an attempt: whatever that one still committed is as suspect as what was refused."""
    last, committed, refused = state.interrupted, state.committed, state.rejection
    if last is None or last.cause != "guard" or state.policy.on_reject != "rollback" or going_back(state):
        return None
    if committed is None or not committed.path or committed.path in state.suspects:
        return None
    skip_to = refused.position if refused is not None and state.policy.skip_data else None
    return Record(
        event=events.RolledBack(
            t=t, to_step=committed.step, path=committed.path, sequence=committed.sequence, samples=committed.samples,
            tier=committed.tier, source="guard", why=last.detail, skip_to=skip_to,
        )
    )  # fmt: skip


def going_back(state: RunState) -> bool:
    """Whether the run was rolled back and has launched nothing since."""
    return state.keeping.leaving is not None


def _unfit(state: RunState, name: str, index: int, t: float) -> str | None:
    """Why training must leave a device that it runs on; None: it may stay."""
    if index in state.nodes[name].unhealthy:
        return "reported unhealthy"
    why = state.book.why_not(name, index, t)
    if why is not None and index in _available(state, t).get(name, ()):
        return None  # in quarantine, but nothing is left to train on without it: a relaunch would take it again
    return None if why is None else f"is {why}"


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


def _failed(
    state: RunState, t: float, node: str | None, detail: str, *, lost: Literal["", "agent", "node"] = ""
) -> Command:
    return Record(
        event=events.FailureDetected(
            t=t, detected_t=t, attempt=state.attempt, node=node, step=state.step, detail=detail, lost=lost
        )
    )


def _decide_stopping(state: RunState, t: float) -> list[Command]:
    waiting = [name for name in state.placement if not state.nodes[name].ended]
    reachable = [name for name in waiting if state.nodes[name].gone_t is None]
    until = _beyond_doubt(state)
    if reachable or (until is not None and t < until):
        # Sent once in a connection: a node that was lost with this very attempt gets its order here.
        stops: list[Command] = [_stop(state, n) for n in waiting if state.nodes[n].connected]
        return stops + _clean_up(state, leave=waiting)
    return _decide_all_ended(state, t)


def _beyond_doubt(state: RunState) -> float | None:
    """When nodes out of reach can be held to train no more, on the run's clock; None: nothing has to be waited for.

    A lone attempt is ended by its agent before its node counts as lost. One over several nodes may go on, in the belief
    that only the daemon is dead, but not without all of its nodes: one that has ended is enough. Where not one has, they
    are known to have ended only by `cluster.orphan_timeout`.
    """
    gone = [state.nodes[name].gone_t for name in state.placement if not state.nodes[name].ended]
    times = [t for t in gone if t is not None]
    if len(state.placement) < 2 or len(times) < len(state.placement):
        return None
    return max(times) + state.policy.orphan_timeout_s + LONGEST_FAREWELL_S


def _stop(state: RunState, node: str) -> Stop:
    hung = state.failure is not None and state.failure.hang
    # After a crash nobody will save, so nobody is given time.
    grace = state.failure is None and not going_back(state)
    return Stop(node=node, attempt=state.attempt, grace=grace, stacks=hung)


def _decide_all_ended(state: RunState, t: float) -> list[Command]:
    """Nothing of the attempt is alive on any node: was that the end, a stop, or an interruption?"""
    all_finished = all(state.nodes[name].finished for name in state.placement)
    request = state.request
    hung_at_the_end = state.failure is not None and state.failure.hang and state.closed
    if (state.failure is None or hung_at_the_end) and all_finished and request is None and not going_back(state):
        if state.stopped:
            return [_end(t, "stopped", 75, _where_to_go_on(state))]
        early = _ended_early(state)
        if early is not None:
            return [_end(t, "ended early", 1, early)]
        return [_end(t, "finished", 0, _finished(state))]
    if state.failure is None and request is not None and request.request != "relaunch":
        return [_end(t, "stopped", request.exit_status or 75, _where_to_go_on(state))]
    return [Record(event=_interruption(state, t))]


def _finished(state: RunState) -> str:
    if not state.initialised and state.step == 0:
        return "every worker ended with status 0, and the script made no TrainerShim: nothing was seen of it, nor saved"
    return f"training finished at step {state.step}"


def _ended_early(state: RunState) -> str | None:
    """Why workers that all ended with status 0 have not come to their end; None: as far as is known they have.

    Progress decides where the script does not say what its target is: an attempt without one new step, at a step that
    training is known to go on from, is an end that nobody meant, such as a loader that has nothing more to give.
    """
    if not state.initialised:
        return None  # a script without a shim says nothing of its steps
    step, begun_at, target = state.step, (state.resume or {}).get("step", 0), state.total_steps
    if not state.closed:
        return f"every worker ended with status 0 at step {step} without shim.close(), which belongs at the end of the script: what came after the last commit is lost"
    if step > begun_at or (target is not None and step >= target):
        return None
    text = f"every worker ended with status 0 at step {step} without one new step"
    if target is not None:
        return f"{text}, and the target is {target}"
    if state.resume is None:
        return f"{text}: is there anything to train on, and is shim.step() called?"
    if state.highest > step:
        return f"{text}, where an earlier attempt went on to step {state.highest}"
    if state.stopped_at == step:
        return f"{text}, where it had been stopped on request; if this is its end, tell TrainerShim total_steps={step}"
    return None


def _interruption(state: RunState, t: float) -> events.Interrupted:
    failure = state.failure
    committed = state.committed
    # A commit of an attempt before counts only if this one resumed from it: it may have been damaged.
    own_step = committed.step if committed is not None and committed.attempt == state.attempt else 0
    lost_steps = max(0, state.step - max(own_step, (state.resume or {}).get("step", 0)))
    back = state.rollback
    if failure is None and going_back(state) and back is not None:
        return events.Interrupted(
            t=back.t, detected_t=back.t, attempt=state.attempt, cause="rollback", severity="code", planned=True,
            lost_steps=max(0, state.step - back.to_step), step=state.step,
            detail=f"rolled back to step {back.to_step} ({back.source})" + (f": {back.why}" if back.why else ""),
        )  # fmt: skip
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
    if failure.guard:
        return events.Interrupted(
            t=failure.t, detected_t=failure.detected_t, attempt=state.attempt, rank=failure.rank, cause="guard",
            severity="code", lost_steps=lost_steps, step=state.step, detail=failure.detail, message=failure.detail,
        )  # fmt: skip
    if failure.hang:
        rank = diagnosis.standing_rank(state.exits)
        return events.Interrupted(
            t=failure.t, detected_t=failure.detected_t, attempt=state.attempt, node=failure.node,
            rank=failure.rank if rank is None else rank, cause="hang", severity="process", lost_steps=lost_steps,
            step=state.step, detail=failure.detail, message=diagnosis.stacks_of(state.exits, rank),
        )  # fmt: skip
    if failure.lost:
        others = [loss for loss in state.losses if loss.node != failure.node]
        if failure.lost == "node" and len(others) == len(state.losses) > 0:
            # A node that fenced itself lives, and has told so. Another one that is gone is why it stood still.
            return _loss(
                state, others[0].node, others[0].kind, dataclasses.replace(failure, detail=others[0].detail), lost_steps
            )
        return _loss(state, failure.node, failure.lost, failure, lost_steps)
    found = diagnosis.diagnose(
        [diagnosis.Exit.from_json(e) for e in state.exits],
        requested_stop=state.request is not None and state.request.request != "relaunch",
        agent_lost=failure.exitcode is None and failure.rank is None and not state.exits,
        oom_killed=any(found.get("oom_killed") for found in state.exits),
    )
    if found.cause in PEER_CAUSES and state.losses:
        first = state.losses[0]
        return _loss(state, first.node, first.kind, dataclasses.replace(failure, detail=first.detail), lost_steps)
    found = _with_kernel_evidence(found, state.exits)
    return events.Interrupted(
        t=failure.t, detected_t=failure.detected_t, attempt=state.attempt,
        node=found.node or failure.node, rank=found.rank if found.rank is not None else failure.rank,
        cause=found.cause, severity=found.severity, planned=False, lost_steps=lost_steps, step=state.step,
        detail=found.detail or failure.detail, message=found.message,
    )  # fmt: skip


def _loss(
    state: RunState, node: str | None, kind: Literal["agent", "node"], failure: events.FailureDetected, lost_steps: int
) -> events.Interrupted:
    """The interruption by the loss of a node, or of its agent alone."""
    return events.Interrupted(
        t=failure.t, detected_t=failure.detected_t, attempt=state.attempt, node=node, cause=f"{kind}_lost",
        severity="node", lost_steps=lost_steps, step=state.step, detail=failure.detail,
    )  # fmt: skip


def _with_kernel_evidence(found: diagnosis.Diagnosis, exits: tuple[dict[str, Any], ...]) -> diagnosis.Diagnosis:
    """What the GPU's driver reported outweighs what the workers made of it."""
    reported = [(text, found_) for found_ in exits for text in found_.get("xids", [])]
    lost = any(found_.get("gpu_lost") for found_ in exits)
    if not reported and not lost:
        return found
    text, of = reported[0] if reported else ("a GPU has fallen off the bus", {})
    # Where several ranks have the same line, it is not known whose GPU it is about: the one that failed is likeliest.
    alone = len({found_.get("rank") for _, found_ in reported}) == 1
    return dataclasses.replace(
        found, cause="device_error", severity="device", detail=f"{found.detail}; {text}",
        rank=of["rank"] if alone else found.rank, node=(of.get("node") or found.node) if alone else found.node,
    )  # fmt: skip


def _end(
    t: float, outcome: Literal["finished", "ended early", "failed", "stopped", "unavailable"], status: int, detail: str
) -> Command:
    return Record(event=events.RunEnded(t=t, outcome=outcome, exit_status=status, detail=detail))


def _where_to_go_on(state: RunState) -> str:
    if state.committed is None and not state.ever_committed:
        return "nothing was committed yet, `ckptd run` will begin at step 0"
    step = state.committed.step if state.committed is not None else (state.resume or {}).get("step", 0)
    lost = state.step - step
    why = "the last save failed" if state.rejection is None else "the guard refused the last state"
    unsaved = f"; {why} and {lost} steps after it are lost" if lost > 0 else ""
    return f"the state at step {step} is committed, `ckptd run` goes on from there{unsaved}"


def _budget_spent(state: RunState) -> str | None:
    """Why the run must end now, None while it may go on."""
    last = state.interrupted
    if last is None or last.planned:
        return None
    policy = state.policy
    if last.cause == "guard" and policy.on_reject == "stop":
        return f"{last.detail} (guard.on_reject: stop){_newest_good(state)}"
    if last.cause in INCURABLE:
        return f"no restart cures this: {last.detail}"
    if state.launch_failures >= MAX_LAUNCH_FAILURES:
        return f"the job could not be launched {state.launch_failures} times in a row: {last.detail}"
    if policy.max_restarts is not None and state.restarts >= policy.max_restarts:
        return f"restart.max_restarts ({policy.max_restarts}) is spent; the last failure: {last.detail}"
    return _incurable(state)


def _newest_good(state: RunState) -> str:
    return f"; the newest commit is of step {state.committed.step}" if state.committed is not None else ""


def _no_progress(state: RunState) -> str | None:
    """Why the run must end for want of progress, None while it may go on."""
    last = state.interrupted
    if last is None or last.planned or state.attempts_without_progress < state.policy.max_without_progress:
        return None
    return (
        f"{state.attempts_without_progress} attempts without a new committed checkpoint "
        f"(restart.max_without_progress){_repeats(state)}; the last failure: {last.detail}"
    )


def _repeats(state: RunState) -> str:
    if not state.signatures:
        return ""
    last = state.signatures[-1]
    same = sum(1 for signature in state.signatures if signature.same_as(last))
    return f", the same failure {same} times at step {last.step}" if same >= 2 else ""


def _incurable(state: RunState) -> str | None:
    """Whether the script itself fails: one exception at one step, after two different checkpoints."""
    if not state.signatures:
        return None
    last = state.signatures[-1]
    paths = {s.path for s in state.signatures if s.same_as(last)}
    if last.cause != "exception" or len(paths) < 2:
        return None
    return f"the same exception at step {last.step} after {len(paths)} different checkpoints: {last.text}"


def _unreadable(state: RunState) -> str:
    assert state.inventory is not None
    if state.inventory.rejected:
        problems = "; ".join(f"{r.get('path')}: {r.get('problem')}" for r in state.inventory.rejected[:5])
        found = f"none of the committed checkpoints is whole ({problems})"
    else:
        found = "this run has committed checkpoints, and none is where its tiers say"
        if state.committed is not None and state.committed.path:  # a copied job.yaml of the same name has another tier
            found += f"; the newest, of step {state.committed.step}, was {state.committed.path}"
    return (
        f"{found}. ckptd does not begin again from step 0 on its own: repair or put back a checkpoint, "
        "or start a new run under another name"
    )
