"""How numbers and events read in a terminal."""

from __future__ import annotations

import os
import re
import time
from typing import Any, TextIO

from ckptd.core import events

REPEATED_COPY_FAILURE = 10
"""Of the failures of one tier in a row, the first is shown, and then each so-many-th."""


def seconds(value: float | None) -> str:
    """A duration with two or three digits: `85 ms`, `4.1 s`, `12 min`, `3.2 h`, `5.1 d`; `-` for None."""
    if value is None:
        return "-"
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0)):
        if value < limit:
            return f"{value / size:.3g} {unit}"
    return f"{value / 86_400:.3g} d"


_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """What a job says, fit for a terminal: codes that colour it are left out, and what else would steer it is escaped."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _TERMINAL_CODES.sub("", text))


def coloured(stream: TextIO) -> bool:
    """Whether to colour what goes there: to a terminal, unless NO_COLOR (no-color.org) is set to anything."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def clock(at: float) -> str:
    """Wall clock of an event, local time."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def status_line(status: dict[str, Any]) -> str:
    """The one line that shows a run live."""
    estimates, interval, committed = status["estimates"], status["interval"], status["last_committed"]
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    steps = f" ({interval['steps']} steps)" if interval["steps"] else ""
    every = (
        seconds(interval["seconds"]) + steps
        if interval["seconds"]
        else (f"{interval['steps']} steps" if interval["steps"] else "-")
    )
    return " | ".join(
        (
            f"{status['state']}",
            f"step {status['step']}",
            f"loss {loss}",
            f"{status['world_size']} workers",
            f"M {seconds(estimates['mtbf_s'])}",
            f"R {seconds(estimates['restart_s'])}",
            f"C {seconds(estimates['stall_s'])}",
            f"save every {every}",
            f"goodput {status['goodput']['ratio']:.0%}",
            f"committed {committed['step'] if committed else '-'}",
        )
    )


def event_line(event: events.Event) -> str | None:
    """What a person should read when this happens; None: nothing."""
    match event:
        case events.AttemptLaunched():
            origin = (
                f"from step {event.resume['step']} ({event.resume['tier']})" if event.resume else "from the beginning"
            )
            fewer = f" of {event.devices_wanted} wanted" if event.devices_wanted > event.world_size else ""
            return f"attempt {event.attempt}: launching {event.world_size}{fewer} workers {origin}"
        case events.FailureDetected():
            return f"failure: {event.detail} (step {event.step})"
        case events.Drilled():
            if event.ok:
                return f"drill: step {event.step} on tier {event.tier} restores, loss {event.loss:.4g}"
            return f"drill of tier {event.tier} FAILED: {event.problem}"
        case events.Interrupted():
            kind = "planned" if event.planned else f"{event.cause}, severity {event.severity}"
            lost = (
                f"; {event.lost_steps} steps ({seconds(event.lost_seconds)}) to be trained again"
                if event.lost_steps
                else ""
            )
            return f"interruption: {event.detail} [{kind}]{lost}"
        case events.Restarted():
            parts = ", ".join(
                f"{name} {seconds(value)}"
                for name, value in (
                    ("detect", event.detect_s),
                    ("stop", event.stop_s),
                    ("wait", event.wait_s),
                    ("launch", event.launch_s),
                    ("init", event.init_s),
                    ("restore", event.restore_s),
                    ("first step", event.first_step_s),
                )
            )
            return f"training again after {seconds(event.total_s)} ({parts})"
        case events.SaveFailed():
            return f"SAVE FAILED at step {event.step} on tier {event.tier}: {event.error}; training goes on, older commits are kept"
        case events.SaveRejected():
            whose = "" if event.rank is None else f" (rank {event.rank})"
            return f"SAVE REJECTED at step {event.step}: {event.why}{whose}; the state is not committed, older commits are kept"
        case events.CheckpointPinned():
            label = f" ({event.label})" if event.label else ""
            return f"step {event.step}{label} is {'pinned' if event.pinned else 'not pinned any more'}: {event.path}"
        case events.RolledBack():
            skips = "" if event.skip_to is None else f"; data up to sample {event.skip_to} is passed over"
            why = f": {event.why}" if event.why else ""
            return f"ROLLED BACK to step {event.to_step} by {event.source}{why}; later commits are suspect{skips}"
        case events.CopyFailed() if event.attempts == 1 or event.attempts % REPEATED_COPY_FAILURE == 0:
            again = f"tried {event.attempts} times, again in" if event.attempts > 1 else "tried again in"
            return f"COPY FAILED of step {event.step} to tier {event.tier}: {event.error}; {again} {seconds(event.retry_s)}"
        case events.CopyFailed():
            return None
        case events.IntervalDecided():
            return (
                f"interval: {seconds(event.interval_s)} - {event.reason}"
                if event.interval_s
                else f"interval: {event.reason}"
            )
        case events.HealthReported() if event.unhealthy:
            return f"node {event.node}: unhealthy devices {event.unhealthy} {event.detail}".rstrip()
        case events.HealthReported() if event.detail:
            return f"node {event.node}: {event.detail}; all its devices are taken to be healthy"
        case events.AttemptEnded() if event.leftovers or event.unkillable:
            named = ", ".join(f"{p['name']} ({p['pid']})" for p in event.leftovers)
            stuck = ", ".join(f"{p['name']} ({p['pid']})" for p in event.unkillable)
            left = (
                f"attempt {event.attempt}: {len(event.leftovers)} left-over processes were ended: {named}"
                if named
                else ""
            )
            return left + (f" CANNOT BE KILLED: {stuck}" if stuck else "")
        case events.AgentLost():
            return f"the agent of node {event.node} is gone: {event.why}"
        case events.NodeLost():
            return f"node {event.node} is lost: {event.why}"
        case events.SharingFound():
            kinds = {True: "all nodes see the same files", False: "each node has its own files"}
            return "; ".join(f"tier {tier}: {kinds[shared]}" for tier, shared in event.shared.items())
        case events.DeviceDrained():
            what = event.device if event.device.startswith("node ") else f"device {event.device}"
            return f"{what} is {'drained' if event.drained else 'back in use'}"
        case events.Requested():
            reason = f": {event.reason}" if event.reason else ""
            return f"request: {event.request} ({event.source}){reason}"
        case events.Noted():
            return f"{event.level}: {event.what}"
        case events.RunEnded():
            return f"{event.outcome}: {event.detail}"
        case _:
            return None


def summary(status: dict[str, Any]) -> str:
    """Where the time went, for the end of a run."""
    goodput = status["goodput"]
    wall = goodput["wall_s"]
    lines = [f"{status['name']}: {status['step']} steps in {seconds(wall)}, goodput {goodput['ratio']:.1%}"]
    for phase, spent in sorted(goodput["seconds_by_phase"].items(), key=lambda item: -item[1]):
        if spent > 0:
            share = spent / wall if wall else 0.0
            lines.append(f"  {phase.replace('_', ' '):18} {seconds(spent):>8}  {share:6.1%}  {'#' * round(40 * share)}")
    lines.append(
        f"  {status['failures']} failures, {status['restarts']} restarts, {status['saves']['committed']} checkpoints committed"
        + (f", {status['saves']['failed']} saves failed" if status["saves"]["failed"] else "")
        + (f", {status['saves']['rejected']} rejected" if status["saves"]["rejected"] else "")
    )
    return "\n".join(lines)
