"""`ckptd report`: the whole story of a run: where its time went, what interrupted it, what each restart cost."""

from __future__ import annotations

import json
import statistics
from typing import Any

import click

from ckptd.cli import _text
from ckptd.cli._ask import json_option, read_status, run_argument
from ckptd.errors import ExitStatus
from ckptd.ledger import Ledger
from ckptd.rundir import find_run

PARTS = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s", "total_s")


@click.command()
@run_argument
@json_option
def report(run: str | None, as_json: bool) -> int:
    """Tell where the time of RUN went, what interrupted it, and what each restart cost, part by part."""
    run_dir = find_run(run)
    status = read_status(run_dir)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        document = {
            "name": status["name"],
            "state": status["state"],
            "outcome": status["outcome"],
            "step": status["step"],
            "goodput": status["goodput"],
            "estimates": status["estimates"],
            "interval": status["interval"],
            "attempts": ledger.rows("attempts"),
            "interruptions": ledger.rows("interruptions"),
            "restarts": ledger.rows("restarts"),
            "saves": ledger.rows("saves"),
        }
    print(json.dumps(document, indent=1) if as_json else _text.printable(readable(document, status)))
    return ExitStatus.FINISHED


def readable(document: dict[str, Any], status: dict[str, Any]) -> str:
    """The report as text."""
    lines = [_text.summary(status), ""]
    committed = [save for save in document["saves"] if save["outcome"] == "committed"]
    if committed:
        stall = statistics.median(save["stall_s"] for save in committed)
        upload = statistics.median(save["upload_s"] for save in committed)
        lines += [
            f"saves: {len(committed)} committed, stall {_text.seconds(stall)}, to the commit {_text.seconds(upload)} (medians)",
            "",
        ]
    if document["restarts"]:
        lines.append("restarts, from the first death to the first step after it:")
        names = [part.removesuffix("_s").replace("_", " ") for part in PARTS]
        lines.append("  " + "".join(f"{name:>11}" for name in names) + "   start")
        shown = document["restarts"][-20:]
        for row in shown:
            warm = "warm" if row["warm"] else "cold"
            lines.append("  " + "".join(f"{_text.seconds(row[part]):>11}" for part in PARTS) + f"   {warm}")
        if len(document["restarts"]) > 1:
            medians = (statistics.median(row[part] for row in document["restarts"]) for part in PARTS)
            lines.append("  " + "".join(f"{_text.seconds(value):>11}" for value in medians) + "   median")
        lines.append("")
    if document["interruptions"]:
        lines.append("interruptions:")
        for row in document["interruptions"][-20:]:
            planned = ", planned" if row["planned"] else ""
            lines.append(
                f"  {_text.clock(row['at'])} attempt {row['attempt']}: {row['detail']} [{row['cause']}, {row['severity']}{planned}]"
                f", {row['lost_steps']} steps lost ({_text.seconds(row['lost_seconds'])})"
            )
    return "\n".join(lines).rstrip()
