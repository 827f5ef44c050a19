"""What do Slurm's commands say? Their text, read without asking anybody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

NODE_FORMAT: Final = "%N|%T|%E"
"""For `sinfo -o`: a line for each node and partition. The reason comes last, it may hold anything."""
LEFT_FORMAT: Final = "%L"
"""For `squeue -o`: how long the job may still run. A duration, so that no clock and no time zone comes in."""

_LEFT: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_MARKS: Final = "*~#!%$@^-+"
"""What sinfo puts behind a state: not responding, powering down, in maintenance and so on."""
_LEAVING: Final = frozenset({"drained", "draining", "drain", "drng", "fail", "failing", "failg"})
_DOWN: Final = frozenset({"down"})
_ADDRESS: Final = re.compile(r"^NodeName=(\S+).*?\bNodeAddr=(\S+)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """What Slurm thinks of a node."""

    state: str
    """In Slurm's words, without marks: `mixed`, `draining`, `down`."""
    reason: str = ""

    @property
    def leaving(self) -> bool:
        """It shall get nothing new: an administrator drains it, or it is about to fail. What runs there may go on."""
        return self.state in _LEAVING

    @property
    def down(self) -> bool:
        """Slurm starts nothing there."""
        return self.state in _DOWN

    def __str__(self) -> str:
        return f"{self.state} in Slurm" + (f" ({self.reason})" if self.reason else "")


def node_states(text: str) -> dict[str, NodeState]:
    """State by node, from `sinfo -h -N -o NODE_FORMAT`. Lines that are none are passed over."""
    found: dict[str, NodeState] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, separator, reason = rest.partition("|")
        if name and state and separator:
            reason = reason.strip()
            found[name] = NodeState(state=state.rstrip(_MARKS).lower(), reason="" if reason == "none" else reason)
    return found


def time_left(text: str) -> float | None:
    """Seconds, from `squeue -h -o LEFT_FORMAT` of one job; None: without a limit, or it does not say."""
    match = _LEFT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def node_addresses(text: str) -> dict[str, str]:
    """By node, the address at which Slurm reaches it, from `scontrol show node`."""
    blocks = re.split(r"\n(?=NodeName=)", text.strip())
    return {match[1]: match[2] for block in blocks if (match := _ADDRESS.search(block)) is not None}
