"""`ckptd pin`, `unpin`, `gc` and `rollback`: what of a run's checkpoints is kept, and where the run goes on from.

A living daemon is asked; where there is none the command does it itself, under the run's lock.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ckptd import orders, upkeep
from ckptd.cli import _text
from ckptd.cli._ask import json_option, run_argument
from ckptd.core import events
from ckptd.errors import DaemonUnreachable, ExitStatus, UsageError
from ckptd.link import Message, ask_daemon
from ckptd.node import lookup, retire
from ckptd.node.retire import Holdings
from ckptd.node.tiers import Found
from ckptd.offline import OfflineRun
from ckptd.rundir import RunDir, find_run
from ckptd.units import format_size

PATIENCE_S = 3600.0
"""The daemon answers when every byte of a checkpoint is read, or a large one deleted."""

path_option = click.option("--path", help="The checkpoint's directory, where STEP was committed more than once.")


@click.command()
@click.argument("step", type=click.IntRange(min=0))
@run_argument
@json_option
@click.option("--label", default="", help="Why it is kept, for people.")
@path_option
def pin(step: int, run: str | None, as_json: bool, label: str, path: str | None) -> int:
    """Keep the checkpoint of STEP of RUN whatever keep_last and keep_every say, until it is unpinned."""
    run_dir = find_run(run)
    answer = _ask(run_dir, {"what": "pin", "step": step, "label": label, "path": path})
    if answer is None:
        answer = _pin_offline(run_dir, step, label, path)
    return _say(answer, f"pinned: step {answer['step']}, {answer['path']}", as_json=as_json)


def _pin_offline(run_dir: RunDir, step: int, label: str, path: str | None) -> Message:
    with OfflineRun.open(run_dir) as run:

        def find() -> Found:
            return lookup.find(run.tiers, run.run_id, step=step, path=path, known=run.markers)

        found = find()
        event = events.CheckpointPinned(
            t=run.clock.now(), step=found.step, path=found.path, label=label, source="ckptd pin"
        )
        run.happened(event)
        try:
            find()
        except UsageError:  # an agent that lost its daemon was at its last deletions
            run.happened(upkeep.unpinned(run.picture.run, found.step, found.path, t=run.clock.now()))
            raise
        return {"step": found.step, "path": found.path}


@click.command()
@click.argument("step", type=click.IntRange(min=0))
@run_argument
@json_option
@path_option
def unpin(step: int, run: str | None, as_json: bool, path: str | None) -> int:
    """Have the checkpoint of STEP of RUN kept no longer than the rules say."""
    run_dir = find_run(run)
    answer = _ask(run_dir, {"what": "unpin", "step": step, "path": path})
    if answer is None:
        with OfflineRun.open(run_dir) as offline:
            event = upkeep.unpinned(offline.picture.run, step, path, t=offline.clock.now())
            offline.happened(event)
            answer = {"step": event.step, "path": event.path}
    return _say(answer, f"not pinned any more: step {answer['step']}, {answer['path']}", as_json=as_json)


@click.command()
@run_argument
@json_option
@click.option("--dry-run", is_flag=True, help="Delete nothing; say what would go, what stays, and why.")
def gc(run: str | None, as_json: bool, dry_run: bool) -> int:
    """Delete what the rules of RUN's tiers do not keep, and what was left half done; say why the rest stays."""
    run_dir = find_run(run)
    answer = _ask(run_dir, {"what": "gc", "dry_run": dry_run})
    if answer is None:
        answer = _gc_offline(run_dir, dry_run=dry_run)
    items, problems = answer["items"], answer["problems"]
    for problem in problems:
        print(f"ckptd: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps({"dry_run": dry_run, "items": items, "problems": problems}, indent=1))
    else:
        for item in items:
            print(_text.printable(_fate(item, dry_run=dry_run)))
        going = [item for item in items if item["goes" if dry_run else "gone"]]
        size = format_size(sum(item["bytes"] or 0 for item in going))
        print(f"{len(going)} of {len(items)} {'would go' if dry_run else 'deleted'} ({size} of committed data)")
    return ExitStatus.FAILED if problems else ExitStatus.FINISHED


def _gc_offline(run_dir: RunDir, *, dry_run: bool) -> dict[str, Any]:
    with OfflineRun.open(run_dir) as run:
        holdings = Holdings.from_dict(orders.holdings(run.picture.run, run.run_id, live=run.live))
        found = retire.collect(run.tiers, holdings, dry_run=dry_run)
        for item in found["items"]:
            if item["gone"]:
                run.happened(
                    events.CheckpointDeleted(
                        t=run.clock.now(), step=item["step"], tier=item["tier"], path=item["path"], why=item["why"]
                    )
                )
        return found


def _fate(item: dict[str, Any], *, dry_run: bool) -> str:
    verb = "stays" if not item["goes"] else "would go" if dry_run else "deleted" if item["gone"] else "NOT deleted"
    return f"{verb:11} step {item['step']:<9} {item['tier']:8} {item['what']:12} {item['path']}: {item['why']}"


@click.command()
@run_argument
@json_option
@click.option("--to", "step", required=True, type=click.IntRange(min=0), help="The step to go on from.")
@click.option("--why", default="", help="The reason, for the history.")
@path_option
def rollback(run: str | None, as_json: bool, step: int, why: str, path: str | None) -> int:
    """Have RUN go on from the checkpoint of an earlier step. Commits after it are suspect: never resumed from again."""
    run_dir = find_run(run)
    answer = _ask(run_dir, {"what": "rollback", "step": step, "path": path, "why": why})
    if answer is not None:
        text = f"going back to step {answer['step']} ({answer['path']}); {answer['lost_steps']} steps are given up"
        return _say(answer, text, as_json=as_json)
    with OfflineRun.open(run_dir) as offline:
        state = offline.picture.run
        found = lookup.verified(offline.tiers, offline.run_id, step=step, path=path, known=offline.markers)
        assert found.marker is not None
        document = {
            "step": found.step, "path": found.path, "tier": found.tier, "sequence": found.sequence,
            "samples": found.marker.samples_seen,
        }  # fmt: skip
        event = upkeep.rollback_to(state, document, t=offline.clock.now(), why=why)
        offline.happened(event)
        answer = {"step": event.to_step, "path": event.path, "lost_steps": max(0, state.step - event.to_step)}
    text = f"`ckptd run {run_dir.job_path}` will go on from step {answer['step']} ({answer['path']})"
    return _say(answer, text, as_json=as_json)


def _ask(run_dir: RunDir, request: Message) -> Message | None:
    """What a living daemon answers; None: there is none.

    Raises:
        DaemonUnreachable: one lives and gives no answer.
        UsageError: it refuses.
    """
    try:
        answer = ask_daemon(run_dir.socket_path(), request, timeout=PATIENCE_S)
    except DaemonUnreachable as error:
        holder = run_dir.lock_holder()
        if holder is not None and error.connected:
            raise DaemonUnreachable(f"the run is supervised by {holder}, which does not answer: {error}") from None
        return None
    if answer["type"] != "accepted":
        raise UsageError(f"refused: {answer.get('why')}")
    return {key: value for key, value in answer.items() if key != "type"}


def _say(answer: dict[str, Any], text: str, *, as_json: bool) -> int:
    print(json.dumps({"accepted": True, **answer}) if as_json else _text.printable(text))
    return ExitStatus.FINISHED
