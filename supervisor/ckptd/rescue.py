"""How does a run go on whose ledger is damaged? The file is set aside, and a new one begins with what can still be known.

What the old one still gives is taken over. What it does not, the checkpoints say: which run they are of, and how high its
attempts have counted, so that no attempt writes where an earlier one did. The newest commit is found as at every start.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from ckptd.core import events, picture
from ckptd.errors import LedgerDamaged
from ckptd.jobspec import JobSpec
from ckptd.ledger import Ledger
from ckptd.node import tiers
from ckptd.node.tiers import Found, Tier
from ckptd.rundir import RunDir
from ckptd_shim import contract


@contextlib.contextmanager
def opened(run_dir: RunDir, spec: JobSpec) -> Iterator[Ledger]:
    """The run's ledger; the caller holds the run's lock.

    Raises:
        LedgerError: it cannot be used for another reason than damage.
    """
    try:
        ledger = Ledger.open(run_dir.ledger_path)
    except LedgerDamaged as error:
        ledger, aside, history = Ledger.renewed(run_dir.ledger_path)
        what = (
            f"the ledger was damaged ({error.what}): it is now {aside}; {len(history)} events of it could be read and are "
            "taken over. Look through the pins (`ckptd status --json`): what could not be read is not pinned any more"
        )
        print(f"ckptd: {what}", file=sys.stderr, flush=True)
        ledger.append_many(_rest(run_dir, spec, history, what))
    with ledger:
        yield ledger


def _rest(run_dir: RunDir, spec: JobSpec, history: list[events.Event], what: str) -> list[events.Event]:
    """What has to follow the events that were saved, for the next daemon to start from."""
    state = picture.replay(history).run
    t, at = max((event.t for event in history), default=0.0), time.time()
    commits = [found for tier in spec.checkpoint.tiers if tier.path is not None for found in _commits(spec, tier.name)]
    newest = max(commits, key=lambda f: f.marker.created if f.marker is not None else 0.0, default=None)
    run_id = state.policy.run_id or (newest.marker.run_id if newest is not None and newest.marker is not None else "")
    rest: list[events.Event] = [events.Noted(t=t, at=at, level="error", what=what)]
    if not run_id:
        return rest
    if not state.policy.run_id:
        rest.append(events.DaemonStarted(t=t, at=at, policy=spec.policy(run_id).to_dict()))
    own = [f for f in commits if f.marker is not None and f.marker.run_id == run_id]
    counted = [event.attempt for event in history if event.attempt is not None]
    last = max([0, *counted, *(f.attempt for f in own), *_attempts(run_dir)])
    if last > state.attempt:
        world = newest.marker.world_size if newest is not None and newest.marker is not None else 1
        nodes = list(state.nodes) or ["local"]
        rest += [
            events.AttemptLaunched(
                t=t, at=at, attempt=last, world_size=world, placement={name: list(range(world)) for name in nodes}
            ),
            events.RunEnded(
                t=t, at=at, outcome="unavailable", exit_status=69,
                detail=f"the ledger was damaged: what still runs of attempt {last} is ended first",
            ),
        ]  # fmt: skip
    return rest


def _commits(spec: JobSpec, name: str) -> list[Found]:
    tier = next(each for each in spec.checkpoint.tiers if each.name == name)
    try:
        found = tiers.scan(Tier(name=name, directory=spec.tier_location(tier)))
    except OSError:
        return []
    return [f for f in found if f.marker is not None]


def _attempts(run_dir: RunDir) -> list[int]:
    try:
        return list(contract.attempt_dirs(run_dir.attempts_path))
    except OSError:
        return []
