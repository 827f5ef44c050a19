"""`ckptd simulate`: what would each way of choosing the interval waste, over many simulated runs?"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import click

from ckptd import failure_times, lineplot
from ckptd import simulate_compare as comparing
from ckptd.cli import _text
from ckptd.cli._ask import json_option
from ckptd.cli._options import Amount, Duration, Zone
from ckptd.core.interval import waste
from ckptd.core.plan import FORMULAS
from ckptd.core.policy import Policy
from ckptd.errors import ExitStatus, UsageError
from ckptd.failure_times import Source
from ckptd.simulate import Job
from ckptd.simulate_compare import Comparison, Score
from ckptd.sitelogs.reading import MAX_BYTES, Options
from ckptd.units import format_duration, parse_duration

_DAY_S = 86_400.0
MOST_FAILURES = 2e6
"""Failures to simulate at most: more is a mistake in a unit, and would take hours."""


@click.command()
@click.option("--failures", type=click.IntRange(min=1), metavar="N", help="So many failures...")
@click.option(
    "--days", type=Amount(), default=54.0, show_default=True, help="...in so many days: how long a run lasts."
)
@click.option("--devices", type=click.IntRange(min=1), default=16_384, show_default=True, help="Devices of the job.")
@click.option("--rate", type=Amount(), metavar="PER_DEVICE_HOUR", help="Failures per hour of each device.")
@click.option("--mtbf", type=Duration(positive=True), help="M itself.")
@click.option(
    "--shape", type=click.FloatRange(0.1, 10), metavar="K", help="Weibull gaps of this shape; below 1: clusters."
)
@click.option(
    "--surge", metavar="F:LENGTH[:CALM]", help="The rate is F times as high for LENGTH: once, or every CALM or so."
)
@click.option(
    "--log", metavar="FILE", help="Replay a log: a CSV of gaps, or a name or a file that `ckptd import` reads."
)
@click.option("--time-zone", type=Zone(), help="Zone of times in the log that do not say theirs.")
@click.option("--jitter", type=Duration(), default="1h", show_default=True, help="How far a log's failures are moved.")
@click.option("--stall", type=Duration(), required=True, help="C, what training pays for a save.")
@click.option("--restart", type=Duration(), default="10m", show_default=True, help="R, failure to first step.")
@click.option("--upload", type=Duration(), default="0s", show_default=True, help="U, start of a save to its commit.")
@click.option("--interval", type=Duration(positive=True), default="1h", show_default=True, help="The fixed interval.")
@click.option("--vendor-mtbf", type=Duration(positive=True), help="Young with this M, whatever happens.")
@click.option("--prior-failures", type=Amount(), default=1.0, show_default=True, help="ckptd's prior, as in job.yaml:")
@click.option("--prior-device-hours", type=Amount(), default=50_000.0, show_default=True, help="so many device-hours.")
@click.option(
    "--formula", type=click.Choice(sorted(FORMULAS)), default="daly", show_default=True, help="ckptd's formula."
)
@click.option("--seeds", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Runs to simulate.")
@click.option(
    "--curve", type=click.Path(dir_okay=False), metavar="FILE", help="Draw waste over the interval: .svg, .html."
)
@json_option
def simulate(**given: Any) -> int:
    """Simulate runs of a job, and compare what each way of choosing the interval wastes.

    ckptd's own policy learns from the simulated events as it does from real ones. All policies meet the same failures;
    regret is waste beyond that of an oracle, which knows M at each moment, or of a log's best fixed interval, found afterwards.
    """
    job = Job(
        devices=given["devices"], stall_s=given["stall"], restart_s=given["restart"], upload_s=given["upload"]
    )  # fmt: skip
    policy = Policy(
        prior_failures=given["prior_failures"],
        prior_device_seconds=given["prior_device_hours"] * 3600.0,
        formula=given["formula"],
        max_interval_s=None,
    )
    source = _source(given)
    begun = time.monotonic()
    seeds: int = given["seeds"]

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {seeds} runs", end="\n" if done == seeds else "", file=sys.stderr, flush=True)

    result = comparing.compare(
        source, job, policy, seeds=seeds, fixed_s=given["interval"], vendor_mtbf_s=given["vendor_mtbf"],
        oracle=given["log"] is None, progress=progress,
    )  # fmt: skip
    if given["curve"] is not None:
        _draw(source, job, result, given["curve"])
    if given["as_json"]:
        print(json.dumps(_document(result, job, policy), indent=1))
    else:
        print(_readable(result, job))
        print(f"{result.days * seeds:.0f} days in {_text.seconds(time.monotonic() - begun)}", file=sys.stderr)
    return ExitStatus.FINISHED


# --- what is asked for ------------------------------------------------------------------------------------------------


def _source(given: dict[str, Any]) -> Source:
    """Where failures come from.

    Raises:
        UsageError: it is said twice, not at all, or cannot be.
    """
    ways = [name for name in ("failures", "rate", "mtbf", "log") if given[name] is not None]
    if len(ways) != 1:
        said = (
            f"{' and '.join(f'--{way}' for way in ways)} say it more than once"
            if ways
            else "nothing says how often the job fails"
        )
        raise UsageError(f"{said}; give one of --failures, --rate, --mtbf and --log")
    if given["log"] is not None:
        if given["shape"] is not None or given["surge"] is not None:
            raise UsageError("--shape and --surge make failures up, and --log replays those that were")
        return _of_log(given)
    horizon_s = given["days"] * _DAY_S
    if given["mtbf"] is not None:
        mtbf_s = given["mtbf"]
    elif given["rate"] is not None:
        mtbf_s = 3600.0 / (given["rate"] * given["devices"])
    else:
        mtbf_s = horizon_s / given["failures"]
    factor = 1.0
    if given["surge"] is not None:
        factor, length_s, calm_s = _surge(given["surge"])
    if not 1.0 <= mtbf_s <= 1e12 or horizon_s / mtbf_s * max(factor, 1.0) * given["seeds"] > MOST_FAILURES:
        raise UsageError(
            f"{given['seeds']} runs of {given['days']:g} days with a failure every {mtbf_s:.3g} s are too much to simulate; "
            "check the units, or ask for fewer --days or --seeds"
        )
    if given["surge"] is None:
        return failure_times.weibull(mtbf_s, given["shape"] or 1.0, horizon_s)
    if given["shape"] is not None:
        raise UsageError("--surge has a rate at each moment, and --shape has none: give one of them")
    return failure_times.surges(mtbf_s, factor, length_s, horizon_s, calm_s=calm_s)


def _surge(text: str) -> tuple[float, float, float | None]:
    parts = text.split(":")
    try:
        if len(parts) not in (2, 3):
            raise ValueError("it has two or three parts")
        factor, spans = float(parts[0]), [parse_duration(part) for part in parts[1:]]
        if not (0 < factor < 1e6 and all(span > 0 for span in spans)):
            raise ValueError("its parts must be above zero")
    except ValueError as error:
        raise UsageError(
            f"--surge {text[:60]}: {error}; write FACTOR:LENGTH or FACTOR:LENGTH:CALM, as in 5:2d"
        ) from None
    return factor, spans[0], spans[1] if len(spans) > 1 else None


def _of_log(given: dict[str, Any]) -> Source:
    path = given["log"]
    if not os.path.exists(path):
        gaps, tail_s = failure_times.gaps_of(_imported(path), given["devices"])
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        options = Options(zone=given["time_zone"], now=time.time(), source=os.path.basename(path))
        gaps, tail_s = failure_times.read_log(data, options, given["devices"])
    return failure_times.replay(gaps, tail_s, jitter_s=given["jitter"])


def _imported(name: str) -> Any:
    from ckptd.history import History

    with History.open(None) as kept:
        return kept.summary(name)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _document(result: Comparison, job: Job, policy: Policy) -> dict[str, Any]:
    return {
        "job": dataclasses.asdict(job),
        "prior": {"failures": policy.prior_failures, "device_hours": policy.prior_device_seconds / 3600},
        "formula": policy.formula,
        "mtbf_s": result.mtbf_s,
        "days": result.days,
        "seeds": result.seeds,
        "failures_per_run": result.failures,
        "reference": result.reference,
        "policies": [dataclasses.asdict(score) for score in result.scores],
    }


def _readable(result: Comparison, job: Job) -> str:
    lines = [
        (
            f"M {_text.seconds(result.mtbf_s)}    C {_text.seconds(job.stall_s)}    R {_text.seconds(job.restart_s)}    "
            f"U {_text.seconds(job.upload_s)}    {job.devices} devices"
        ),
        f"{result.seeds} runs of {result.days:.3g} days, {result.failures:.4g} failures each; ± is half of the 95 % interval",
        "",
        f"{'':12}{'save every':>12}{'waste':>18}{'save':>9}{'rework':>9}{'restart':>9}{'regret':>18}",
    ]
    lines += [_row(score) for score in result.scores]
    lines += ["", f"regret: waste beyond that of {result.reference}, as a share of it"]
    return "\n".join(lines)


def _row(score: Score) -> str:
    every = "as it learns" if score.name == "ckptd" else _text.seconds(score.interval_s)
    total = f"{score.waste:.2%} ± {score.waste_ci:.2%}"
    regret = f"{score.regret:.2%} ± {score.regret_ci:.2%}"
    return f"{score.name:12}{every:>12}{total:>18}{score.save:9.2%}{score.rework:9.2%}{score.restart:9.2%}{regret:>18}"


def _draw(source: Source, job: Job, result: Comparison, path: str) -> None:
    traces = [source(random.Random(seed)) for seed in range(min(result.seeds, 20))]
    simulated = comparing.curve(traces, job)
    ts = [t for t, _ in simulated]
    model = [
        waste(t, stall_s=job.stall_s, mtbf_s=result.mtbf_s, restart_s=job.restart_s, upload_s=job.upload_s).total
        for t in ts
    ]
    curves = [
        lineplot.Curve(name="simulated", x=ts, y=[w for _, w in simulated]),
        lineplot.Curve(name="model", x=ts, y=model, dashed=True),
    ]
    curves += [
        lineplot.Curve(name=score.name, x=[ts[0], ts[-1]], y=[score.waste, score.waste], dashed=True)
        for score in result.scores
        if score.interval_s is None
    ]
    marks = [
        lineplot.Mark(name=f"{score.name} {format_duration(score.interval_s)}", x=score.interval_s)
        for score in result.scores
        if score.interval_s is not None and ts[0] <= score.interval_s <= ts[-1]
    ]
    picture = lineplot.svg(
        curves, marks, title=f"{result.seeds} runs of {result.days:.3g} days, M {_text.seconds(result.mtbf_s)}",
        x_label="time between saves", y_label="waste", log_x=True, y_max=3 * min(w for _, w in simulated),
        x_tick=format_duration, y_tick="{:.0%}".format,
    )  # fmt: skip
    if path.endswith((".html", ".htm")):
        picture = (
            f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>ckptd simulate</title>\n{picture}\n</html>\n"
        )
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--curve {path} cannot be written: {error.strerror}") from None
