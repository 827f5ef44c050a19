"""`ckptd status`, `stop` and `save`: what is asked of a run's daemon."""

from __future__ import annotations

import json
import time
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckptd.cli import _text
from ckptd.errors import DaemonUnreachable, ExitStatus, UsageError
from ckptd.link import ask_daemon
from ckptd.rundir import RunDir, find_run, run_names

REGIME_BELOW = 0.3
"""Belief that the failure rate never changed, below which a person is told that it has."""


def _complete_run(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = [CompletionItem(name) for name in run_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]  # a job.yaml, or a run directory


run_argument = click.argument("run", required=False, shell_complete=_complete_run)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command()
@run_argument
@json_option
def status(run: str | None, as_json: bool) -> int:
    """Show where RUN is (a run directory, a job.yaml, or a name; may be left out where there is one run)."""
    document = read_status(find_run(run))
    print(json.dumps(document, indent=2) if as_json else _text.printable(_readable(document)))
    return ExitStatus.FINISHED


def read_status(run_dir: RunDir) -> dict[str, Any]:
    """The status from the daemon, or, where none lives, from a replay of the ledger.

    Raises:
        DaemonUnreachable: one lives and gives no answer. The ledger would say what was, and look like what is.
        UsageError: the run was never started.
    """
    try:
        answer = ask_daemon(run_dir.socket_path(), {"what": "status"})
        return dict(answer["status"])
    except DaemonUnreachable as error:
        holder = run_dir.lock_holder()
        if holder is not None and error.connected:
            raise DaemonUnreachable(f"the run is supervised by {holder}, which does not answer: {error}") from None
    from ckptd import status as status_module
    from ckptd.core import picture
    from ckptd.ledger import Ledger

    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        replayed = picture.replay(event for _, event in ledger.events())
        if not replayed.run.policy.run_id:
            raise UsageError(f"the run in {run_dir.path} was never started; `ckptd run` starts it")
        return status_module.document(replayed, t=ledger.last_t())


def _readable(status: dict[str, Any]) -> str:
    estimates = status["estimates"]
    interval, committed, last = status["interval"], status["last_committed"], status["last_interruption"]
    outcome = status["outcome"]
    state = status["state"] if outcome is None else f"{outcome['outcome']}: {outcome['detail']}"
    rows = [("run", f"{status['name']} ({status['run_id']})"), ("state", state)]
    if status["daemon"] is None and outcome is None:
        rows.append(("daemon", "none is running; `ckptd run` takes the run up again"))
    rows.append(
        (
            "attempt",
            f"{status['attempt']}, {status['world_size']} workers, {status['devices_healthy']} of {status['devices_known']} devices healthy",
        )
    )
    loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
    rows.append(("step", f"{status['step']} ({status['samples_seen']} samples){loss}"))
    if committed:
        age = _text.seconds(max(0.0, time.time() - committed["at"]))
        rows.append(
            ("committed", f"step {committed['step']} on tier {committed['tier']}, {age} ago: {committed['path']}")
        )
    else:
        rows.append(("committed", "nothing yet"))
    if len(status["tiers"]) > 1:
        rows += [("tier", _tier(tier, first=i == 0)) for i, tier in enumerate(status["tiers"])]
    rows.append(
        ("interval", f"{_text.seconds(interval['seconds'])}, {interval['steps'] or '-'} steps; {interval['reason']}")
    )
    rows.append(
        (
            "M",
            f"{_text.seconds(estimates['mtbf_s'])} (90 %: {_text.seconds(estimates['mtbf_low_s'])} to {_text.seconds(estimates['mtbf_high_s'])})",
        )
    )
    rows.append(
        (
            "R, C, U",
            f"{_text.seconds(estimates['restart_s'])}, {_text.seconds(estimates['stall_s'])}, {_text.seconds(estimates['upload_s'])}; a step {_text.seconds(estimates['step_s'])}",
        )
    )
    if estimates["memory"] < REGIME_BELOW:
        rows.append(
            (
                "",
                f"failures come at another rate than before: over the whole run M is {_text.seconds(estimates['mtbf_long_run_s'])}",
            )
        )
    audit = status["audit"]
    rows.append(
        (
            "audit",
            f"saving has cost {_text.seconds(audit['saving_s'])}, rework {_text.seconds(audit['rework_s'])}: {audit['advice']}",
        )
    )
    rows.append(("failures", f"{status['failures']}, {status['restarts']} restarts"))
    if last:
        rows.append(
            ("last", f"{last['detail']} ({last['cause']}, {last['severity']}), {last['lost_steps']} steps lost")
        )
    goodput = status["goodput"]
    spent = ", ".join(
        f"{phase.replace('_', ' ')} {_text.seconds(value)}"
        for phase, value in sorted(goodput["seconds_by_phase"].items(), key=lambda item: -item[1])
        if value > 0
    )
    rows.append(("goodput", f"{goodput['ratio']:.1%} of {_text.seconds(goodput['wall_s'])}: {spent}"))
    drilled = status["drill"]
    if drilled:
        age = _text.seconds(max(0.0, time.time() - drilled["at"]))
        came = f"step {drilled['step']} restores" if drilled["ok"] else f"FAILED: {drilled['problem']}"
        rows.append(("drill", f"{came} (tier {drilled['tier']}, {age} ago)"))
    rows += [("left out", f"device {d['index']} of node {d['node']}: {d['why']}") for d in status["devices_left_out"]]
    rows += [(note["level"], note["what"]) for note in status["notes"]]
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _tier(tier: dict[str, Any], *, first: bool) -> str:
    age = "" if tier["newest_at"] is None else f", {_text.seconds(max(0.0, time.time() - tier['newest_at']))} ago"
    newest = "nothing yet" if tier["newest_step"] is None else f"step {tier['newest_step']}{age}"
    often = (
        ""
        if first or tier["every"] is None
        else ", every commit"
        if tier["every"] == 1
        else f", every {tier['every']} commits"
    )
    return f"{tier['name']}: {newest}{often}" + (f"; FAILING: {tier['error']}" if tier["failing"] else "")


@click.command()
@run_argument
@json_option
@click.option("--now", is_flag=True, help="Do not wait for a save.")
@click.option("--wait/--no-wait", default=True, help="Return when the run is over (default), or at once.")
@click.option("--detach", is_flag=True, help="End the daemon alone: training goes on, until `ckptd run` takes it up.")
def stop(run: str | None, as_json: bool, now: bool, wait: bool, detach: bool) -> int:
    """Have RUN save at the next step and stop; its daemon exits with status 75."""
    if now and detach:
        raise UsageError("--detach leaves training alone, and --now ends it: give one of them")
    run_dir = find_run(run)
    over = _before_request(run_dir)["outcome"]
    if over is not None:
        print(json.dumps({"accepted": False, "outcome": over}) if as_json else f"it is over already: {over['detail']}")
        return ExitStatus.FINISHED
    answer = _request(run_dir, "detach" if detach else "stop_now" if now else "stop")
    # Its lock is the last that a daemon gives up: then another one can begin.
    while wait and (_lives(run_dir) or run_dir.lock_holder() is not None):
        time.sleep(0.1)
    document = read_status(run_dir) if wait else None
    if as_json:
        print(json.dumps({"accepted": True, "outcome": document["outcome"] if document else None}))
    else:
        outcome = document["outcome"] if document else None
        asked = "the daemon was asked to leave; the run goes on" if detach else "asked to save and stop"
        print(f"{outcome['outcome']}: {outcome['detail']}" if outcome else answer.get("why") or asked)
    return ExitStatus.FINISHED


@click.command()
@run_argument
@json_option
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for the commit; 0: do not wait.")
def save(run: str | None, as_json: bool, timeout: float) -> int:
    """Have RUN save a checkpoint at the next step, and wait until it is committed."""
    run_dir = find_run(run)
    before = _before_request(run_dir)
    if before["outcome"] is not None:
        raise UsageError(f"there is nothing to save, the run is over: {before['outcome']['detail']}")
    _request(run_dir, "save")
    deadline = time.monotonic() + timeout
    done: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        now = read_status(run_dir)
        if now["saves"]["failed"] > before["saves"]["failed"]:
            raise UsageError(f"the save failed; see `ckptd events {run_dir.path}`")
        if now["saves"]["rejected"] > before["saves"]["rejected"]:
            raise UsageError(f"the guard refused the state; see `ckptd events {run_dir.path}`")
        committed = now["last_committed"]
        # A save that was under way before this one was asked for is of an earlier step, and does not count.
        if now["saves"]["committed"] > before["saves"]["committed"] and committed["step"] >= before["step"]:
            done = committed
            break
        if now["daemon"] is None:
            raise DaemonUnreachable("the daemon ended before the save was committed")
        time.sleep(0.1)
    else:
        if timeout > 0:
            raise DaemonUnreachable(f"no commit within {timeout:.0f} s; the request stands")
    if as_json:
        print(json.dumps({"accepted": True, "committed": done}))
    else:
        print(f"step {done['step']} is committed: {done['path']}" if done else "asked for a save")
    return ExitStatus.FINISHED


@click.command()
@click.argument("device")
@run_argument
@json_option
def drain(device: str, run: str | None, as_json: bool) -> int:
    """Take DEVICE out of use in RUN: an index, node:index, a GPU's UUID, or a node. Training goes on without it."""
    return _drain(find_run(run), "drain", device, as_json=as_json)


@click.command()
@click.argument("device")
@run_argument
@json_option
def undrain(device: str, run: str | None, as_json: bool) -> int:
    """Give DEVICE back to RUN, drained or in quarantine, with a clean record."""
    return _drain(find_run(run), "undrain", device, as_json=as_json)


def _drain(run_dir: RunDir, what: str, device: str, *, as_json: bool) -> int:
    answer = ask_daemon(run_dir.socket_path(), {"what": what, "device": device})
    if answer["type"] != "accepted":
        raise UsageError(f"refused: {answer.get('why')}")
    verb = "drained" if what == "drain" else "back in use"
    print(
        json.dumps({"accepted": True, "devices": answer["devices"]})
        if as_json
        else f"{', '.join(answer['devices'])}: {verb}"
    )
    return ExitStatus.FINISHED


def _before_request(run_dir: RunDir) -> dict[str, Any]:
    """The status of a run that is over or has a daemon. Raises DaemonUnreachable where neither is so."""
    document = read_status(run_dir)
    if document["daemon"] is None and document["outcome"] is None:
        raise DaemonUnreachable(
            f"no daemon supervises {document['name']}, which was {document['state']} when the last one left; "
            f"`ckptd run {run_dir.job_path}` takes it up again, and whatever of it still runs"
        )
    return document


def _request(run_dir: RunDir, what: str) -> dict[str, Any]:
    source = "ckptd stop --detach" if what == "detach" else f"ckptd {what.partition('_')[0]}"
    answer = ask_daemon(run_dir.socket_path(), {"what": what, "source": source})
    if answer["type"] != "accepted":
        raise UsageError(f"refused: {answer.get('why')}")
    return answer


def _lives(run_dir: RunDir) -> bool:
    try:
        ask_daemon(run_dir.socket_path(), {"what": "ping"})
    except DaemonUnreachable:
        return False
    return True
