"""`ckptd plan`: how often should a job save that is not there yet?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ckptd import lineplot
from ckptd.cli import _text
from ckptd.cli._ask import json_option
from ckptd.cli._options import Amount, Duration
from ckptd.core import plan as planning
from ckptd.errors import ExitStatus, UsageError
from ckptd.units import format_duration

_DAY_S = 86_400.0


@click.command()
@click.option("--failures", type=click.IntRange(min=0), metavar="N", help="So many failures...")
@click.option("--days", type=Amount(), help="...in so many days.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Devices of the job.")
@click.option("--rate", type=Amount(), metavar="PER_DEVICE_HOUR", help="Failures per hour of each device.")
@click.option("--mtbf", type=Duration(positive=True), help="M itself.")
@click.option("--log", metavar="NAME", help="Rate of a log that `ckptd import` has read; on --devices, or on its own.")
@click.option("--history", type=click.Path(dir_okay=False), metavar="FILE", help="Where that log is kept.")
@click.option("--stall", type=Duration(positive=True), required=True, help="C, what training pays for a save.")
@click.option(
    "--restart", type=Duration(), default="0s", show_default=True, help="R, from a failure to the first step after it."
)
@click.option(
    "--upload", type=Duration(), default="0s", show_default=True, help="U, from the start of a save to its commit."
)
@click.option("--interval", type=Duration(positive=True), default="1h", show_default=True, help="To compare with.")
@click.option("--curve", type=click.Path(dir_okay=False), metavar="FILE", help="Draw waste over the interval as SVG.")
@json_option
def plan(  # noqa: PLR0917  click passes by name
    failures: int | None,
    days: float | None,
    devices: float | None,
    rate: float | None,
    mtbf: float | None,
    log: str | None,
    history: str | None,
    stall: float,
    restart: float,
    upload: float,
    interval: float,
    curve: str | None,
    as_json: bool,
) -> int:
    """Work out how often to save, by three formulas, and what that costs.

    M comes from --failures and --days, from --devices and --rate, from --log, or is given by --mtbf. Durations are 30s, 10m, 2h or
    a number of seconds.
    """
    if log is not None:
        if any(given is not None for given in (failures, days, rate, mtbf)):
            raise UsageError("--log says how often devices fail; leave --failures, --days, --rate and --mtbf out")
        m, devices = _logged(log, history, devices)
    else:
        m = _mtbf(failures, days, devices, rate, mtbf)
    result = planning.plan(m, stall_s=stall, restart_s=restart, upload_s=upload, fixed_s=interval)
    per_device_hour = rate if rate is not None else None if devices is None else 3600.0 / (m.seconds * devices)
    if curve is not None:
        _draw(result, curve)
    if as_json:
        print(json.dumps(_document(result, devices, per_device_hour), indent=1))
    else:
        print(_readable(result, devices, per_device_hour))
        if result.best.waste.total >= 1:
            print("ckptd: such a job gets nowhere: more is lost than there is", file=sys.stderr)
    return ExitStatus.FINISHED


def _mtbf(
    failures: int | None, days: float | None, devices: float | None, rate: float | None, mtbf: float | None
) -> planning.Mtbf:
    ways = [
        name
        for name, given in (
            ("--failures and --days", failures is not None or days is not None),
            ("--rate", rate is not None),
            ("--mtbf", mtbf is not None),
        )
        if given
    ]
    if len(ways) != 1:
        said = f"{' and '.join(ways)} say it more than once" if ways else "nothing says how often the job fails"
        raise UsageError(f"{said}; give --failures and --days, or --devices and --rate, or --mtbf, or --log")
    if mtbf is not None:
        return planning.Mtbf(seconds=mtbf)
    if rate is not None:
        if devices is None:
            raise UsageError("--rate is per device-hour: say with --devices how many there are")
        return planning.Mtbf(seconds=_within(3600.0 / (rate * devices)))
    if failures is None or days is None:
        raise UsageError("--failures and --days need each other: M is the days over the failures")
    if failures == 0:
        raise UsageError(f"no failure in {days:g} days gives no M, only a bound; give what you believe with --mtbf")
    return planning.counted_mtbf(failures, _within(days * _DAY_S))


def _logged(log: str, history: str | None, devices: float | None) -> tuple[planning.Mtbf, float]:
    from ckptd.history import read_summary

    summary = read_summary(history, log)
    devices = devices if devices is not None else summary.devices
    found = summary.mtbf(devices) if devices else None
    if found is None or devices is None:
        raise UsageError(
            f"the log {log!r} gives no M: it has {summary.counted} failures, and needs one and an exposure"
        )
    return planning.Mtbf(seconds=_within(found[0]), low_s=found[1], high_s=found[2]), devices


def _within(seconds: float) -> float:
    if not 1e-3 <= seconds <= 1e12:
        raise UsageError(f"{seconds:.3g} seconds are no time between failures; check the units of what was given")
    return seconds


def _document(result: planning.Plan, devices: float | None, per_device_hour: float | None) -> dict[str, Any]:
    return {
        "mtbf_s": result.mtbf.seconds,
        "mtbf_low_s": result.mtbf.low_s,
        "mtbf_high_s": result.mtbf.high_s,
        "devices": devices,
        "rate_per_device_hour": per_device_hour,
        "stall_s": result.stall_s,
        "restart_s": result.restart_s,
        "upload_s": result.upload_s,
        "best": result.best.name,
        "intervals": [_offer(offer) for offer in (*result.offers, result.fixed)],
    }


def _offer(offer: planning.Offer) -> dict[str, Any]:
    return {
        "formula": offer.name,
        "formula_s": offer.formula_s,
        "interval_s": offer.interval_s,
        "clamped_by": offer.clamped_by,
        "waste": {
            "save": offer.waste.save,
            "rework": offer.waste.rework,
            "restart": offer.waste.restart,
            "total": offer.waste.total,
        },
    }


def _readable(result: planning.Plan, devices: float | None, per_device_hour: float | None) -> str:
    m = result.mtbf
    between = (
        "" if m.low_s is None or m.high_s is None else f" (90 %: {_text.seconds(m.low_s)} to {_text.seconds(m.high_s)})"
    )
    lines = [f"M  {_text.seconds(m.seconds)}{between}"]
    if devices is not None and per_device_hour is not None:
        lines[0] += f" on {devices:.6g} devices, {per_device_hour:.3g} failures per device-hour"
    lines += [
        f"C  {_text.seconds(result.stall_s)}    R  {_text.seconds(result.restart_s)}    U  {_text.seconds(result.upload_s)}",
        "",
        f"{'':8}{'save every':>12}{'waste':>9}{'save':>9}{'rework':>9}{'restart':>9}",
    ]
    notes = []
    for offer in (*result.offers, result.fixed):
        w = offer.waste
        shares = "".join(f"{share:9.2%}" for share in (w.total, w.save, w.rework, w.restart))
        lines.append(f"{offer.name:8}{_interval(offer.interval_s):>12}{shares}")
        if offer.clamped_by:
            notes.append(
                f"{offer.name}: {_interval(offer.formula_s)} by the formula; no save begins before the last one's upload ends"
            )
    best, fixed = result.best, result.fixed
    saved = fixed.waste.total - best.waste.total
    lines += ["", *notes]
    lines.append(
        f"{best.name} wastes {saved * 100:.2f} points of wall-clock less than saving every {format_duration(fixed.interval_s)}"
        if saved > 0
        else f"saving every {format_duration(fixed.interval_s)} is as good as any"
    )
    return "\n".join(lines)


def _interval(seconds: float) -> str:
    """Four digits, as an interval is compared to published ones."""
    if seconds < 100:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if seconds < 100 * 60 else f"{seconds / 3600:.4g} h"


def _draw(result: planning.Plan, path: str) -> None:
    points = planning.curve(result)
    ts = [t for t, _ in points]
    curves = [
        lineplot.Curve(name="waste", x=ts, y=[w.total for _, w in points]),
        lineplot.Curve(name="save", x=ts, y=[w.save for _, w in points], dashed=True),
        lineplot.Curve(name="rework", x=ts, y=[w.rework for _, w in points], dashed=True),
        lineplot.Curve(name="restart", x=ts, y=[w.restart for _, w in points], dashed=True),
    ]
    marks = [
        lineplot.Mark(name=f"{offer.name} {format_duration(offer.interval_s)}", x=offer.interval_s)
        for offer in (*result.offers, result.fixed)
    ]
    picture = lineplot.svg(
        curves,
        marks,
        title=f"M {_text.seconds(result.mtbf.seconds)}, C {_text.seconds(result.stall_s)}, "
        f"R {_text.seconds(result.restart_s)}, U {_text.seconds(result.upload_s)}",
        x_label="time between saves",
        y_label="waste",
        log_x=True,
        y_max=3 * result.best.waste.total,
        x_tick=format_duration,
        y_tick="{:.0%}".format,
    )
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--curve {path} cannot be written: {error.strerror}") from None
