"""`ckptd events` and `ckptd checkpoints`: what a run has done and what it holds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from ckptd import jobspec, orders
from ckptd.cli import _progress, _text
from ckptd.cli._ask import json_option, run_argument
from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.keeping import name_of
from ckptd.core.state import RunState
from ckptd.errors import ExitStatus
from ckptd.ledger import Ledger
from ckptd.node import tiers
from ckptd.rundir import find_run
from ckptd.tiers import Pace, Store
from ckptd.tiers import verify as read_and_compare
from ckptd.units import format_size


@click.command()
@run_argument
@json_option
@click.option("-n", "--last", type=click.IntRange(min=1), help="Only the last N.")
def events(run: str | None, as_json: bool, last: int | None) -> int:
    """List everything that happened to RUN, oldest first."""
    run_dir = find_run(run)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        found = list(ledger.events())
    if last is not None:
        found = found[-last:]
    if as_json:
        print(json.dumps([_as_json(number, event) for number, event in found], indent=1))
        return ExitStatus.FINISHED
    for number, event in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
        where = "" if event.attempt is None else f" a{event.attempt}"
        what = _text.printable(_text.event_line(event) or _short(event))
        print(f"{number:6} {when} {event.t:12.3f}{where:>6} {event.kind:20} {what}")
    return ExitStatus.FINISHED


def _as_json(number: int, event: ev.Event) -> dict[str, Any]:
    return {
        "id": number, "at": event.at, "t": event.t, "attempt": event.attempt, "kind": event.kind, "node": event.node,
        "rank": event.rank, "data": ev.data_of(event),
    }  # fmt: skip


def _short(event: ev.Event) -> str:
    shown = {k: v for k, v in ev.data_of(event).items() if isinstance(v, int | float | str) and v not in ("", None)}
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())[:160]


@click.command()
@run_argument
@json_option
@click.option("--verify", is_flag=True, help="Read every byte and compare it with what was committed.")
def checkpoints(run: str | None, as_json: bool, verify: bool) -> int:
    """List the checkpoints of RUN on every tier, newest commit first. With --verify status 1 if one is not whole."""
    run_dir = find_run(run)
    spec = jobspec.load(run_dir.job_path, check=False)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        history = [event for _, event in ledger.events()]
    state = picture.replay(history).run
    known = tiers.known_markers(history)
    found: list[tuple[tiers.Found, Store]] = []
    unreadable = False
    for settings in orders.settings(spec)["tiers"]:
        tier = tiers.Tier.from_dict(settings)
        store = tier.store()
        try:
            found += [(each, store) for each in tiers.scan(tier, known, store=store)]
        except OSError as error:
            print(f"ckptd: tier {tier.name!r} cannot be read: {error}", file=sys.stderr)
            unreadable = True
    found.sort(key=lambda each: (each[0].sequence, each[0].step), reverse=True)
    committed = sum(_bytes(item) or 0 for item, _ in found) if verify else 0
    with _progress.bar(committed, "verifying") as advance:
        rows = [_row(item, store, state, verify=verify, advance=advance) for item, store in found]
    bad = [row for row in rows if row["state"] == "damaged"]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            note = "" if row["comparable"] is not False else f"; not comparable: {row['comparable_reason']}"
            about = f"{format_size(row['bytes'])}, {row['world_size']} workers" if row["bytes"] is not None else "-"
            problem = f"; {row['problem']}" if row["problem"] else ""
            if row["pinned"]:
                note = f"; pinned{': ' + row['label'] if row['label'] else ''}{note}"
            print(f"step {row['step']:<9} {row['tier']:8} {row['state']:11} {about:24} {row['path']}{note}{problem}")
        if not rows:
            print("no checkpoints yet")
    return ExitStatus.FAILED if unreadable or (verify and bad) else ExitStatus.FINISHED


class _Shown(Pace):
    """Tells a progress bar of what was read."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance

    def beat(self, count: int = 0) -> None:
        super().beat(count)
        self._advance(count)


def _bytes(found: tiers.Found) -> int | None:
    return None if found.marker is None else sum(file.size for file in found.marker.files)


def _row(
    found: tiers.Found, store: Store, run: RunState, *, verify: bool, advance: Callable[[int], None]
) -> dict[str, Any]:
    marker = found.marker
    pin = run.keeping.pins.get(name_of(found.path))
    suspect = marker is not None and marker.run_id == run.policy.run_id and run.keeping.suspect(found.sequence)
    state, problem = ("committed" if marker is not None else "partial"), found.problem
    if problem:
        state = "damaged"
    elif verify and marker is not None:
        try:
            read_and_compare(store, found.name, found.marker_crc32c, _Shown(advance))
            state = "verified"
        except OSError as error:
            state, problem = "damaged", str(error)
    if suspect and state in ("committed", "verified"):
        state = "suspect"
    return {
        "step": found.step,
        "attempt": found.attempt,
        "tier": found.tier,
        "path": found.path,
        "state": state,
        "problem": problem,
        "pinned": pin is not None,
        "label": pin.label if pin is not None else "",
        "sequence": marker.sequence if marker else None,
        "created": marker.created if marker else None,
        "bytes": _bytes(found),
        "samples_seen": marker.samples_seen if marker else None,
        "loss": marker.loss if marker else None,
        "world_size": marker.world_size if marker else None,
        "comparable": marker.comparable if marker else None,
        "comparable_reason": marker.comparable_reason if marker else None,
    }
