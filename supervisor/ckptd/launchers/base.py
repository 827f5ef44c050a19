"""What every launcher can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ckptd import __version__


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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an agent on another machine needs to know before it dials."""

    run_dir: str
    run_id: str
    workdir: str
    python: str
    """Interpreter where a host names none of its own."""
    devices: int | None
    """How many devices a node has where a host says nothing; None: the GPUs that are found."""
    secret: bytes
    port: int
    epoch: int

    def order(
        self, what: Literal["start", "kill"], *, node: str | None, host: str, devices: int | None = None,
        replace: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """What is to be done on a node, as `ckptd.node.arrival` reads it. `host`: the address to dial."""
        return {
            "do": what, "version": __version__, "run_dir": self.run_dir, "run_id": self.run_id, "node": node,
            "workdir": self.workdir, "devices": devices or self.devices, "secret": self.secret.hex(),
            "replace": replace, "dial": {"host": host, "port": self.port, "epoch": self.epoch},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What came of reaching for a node."""

    ok: bool
    before: Literal["none", "alive", "dead", "killed"] = "none"
    """What was there of an agent started earlier: one that is alive goes on, and was told where to dial."""
    why: str = ""
    """Why no agent is there, and what to do."""
    superseded: bool = False
    """The run was taken over: that node obeys another daemon."""


class RemoteLauncher(Protocol):
    """Starts agents on other machines. Nothing here waits: what came of it is asked for later."""

    def nodes(self) -> list[str]:
        """Names of the nodes, in the order in which they take ranks."""
        ...

    def python(self, node: str) -> str | None:
        """The interpreter of that node, where it has one of its own."""
        ...

    def start(self, node: str, *, replace: bool) -> None:
        """Begin to have an agent there, told where to dial; `replace`: not one that lives there already."""
        ...

    def end(self, node: str) -> None:
        """Begin to end the agent there; its workers live on and are found by the next one."""
        ...

    def busy(self, node: str) -> bool:
        """Whether a `start` or an `end` is under way there."""
        ...

    def arrival(self, node: str) -> Arrival | None:
        """What came of the last `start`, once."""
        ...

    def close(self, *, over: bool) -> None:
        """Give up what is under way; may block. `over`: the run is, and no agent is wanted any more."""
        ...
