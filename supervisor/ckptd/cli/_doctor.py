"""`ckptd doctor`: what will go wrong tonight?"""

from __future__ import annotations

import json
import os
import sys

import click

from ckptd import doctor as checks
from ckptd import jobspec
from ckptd.cli import _text
from ckptd.cli._ask import json_option
from ckptd.errors import ExitStatus

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.argument("job", required=False, type=click.Path())
@json_option
def doctor(job: str | None, as_json: bool) -> int:
    """Look at this machine, and at what JOB (default: job.yaml, where there is one) needs of it. Status 1: it will fail."""
    if job is None and os.path.exists("job.yaml"):
        job = "job.yaml"
    spec = None if job is None else jobspec.load(job)
    found: list[checks.Finding] = []
    for finding in checks.examine(spec):
        found.append(finding)
        if not as_json:
            print(_readable(finding), flush=True)
    failed = any(finding.level == "fail" for finding in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [finding.to_json() for finding in found]}, indent=1))
    return ExitStatus.FAILED if failed else ExitStatus.FINISHED


def _readable(finding: checks.Finding) -> str:
    level = f"{finding.level:<5}"
    if _text.coloured(sys.stdout):
        level = click.style(level, fg=_COLOURS[finding.level], bold=finding.level == "fail")
    lines = [f"{level} {finding.check:14} {_text.printable(finding.what)}"]
    if finding.todo:
        lines.append(f"{'':20} -> {_text.printable(finding.todo)}")
    return "\n".join(lines)
