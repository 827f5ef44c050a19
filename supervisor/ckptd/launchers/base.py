"""What every launcher can do."""

from __future__ import annotations

from typing import Protocol


class Launcher(Protocol):
    """Starts node agents and knows whether they live."""

    def nodes(self) -> list[str]:
        """Names of the nodes, in the order in which they take ranks."""
        ...

    def start(self, node: str) -> None:
        """Start the agent of a node, which will dial back. Raises LaunchError."""
        ...

    def alive(self, node: str) -> bool:
        """Whether the agent that was last started there, by this daemon or one before it, still lives."""
        ...

    def kill(self, node: str) -> None:
        """End that agent; its workers live on and are found by the next one."""
        ...

    def why_dead(self, node: str) -> str:
        """What the dead agent left to say, for people."""
        ...
