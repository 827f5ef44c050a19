"""`ckptd prove`: does this job resume exactly?"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from pathlib import Path

import click

from ckptd import jobspec
from ckptd.cli import _progress
from ckptd.cli._ask import json_option
from ckptd.drills import curves
from ckptd.drills.prove import Proof, Prover
from ckptd.errors import ExitStatus, UsageError


@click.command()
@click.argument("job", default="job.yaml", type=click.Path())
@click.option("--steps", default=10, show_default=True, help="N: resume after N steps, compare 2N.")
@click.option("--worlds", help="Workers before and after the resume, as in 2,1; default: as many as the job takes.")
@click.option("--kill", is_flag=True, help="Interrupt by SIGKILL of a worker instead of a planned stop.")
@click.option("--curve", type=click.Path(dir_okay=False), help="Draw both loss curves into this SVG file.")
@click.option("--directory", type=click.Path(file_okay=False), help="Keep everything here; default: a temporary one.")
@json_option
def prove(  # noqa: PLR0917  click passes by name
    job: str, steps: int, worlds: str | None, kill: bool, curve: str | None, directory: str | None, as_json: bool
) -> int:
    """Run JOB 2N steps straight, then N, interrupted, resumed, and N more, and compare. Status 1: they differ."""
    spec = jobspec.load(job)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="ckptd: %(message)s")
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="ckptd-prove-") as scratch:
            proof = _prove(spec, scratch, steps, worlds, kill=kill)
    else:
        os.makedirs(directory, exist_ok=True)
        if os.listdir(directory):
            raise UsageError(f"--directory {directory} is not empty; name one that is, or a new one")
        proof = _prove(spec, directory, steps, worlds, kill=kill)
    if curve is not None:
        title = f"{spec.name}: {proof.verdict.outcome}, resumed after step {proof.steps}"
        picture = curves.svg(proof.straight.losses(), proof.resumed.losses(), resume_step=proof.steps, title=title)
        Path(curve).write_text(picture, encoding="utf-8")
    print(json.dumps({"name": spec.name, **proof.to_json()}, indent=1) if as_json else _readable(spec.name, proof))
    return ExitStatus.FINISHED if proof.holds else ExitStatus.FAILED


def _prove(spec: jobspec.JobSpec, scratch: str, steps: int, worlds: str | None, *, kill: bool) -> Proof:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # the bar, which is drawn again below

    def say(text: str) -> None:
        print(f"{clear}{spec.name}: {text}", file=sys.stderr, flush=True)

    path = Path(os.path.abspath(scratch))
    prover = Prover(spec, scratch=path, steps=steps, worlds=_worlds(worlds), kill=kill, say=say)
    with _progress.watched(4 * steps, "steps", lambda: _steps_traced(path)):
        return prover.prove()


def _steps_traced(scratch: Path) -> int:
    """Steps that all legs together have taken so far."""
    return sum(trace.read_bytes().count(b'"kind": "step"') for trace in scratch.glob("*/trace*.jsonl"))


def _worlds(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if match is None:
        raise UsageError(f"--worlds {text}: two numbers of workers, as in 2,1")
    return int(match[1]), int(match[2])


def _readable(name: str, proof: Proof) -> str:
    verdict = proof.verdict
    before, after = proof.worlds
    how = "killed" if proof.killed else "stopped"
    lines = [
        f"{name}: {verdict.outcome.upper()}",
        f"  {2 * proof.steps} steps on {before} workers, against {proof.steps}, {how}, and {proof.steps} more on {after}",
        f"  {verdict.because}",
    ]
    if verdict.first_step is not None:
        lines.append(f"  first difference at step {verdict.first_step}: {', '.join(verdict.differs)}")
        lines.append(f"  largest relative difference of a loss: {verdict.largest:.3g}")
        lines += _table(proof, verdict.first_step)
    if verdict.likely is not None:
        lines.append(f"  likeliest cause: {verdict.likely}")
    return "\n".join(lines)


def _table(proof: Proof, first: int) -> list[str]:
    """The losses round the first difference."""
    lines = [f"  {'step':>8} {'straight':>24} {'resumed':>24}"]
    for step in range(max(1, first - 2), min(first + 3, proof.straight.last, proof.resumed.last) + 1):
        pair = [trace.steps[step].loss for trace in (proof.straight, proof.resumed)]
        shown = ["-" if loss is None else repr(loss) for loss in pair]
        lines.append(f"  {step:>8} {shown[0]:>24} {shown[1]:>24}" + ("  <" if shown[0] != shown[1] else ""))
    return lines
