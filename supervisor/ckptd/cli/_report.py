"""`ckptd report`: the whole story of a run: where its time went, what interrupted it, what each restart cost."""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Any

import click

from ckptd import report as story
from ckptd.cli import _text
from ckptd.cli._ask import json_option, read_status, run_argument
from ckptd.core import events
from ckptd.errors import ExitStatus, UsageError
from ckptd.ledger import Ledger
from ckptd.rundir import find_run
from ckptd_shim import contract

PARTS = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s", "total_s")


@click.command()
@run_argument
@json_option
@click.option("--text", "as_text", is_flag=True, help="Print the report in words instead.")
@click.option(
    "-o", "--output", metavar="FILE", help="Where to; - is standard output. Default: <name>-report.html here."
)
@click.option(
    "--what-if", metavar="restart=2m,stall=5s", multiple=True, help="Replay the run at these costs; may be repeated."
)
def report(run: str | None, as_json: bool, as_text: bool, output: str | None, what_if: tuple[str, ...]) -> int:
    """Tell where the time of RUN went, what interrupted it, and what each restart cost: one HTML file, with charts."""
    if as_json and as_text:
        raise UsageError("--json and --text exclude each other")
    asked = [story.parse_what_if(text) for text in what_if]
    run_dir = find_run(run)
    status = read_status(run_dir)
    drawn = story.build(run_dir, status, what_if=asked)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        document = {
            "name": status["name"],
            "state": status["state"],
            "outcome": status["outcome"],
            "step": status["step"],
            "goodput": status["goodput"],
            **{name: drawn[name] for name in ("ettr", "degraded", "waste", "what_if", "checkpoints", "causes")},
            "estimates": status["estimates"],
            "interval": status["interval"],
            "attempts": ledger.rows("attempts"),
            "interruptions": ledger.rows("interruptions"),
            "rollbacks": [
                {"at": event.at, **events.data_of(event)}
                for _, event in ledger.events()
                if isinstance(event, events.RolledBack)
            ],
            "restarts": ledger.rows("restarts"),
            "saves": ledger.rows("saves"),
        }
    text = _text.printable(readable(document, status))
    if as_json:
        _give(json.dumps(document, indent=1), output)
    elif as_text:
        _give(text, output)
    else:
        from ckptd.web import page

        _give(page.report_page(drawn, text=text), output or f"{status['name']}-report.html")
    return ExitStatus.FINISHED


def _give(text: str, output: str | None) -> None:
    """Print it, or write it to a file and say so."""
    if output in (None, "-"):
        print(text)
        return
    assert output is not None
    try:
        contract.write_atomically(output, f"{text}\n".encode(errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}; name another file with -o") from None
    print(f"wrote {os.path.abspath(output)}", file=sys.stderr)


def readable(document: dict[str, Any], status: dict[str, Any]) -> str:
    """The report as text."""
    lines = [_text.summary(status), f"  ETTR {document['ettr']:.1%} of the device time that was wanted"]
    if document["degraded"] > 0:
        lines[-1] += f"; {document['degraded']:.1%} of it were devices missing (degraded)"
    lines.append("")
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
    if document["what_if"]:
        lines.append("what if: this run's own interruptions, replayed")
        lines += [f"  {_question(row):34} interval {_text.seconds(row['interval_s']):>9}, goodput {row['goodput']:6.1%}"
                  for row in document["what_if"]]  # fmt: skip
        lines.append("")
    for row in document["rollbacks"]:
        why = f": {row['why']}" if row["why"] else ""
        lines += [f"{_text.clock(row['at'])} rolled back to step {row['to_step']} by {row['source']}{why}", ""]
    if document["interruptions"]:
        lines.append("interruptions:")
        for row in document["interruptions"][-20:]:
            planned = ", planned" if row["planned"] else ""
            lines.append(
                f"  {_text.clock(row['at'])} attempt {row['attempt']}: {row['detail']} [{row['cause']}, {row['severity']}{planned}]"
                f", {row['lost_steps']} steps lost ({_text.seconds(row['lost_seconds'])})"
            )
    return "\n".join(lines).rstrip()


def _question(row: dict[str, Any]) -> str:
    return row["name"] or ", ".join(f"{name} {_text.seconds(value)}" for name, value in row["asked"].items())
