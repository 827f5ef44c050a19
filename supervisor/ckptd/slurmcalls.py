"""How is Slurm asked? Through its own commands, each with an end: a controller that is away must cost nobody anything."""

from __future__ import annotations

import subprocess
from typing import Final

from ckptd import slurmtext
from ckptd.slurmtext import NodeState
from ckptd.units import shortened

TIMEOUT_S: Final = 20.0
"""Commands go on trying for long while the controller does not answer."""


class SlurmSilent(Exception):
    """There was no answer: why."""


def ask(*command: str, timeout_s: float = TIMEOUT_S) -> str:
    """What a command printed. Blocks, for `timeout_s` seconds at most.

    Raises:
        SlurmSilent: it cannot be started, failed, or did not come to an end.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{command[0]} said nothing for {timeout_s:.0f} s") from None
    except OSError as error:
        raise SlurmSilent(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["nothing"])[-1]
        raise SlurmSilent(f"{command[0]} ended with status {done.returncode} and said {shortened(said)}")
    return done.stdout


def host_names(nodelist: str) -> list[str]:
    """The nodes that `n[1-3,7]` stands for, in order. Needs no controller. Raises SlurmSilent."""
    return ask("scontrol", "show", "hostnames", nodelist).split()


def addresses(nodelist: str) -> dict[str, str]:
    """Address by node. Raises SlurmSilent."""
    return slurmtext.node_addresses(ask("scontrol", "show", "node", nodelist))


def node_states(nodelist: str) -> dict[str, NodeState]:
    """State by node. Raises SlurmSilent."""
    return slurmtext.node_states(ask("sinfo", "-h", "-a", "-N", "-n", nodelist, "-o", slurmtext.NODE_FORMAT))


def time_left(job_id: str) -> float | None:
    """Seconds that a job may still run; None: no limit. Raises SlurmSilent."""
    return slurmtext.time_left(ask("squeue", "-h", "-j", job_id, "-o", slurmtext.LEFT_FORMAT))
