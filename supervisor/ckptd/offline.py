"""How is a run changed while no daemon supervises it? Under its lock, by events that the next daemon will find."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from ckptd import jobspec, orders
from ckptd.clock import RunClock
from ckptd.core import events, picture
from ckptd.core.picture import Picture
from ckptd.core.state import LIVE, Status
from ckptd.errors import UsageError
from ckptd.ledger import Ledger
from ckptd.node.tiers import Tier, known_markers
from ckptd.rundir import RunDir, boot_id

_WORKERS_MAY_LIVE = LIVE | {Status.STOPPING}


@dataclass(kw_only=True)
class OfflineRun:
    """A run without a daemon, opened to be changed."""

    ledger: Ledger
    picture: Picture
    clock: RunClock
    tiers: list[Tier]
    """Fastest first."""
    markers: dict[str, str]
    """CRC-32C of the markers of its commits, by `marker_key`."""

    @property
    def run_id(self) -> str:
        return self.picture.run.policy.run_id

    @property
    def live(self) -> bool:
        """Whether workers may be running on without a daemon."""
        return self.picture.run.status in _WORKERS_MAY_LIVE

    @classmethod
    @contextlib.contextmanager
    def open(cls, run_dir: RunDir) -> Iterator[Self]:
        """Take the run's lock for as long as the block lasts.

        Raises:
            RunLocked: a daemon has it after all.
            UsageError: the run was never started.
            LedgerError: its history cannot be read.
        """
        with run_dir.acquire_lock(), Ledger.open(run_dir.ledger_path) as ledger:
            history = [event for _, event in ledger.events()]
            state = picture.replay(history)
            if not state.run.policy.run_id:
                raise UsageError(f"the run in {run_dir.path} was never started; `ckptd run` starts it")
            spec = jobspec.load(run_dir.job_path, check=False)
            clock = RunClock.after(history, last_t=ledger.last_t(), boot_id=boot_id())
            tiers = [Tier.from_dict(tier) for tier in orders.settings(spec)["tiers"]]
            yield cls(ledger=ledger, picture=state, clock=clock, tiers=tiers, markers=known_markers(history))

    def happened(self, event: events.Event) -> None:
        """Append an event, durably."""
        event = replace(event, at=event.at or time.time())
        self.ledger.append(event)
        self.picture = picture.apply(self.picture, event)
