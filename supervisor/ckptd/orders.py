"""What the daemon tells an agent: the settings of the job, and the order to launch an attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from ckptd.core import holdings as core_holdings
from ckptd.core.estimates import Estimate
from ckptd.core.keeping import name_of
from ckptd.core.picture import Picture
from ckptd.core.state import RunState
from ckptd.core.tierbook import TierBook
from ckptd.jobscalars import Steps
from ckptd.jobspec import JobSpec, Tier
from ckptd.link import Message
from ckptd.rundir import RunDir
from ckptd_shim.contract import ENV_DRILL, Drill, RestoreDrill

MIN_DRAIN_S = 120.0


FEW_NODES = 200
"""More nodes than these speak less often each, so that the daemon hears about as much in all."""
LIVE_INTERVAL_S = 0.5
LONGEST_LIVE_INTERVAL_S = 5.0
BEATS_TO_FENCE, BEATS_TO_LOSS = 4, 6
"""So many times, at least, an agent speaks within `fence_timeout` and within `heartbeat_timeout`."""


def tiers(spec: JobSpec, node: str | None, own: Collection[str]) -> list[dict[str, Any]]:
    """The tiers as a node uses them; `own`: those that the nodes were found not to share, beside what job.yaml says."""
    return [_tier(spec, tier, node, own) for tier in spec.checkpoint.tiers]


def settings(
    spec: JobSpec, devices: int = 0, *, python: str | None = None, node: str | None = None, own: Collection[str] = ()
) -> Message:
    """What an agent of a node with so many devices needs to know as soon as it dials in.

    `python`: interpreter of the workers there, if it is another one than job.yaml's for all. `own`: see `tiers`.
    """
    script = spec.script_path
    return {
        "tiers": tiers(spec, node, own),
        "mirror_rate": spec.checkpoint.mirror_rate,
        "health_command": spec.health.command,
        "health_interval_s": spec.health.interval,
        "stop_grace_s": spec.restart.stop_grace,
        "orphan_timeout_s": spec.cluster.orphan_timeout,
        "fence_timeout_s": spec.cluster.fence_timeout if remote(spec) else None,
        "live_interval_s": _live_interval(spec),
        "warm": {
            "python": python or spec.python_path,
            "defaults": _defaults(spec, devices),
            "env": dict(spec.env),
            "cwd": str(spec.workdir_path),
            "path": str(script.parent) if script is not None else str(spec.workdir_path),
            "preload": list(spec.restart.preload),
        }
        if spec.restart.warm
        else None,
        "logs": spec.logs.model_dump(),
    }


def remote(spec: JobSpec) -> bool:
    """Whether agents are on other machines than the daemon."""
    return spec.cluster.launcher != "local"


def _live_interval(spec: JobSpec) -> float:
    # Well within the timeouts, whatever they are: a few messages may be late before anybody is fenced or lost.
    slow = LIVE_INTERVAL_S * max(1.0, len(spec.cluster.hosts) / FEW_NODES)
    patience = min(spec.cluster.fence_timeout / BEATS_TO_FENCE, spec.cluster.heartbeat_timeout / BEATS_TO_LOSS)
    return min(slow, LONGEST_LIVE_INTERVAL_S, max(LIVE_INTERVAL_S, patience))


def _tier(spec: JobSpec, tier: Tier, node: str | None, own: Collection[str]) -> dict[str, Any]:
    every = tier.keep_every
    return {
        "name": tier.name,
        "directory": spec.tier_location(tier, node),
        "shared": spec.sharing(tier) is not False and tier.name not in own,
        "keep_last": tier.keep_last,
        "keep_every_steps": every.steps if isinstance(every, Steps) else None,
        "keep_every_seconds": every if isinstance(every, float) else None,
    }


def holdings(
    state: RunState, run_id: str, *, live: bool = True, drilled: Iterable[str] = (), tiers: TierBook = ()
) -> dict[str, Any]:
    """What retention has to know of a run beside the rules: the fields of `ckptd.node.retire.Holdings`.

    `live`: the newest attempt may be writing. `drilled`: paths that a drill reads. `tiers`: what is known of them.
    """
    protected = {name_of(path): "it is being drilled" for path in drilled}
    # Until the copies of a newer one are there, this is what the loss of a node would leave.
    protected |= {name_of(t.mirrored_path): "the newest that two nodes hold" for t in tiers if t.mirrored_path}
    if state.committed is not None and state.committed.path:
        protected[name_of(state.committed.path)] = "the newest commit that the run knows of"
    if state.resume is not None:
        protected[name_of(state.resume["path"])] = f"attempt {state.attempt} resumed from it"
    if state.rollback is not None:
        protected[name_of(state.rollback.path)] = "the run was rolled back to it"
    return {
        "run_id": run_id,
        "live_attempt": state.attempt if live else None,
        "protected": protected,
        "pinned": list(state.keeping.pins),
        "suspects": [list(each) for each in state.keeping.suspects()],
    }


def node_of_rank_zero(state: RunState) -> str | None:
    """The node that carries rank 0 of the live attempt."""
    return next(iter(state.placement), None)


class Launching:
    """The orders to launch the live attempt as a picture shows it: what is the same for all nodes is put together once."""

    def __init__(
        self, spec: JobSpec, run_dir: RunDir, run_id: str, picture: Picture,
        *, drill: Drill | RestoreDrill | None = None,
    ) -> None:  # fmt: skip
        state = picture.run
        self._spec = spec
        self._state = state
        self._python = spec.python_path
        self._seats: dict[str, tuple[int, int]] = {}
        """A node's number within the attempt, and its first rank."""
        first_rank = 0
        for node_rank, (node, devices) in enumerate(state.placement.items()):
            self._seats[node] = (node_rank, first_rank)
            first_rank += len(devices)
        self._common: Message = {
            "type": "launch",
            # Where the workers meet. A node alone opens its store itself, and nobody else needs to reach it.
            "host": state.store[0] if state.store is not None else "127.0.0.1",
            "port": state.store[1] if state.store is not None else None,
            "world_size": state.world_size,
            "nodes": len(state.placement),
            "env": dict(spec.env) | ({ENV_DRILL: "1"} if isinstance(drill, RestoreDrill) else {}),
        }
        self._context = _context(spec, run_dir, run_id, picture, drill)
        fastest, resume = spec.checkpoint.tiers[0], state.resume
        self._alike = not {fastest.name, *([resume["tier"]] if resume is not None else [])} & set(state.own_tiers)
        """Every node sees the same directories."""
        if self._alike:
            self._context |= self._directories(node_of_rank_zero(state) or "")

    def order(self, node: str, *, python: str | None = None) -> Message:
        """The order for `node`, with its own interpreter where it has one."""
        node_rank, first_rank = self._seats[node]
        devices = list(self._state.placement[node])
        return self._common | {
            "node_rank": node_rank,
            "ranks": list(range(first_rank, first_rank + len(devices))),
            "devices": devices,
            "argv": [python or self._python, "-u", "-m", "ckptd_shim.launch", "--", *self._spec.command],
            "defaults": _defaults(self._spec, len(self._state.nodes[node].devices)),
            "context": self._context if self._alike else self._context | self._directories(node),
        }

    def _directories(self, node: str) -> dict[str, Any]:
        """Where the workers of a node save, and what they resume from."""
        state, fastest, resume = self._state, self._spec.checkpoint.tiers[0], None
        if state.resume is not None:
            resume = {key: state.resume[key] for key in ("step", "tier", "path", "marker_crc32c")}
            if resume["tier"] in state.own_tiers:
                resume |= {"path": _own_path(self._spec, node, state.resume), "partial": True}
        return {"save_dir": str(self._spec.tier_dir(fastest, node)), "resume": resume}


def _context(
    spec: JobSpec, run_dir: RunDir, run_id: str, picture: Picture, drill: Drill | RestoreDrill | None
) -> dict[str, Any]:
    """What the shims of all nodes are told alike."""
    state = picture.run
    decision = picture.decision
    return {
        "run_id": run_id,
        "run_name": spec.name,
        "attempt": state.attempt,
        "attempt_dir": str(run_dir.attempt_dir(state.attempt)),
        "control_path": str(run_dir.control_path),
        "tier": spec.checkpoint.tiers[0].name,
        "shared": spec.checkpoint.tiers[0].name not in state.own_tiers,
        "world_at_start": state.first_world,
        "global_batch": spec.batch.global_batch if spec.batch else None,
        "micro_batch": spec.batch.micro_batch if spec.batch else None,
        "interval_s": decision.interval_s if decision else None,
        "interval_steps": decision.interval_steps if decision and decision.interval_s is None else None,
        "commit_sequence": state.commit_sequence,
        "guard": {
            "finite": spec.guard.finite,
            "loss_spike": spec.guard.loss_spike,
            "param_norm": spec.guard.param_norm,
            "param_norm_spike": spec.guard.param_norm_spike,
        },
        "skip_data_to": _skip_to(state),
        "drill": dataclasses.asdict(drill) if isinstance(drill, Drill) else None,
        "restore_drill": dataclasses.asdict(drill) if isinstance(drill, RestoreDrill) else None,
    }


def _own_path(spec: JobSpec, node: str, resume: dict[str, Any]) -> str:
    """Where a checkpoint lies on a node, on a tier of which each has its own directory."""
    tier = next(tier for tier in spec.checkpoint.tiers if tier.name == resume["tier"])
    return f"{spec.tier_location(tier, node)}/{name_of(resume['path'])}"


def ranks_of(state: RunState, node: str) -> list[int]:
    """Ranks of the live attempt that a node carries."""
    nodes = list(state.placement)
    first = sum(len(state.placement[name]) for name in nodes[: nodes.index(node)])
    return list(range(first, first + len(state.placement[node])))


def gather(state: RunState, node: str) -> Message:
    """The order to bring what the workers of `node` will resume from into its own directory, and from whom."""
    resume = state.resume
    assert resume is not None
    having = core_holdings.holders(state.held, resume["tier"], resume["marker_crc32c"])
    return {
        "type": "gather",
        "attempt": state.attempt,
        "tier": resume["tier"],
        "name": name_of(resume["path"]),
        "marker_crc32c": resume["marker_crc32c"],
        "ranks": ranks_of(state, node),
        "world_size": state.world_size,
        # After a restore that failed, the layout may be another one than when it was saved.
        "everything": _failed_to_restore(state),
        "sources": [_source(state, other) | {"held": held} for other, held in having.items() if other != node],
    }


def _failed_to_restore(state: RunState) -> bool:
    resume = state.resume or {}
    return any(s.path == resume.get("path") and s.step <= resume.get("step", 0) for s in state.signatures)


def _source(state: RunState, node: str) -> dict[str, Any]:
    return {"node": node, "host": state.nodes[node].address or "127.0.0.1", "port": state.nodes[node].port}


def mirror(state: RunState, node: str) -> Message:
    """Whose files a node is to hold a second copy of: those of the node before it in the attempt's ring; None: no one's."""
    nodes = list(state.placement)
    alone = len(nodes) < 2 or node not in nodes
    return {
        "type": "mirror",
        "tier": state.own_tiers[0],
        "from": None if alone else _source(state, nodes[nodes.index(node) - 1]),
        "peers": [_source(state, other) for other in nodes if other != node],
    }


def _skip_to(state: RunState) -> int | None:
    """Where the data goes on after a roll-back that passes some over; None: where the checkpoint has it."""
    back, resume = state.rollback, state.resume
    return back.skip_to if back is not None and resume is not None and resume["path"] == back.path else None


def _defaults(spec: JobSpec, devices: int) -> dict[str, str]:
    """Variables that every worker should have, under what job.yaml and the node's own environment say."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        # Sets and dicts of strings iterate alike on every rank and after every restart.
        "PYTHONHASHSEED": "0",
    }
    if not remote(spec):
        # A single machine talks to itself: gloo need not guess an address from the host's name.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    if devices > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does, so that workers do not fight for cores
    return defaults


def drain_timeout(estimate: Estimate) -> float:
    """How long a save before a stop may take, seconds: from what saves have cost so far, and never short."""
    usual = (estimate.stall_s or 0.0) + (estimate.upload_s or 0.0) + 2 * (estimate.step_s or 0.0)
    return max(MIN_DRAIN_S, 5.0 * usual)
