"""`ckptd drill`: would the newest checkpoint of a tier restore?"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path

import click

from ckptd.cli import _text
from ckptd.cli._ask import json_option, run_argument
from ckptd.drills.restore import Result, rehearse
from ckptd.errors import DaemonUnreachable, ExitStatus, UsageError
from ckptd.ledger import Ledger
from ckptd.link import Message, ask_daemon
from ckptd.rundir import RunDir, find_run


@click.command()
@run_argument
@json_option
@click.option("--tier", help="Whose newest checkpoint to try; default: drill.tier, or the slowest.")
@click.option("--workers", type=click.IntRange(min=1), help="Restore on so many; default: the fewest the job allows.")
@click.option("--gpus", is_flag=True, help="Use the GPUs although training runs on them.")
@click.option("--directory", type=click.Path(file_okay=False), help="Keep the logs here; default: a temporary one.")
def drill(  # noqa: PLR0917  click passes by name
    run: str | None, as_json: bool, tier: str | None, workers: int | None, gpus: bool, directory: str | None
) -> int:
    """Restore the newest checkpoint of RUN in a scratch attempt, and compare its loss with the one saved. Status 1: bad."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="ckptd: %(message)s")
    run_dir = find_run(run)
    lives = _ask(run_dir, {"what": "ping"}) is not None
    if lives and not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    scratch = None
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        if os.listdir(directory):
            raise UsageError(f"--directory {directory} is not empty; name one that is, or a new one")
        scratch = Path(os.path.abspath(directory))

    def hold(path: str) -> None:
        print(f"restoring {path}", file=sys.stderr, flush=True)
        _ask(run_dir, {"what": "hold", "path": path})

    result = rehearse(run_dir, tier, hold=hold, workers=workers, scratch=scratch)
    _record(run_dir, result)
    print(json.dumps(dataclasses.asdict(result)) if as_json else _text.printable(readable(result)))
    return ExitStatus.FINISHED if result.ok else ExitStatus.FAILED


def readable(result: Result) -> str:
    """A result in a line for a person."""
    took = f"in {_text.seconds(result.seconds)}"
    if not result.ok:
        what = f"step {result.step} on tier {result.tier}" if result.step is not None else f"tier {result.tier}"
        return f"the drill of {what} FAILED: {result.problem}"
    if result.expected is None:
        against = "; nothing to compare it with was saved"
    else:
        kind = "validation loss" if result.compared == "validation" else "usual training loss at the save"
        against = f", {result.expected:.6g} was the {kind}"
    return f"step {result.step} on tier {result.tier} restores {took}: loss {result.loss:.6g}{against}"


def _ask(run_dir: RunDir, request: Message) -> Message | None:
    """The daemon's answer, None where none lives."""
    try:
        return ask_daemon(run_dir.socket_path(), request)
    except DaemonUnreachable as error:
        if error.connected:
            raise
        return None


def _record(run_dir: RunDir, result: Result) -> None:
    """Into the ledger: by the daemon, or, where none lives, from here."""
    answer = _ask(run_dir, {"what": "drilled", "result": {**dataclasses.asdict(result), "source": "ckptd drill"}})
    if answer is not None:
        if answer["type"] != "accepted":
            raise UsageError(f"the drill's result was refused: {answer.get('why')}")
        return
    with run_dir.acquire_lock(), Ledger.open(run_dir.ledger_path) as ledger:
        ledger.append(result.event(t=ledger.last_t(), at=time.time(), source="ckptd drill"))
