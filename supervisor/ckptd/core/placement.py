"""On how many devices, and on which, can the job run now?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.core.policy import Policy

Available = Mapping[str, Sequence[int]]
"""Indices of the healthy devices of each node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A world and where its ranks go."""

    world_size: int
    devices: dict[str, list[int]]
    """Indices of the devices used on each node, both in ascending order; no node without one."""


def wanted(total_devices: int, policy: Policy) -> int:
    """The largest allowed world on `total_devices` devices, 0 if none is allowed."""
    unit = max(policy.multiple_of, 1)
    most = total_devices if policy.max_devices is None else min(total_devices, policy.max_devices)
    for world in range(most - most % unit, max(policy.min_devices, 1) - 1, -unit):
        if policy.global_batch is None or policy.global_batch % world == 0:
            return world
    return 0


def choose(available: Available, policy: Policy) -> Placement | None:
    """Place the largest allowed world, spread evenly over the nodes in their order; None if none is allowed.

    The order is that of `policy.nodes`, or of the names. `policy.spares` nodes are left idle, those with the fewest
    healthy devices, the last ones among equals.

    Devices are dealt round the nodes in groups of `multiple_of`, so that a model-parallel group stays on one node
    where that is possible without a smaller world.
    """
    healthy = _in_use(available, policy)
    world = wanted(sum(map(len, healthy.values())), policy)
    if world == 0:
        return None
    counts = _deal(healthy, world, max(policy.multiple_of, 1)) or _deal(healthy, world, 1)
    assert counts is not None
    return Placement(world_size=world, devices={node: healthy[node][:count] for node, count in counts.items() if count})


def _in_use(available: Available, policy: Policy) -> dict[str, list[int]]:
    """The nodes to place a world on, in the order in which they take ranks, without the spares."""
    order = {node: place for place, node in enumerate(policy.nodes)}
    names = sorted(available, key=lambda node: (order.get(node, len(order)), node))
    healthy = {node: sorted(set(available[node])) for node in names}
    if policy.spares:
        most = max(1, len(policy.nodes) - policy.spares)
        taken = sorted(healthy, key=lambda node: -len(healthy[node]))[:most]
        healthy = {node: devices for node, devices in healthy.items() if node in taken}
    return healthy


def wanted_of(devices: Available, policy: Policy) -> int:
    """The largest allowed world if all `devices` were healthy."""
    return wanted(sum(map(len, _in_use(devices, policy).values())), policy)


def explain(available: Available, policy: Policy) -> str:
    """Why there is no placement, or why it leaves healthy devices idle, in words for a person."""
    total = sum(map(len, _in_use(available, policy).values()))
    have = f"{total} healthy device{'' if total == 1 else 's'}"
    world = wanted(total, policy)
    if world == total and world > 0:
        return f"all {have} are used"
    rules = _rules(policy)
    if world > 0:
        return f"{world} of {have} are used: a world must be {rules}"
    if total < policy.min_devices:
        return f"{have}, and cluster.min_devices is {policy.min_devices}"
    return f"{have}, and no world of them is allowed: it must be {rules}"


def _deal(healthy: dict[str, list[int]], world: int, unit: int) -> dict[str, int] | None:
    """How many devices each node gives when they are dealt in whole units, round by round; None if they do not fit."""
    counts = dict.fromkeys(healthy, 0)
    left = world
    while left >= unit:
        before = left
        for node, devices in healthy.items():
            if left >= unit and len(devices) - counts[node] >= unit:
                counts[node] += unit
                left -= unit
        if left == before:
            return None
    return counts if left == 0 else None


def _rules(policy: Policy) -> str:
    rules = [f"at least {policy.min_devices}"]
    if policy.max_devices is not None:
        rules.append(f"at most {policy.max_devices}")
    if policy.multiple_of > 1:
        rules.append(f"a multiple of {policy.multiple_of}")
    if policy.global_batch is not None:
        rules.append(f"a divisor of the global batch of {policy.global_batch}")
    return ", ".join(rules)
