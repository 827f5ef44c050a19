"""How long is the allocation ours, and which of its nodes does Slurm want back? Asked in a thread, now and then.

A controller that is away changes nothing: what it said last holds, and the end comes nearer by our own clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from ckptd import slurmcalls
from ckptd.core import deadline, events, placement
from ckptd.core.devices import node_identity
from ckptd.core.picture import Picture
from ckptd.core.state import LIVE, RunState, Status
from ckptd.errors import ExitStatus
from ckptd.launchers.slurm import Allocation
from ckptd.slurmtext import NodeState
from ckptd.units import format_duration

log = logging.getLogger(__name__)

POLL_S: Final = 10.0
SOURCE: Final = "Slurm"
"""Who drained a node: what Slurm took, Slurm gives back, and nothing else."""
STOPPING_S: Final = 5.0
"""Of the time before the end: for ending what has saved, or could not."""


class AllocationWatch:
    """What Slurm said last of one allocation. `poll` is called in a thread of its own, all else by the daemon's loop."""

    def __init__(
        self, allocation: Allocation, *, environ: Mapping[str, str], stop_grace_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.nodes = list(allocation.nodes)
        self.job_id = allocation.job_id
        self.identity = f"{allocation.job_id}.{environ.get('SLURM_RESTART_COUNT') or 0}"
        """A job that is queued again keeps its number, and gets another allocation."""
        self._nodelist = allocation.nodelist
        self._stop_grace_s = stop_grace_s
        self._now = now
        self._states: dict[str, NodeState] = {}
        self._end: float | None = None
        self._whole_s: float | None = None
        self._drained: set[str] = set()
        self._warned: set[str] = set()
        self._silent = False
        self._done = threading.Event()
        end = environ.get("SLURM_JOB_END_TIME", "")
        if end.isdecimal():  # by the wall clock, until the controller says how long it is
            self._ends_in(int(end) - time.time())

    # --- asking ---

    def start(self) -> None:
        """Begin to ask."""
        # A daemon thread: a controller that is away must not hold the end of this process.
        threading.Thread(target=self._poll_for_ever, name="slurm", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._done.set()

    def _poll_for_ever(self) -> None:
        while not self._done.is_set():
            self.poll()
            self._done.wait(POLL_S)

    def poll(self) -> None:
        """Ask once. Blocks."""
        try:
            asked = self._now()
            left = slurmcalls.time_left(self.job_id)
            self._states = slurmcalls.node_states(self._nodelist)
        except slurmcalls.SlurmSilent as error:
            if not self._silent:
                log.warning("Slurm cannot be asked, training goes on: %s", error)
            self._silent = True
            return
        self._silent = False
        self._ends_in(left, since=asked)

    def _ends_in(self, left_s: float | None, *, since: float | None = None) -> None:
        self._end = None if left_s is None else (self._now() if since is None else since) + left_s
        if left_s is not None:
            self._whole_s = max(self._whole_s or 0.0, left_s)

    # --- what was said ---

    def left_s(self) -> float | None:
        """Seconds until the time is over; None: no limit is known."""
        return None if self._end is None else self._end - self._now()

    def down(self, node: str) -> str | None:
        """Why nothing can be started on a node; None: nothing is known against it."""
        state = self._states.get(node)
        return str(state) if state is not None and state.down else None

    # --- what follows from it ---

    def saw(self, event: events.Event) -> None:
        """Follow the ledger: whose doing is it that a node is drained?"""
        if isinstance(event, events.DeviceDrained):
            if event.drained and event.source.startswith(SOURCE):
                self._drained.add(event.device)
            else:
                self._drained.discard(event.device)

    def departed(self, state: RunState, t: float) -> list[events.Event]:
        """For a daemon that starts: the nodes on which an earlier allocation trained, and which this one has not.

        Slurm ends what is left of a job before it starts it again, so nothing of the attempt lives there.
        """
        if state.status not in LIVE and state.status is not Status.STOPPING:
            return []
        found: list[events.Event] = []
        for name in state.placement:
            if not state.nodes[name].ended and name not in self.nodes:
                why = f"it is no part of job {self.job_id}, as which the run goes on"
                found.append(events.NodeLost(t=t, node=name, why=why))
                found.append(events.AttemptEnded(t=t, node=name, attempt=state.attempt))
        return found

    def changed(self, state: RunState, t: float) -> list[events.Event]:
        """Nodes that Slurm drains are left out from the next commit on, where training can go on without all of them.

        Where it cannot, it stays: Slurm lets what runs on such a node come to its end.
        """
        found: list[events.Event] = []
        leaving = {node for node, known in self._states.items() if known.leaving}
        dispensable = bool(leaving) and _can_do_without(state, leaving)
        for node, known in self._states.items():
            identity = node_identity(node)
            record = state.book.records.get(identity)
            if not known.leaving:
                self._warned.discard(node)
                if identity in self._drained and not known.down:
                    found.append(
                        events.DeviceDrained(
                            t=t, device=identity, drained=False, source=f"{SOURCE}: {known.state} again"
                        )
                    )
            elif node in self.nodes and not (record is not None and record.drained):
                if dispensable:
                    found.append(events.DeviceDrained(t=t, device=identity, drained=True, source=f"{SOURCE}: {known}"))
                elif node not in self._warned and state.status is Status.TRAINING:
                    self._warned.add(node)
                    what = f"node {node} is {known}; training goes on there, for without it there are too few devices"
                    found.append(events.Noted(t=t, level="warning", what=what))
        return found

    def stop(self, picture: Picture, t: float) -> events.Requested | None:
        """The request to save and stop, once there is no more time than that needs."""
        state, left_s = picture.run, self.left_s()
        pending = state.request is not None and state.request.request != "relaunch"
        if left_s is None or self._whole_s is None or pending or state.status is Status.ENDED:
            return None
        needed_s = deadline.stop_before_s(picture.estimate, stop_grace_s=self._stop_grace_s, whole_s=self._whole_s)
        if left_s > needed_s:
            return None
        return events.Requested(
            t=t, request="stop", source=f"the time limit of Slurm's job {self.job_id}", exit_status=ExitStatus.REQUEUE,
            timeout_s=max(1.0, left_s - self._stop_grace_s - STOPPING_S),
            reason=f"{format_duration(max(0.0, round(left_s)))} are left",
        )  # fmt: skip


def _can_do_without(state: RunState, nodes: Collection[str]) -> bool:
    others = {name: state.usable(name, state.t) for name in state.placeable() if name not in nodes}
    return placement.choose(others, state.policy) is not None
