"""`ckptd validate`: is this job.yaml right, and what does it ask for?"""

from __future__ import annotations

import json

import click

from ckptd import jobhost, jobprior, jobspec, space
from ckptd.errors import ExitStatus, JobSpecError
from ckptd.jobscalars import Steps
from ckptd.units import format_duration


@click.command()
@click.argument("path", default="job.yaml", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help='Print {"ok": ..., "problems": [...]} instead.')
def validate(path: str, as_json: bool) -> int:
    """Check PATH (default: job.yaml) and start nothing. Exit status 78 when it is wrong."""
    try:
        spec = jobspec.load(path)
        told = jobprior.resolve(spec)
    except JobSpecError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "problems": error.problems}))
        return ExitStatus.CONFIG
    if as_json:
        print(json.dumps({"ok": True, "problems": []}))
        return ExitStatus.FINISHED
    print(f"{path}: ok")
    for label, text in _summary(spec, told):
        print(f"  {label:<12} {text}")
    return ExitStatus.FINISHED


def _summary(spec: jobspec.JobSpec, prior: str | None) -> list[tuple[str, str]]:
    cluster, interval = spec.cluster, spec.checkpoint.interval
    most = "all healthy" if cluster.max_devices is None else str(cluster.max_devices)
    multiple = f", in multiples of {cluster.multiple_of}" if cluster.multiple_of > 1 else ""
    per_node = cluster.devices_per_node
    found = "the GPUs found" if per_node == "auto" else f"{per_node} on this machine"
    if isinstance(interval, Steps):
        save = f"every {interval.steps} steps"
    elif isinstance(interval, float):
        save = f"every {format_duration(interval)}"
    else:
        longest = spec.checkpoint.max_interval
        bound = "" if longest is None else f", at most {format_duration(longest)}"
        save = f"derived from measured costs ({spec.checkpoint.formula}){bound}"
    lines = [
        ("run", spec.name),
        ("run dir", str(spec.run_dir_path)),
        ("command", " ".join(spec.command)),
        ("workdir", str(spec.workdir_path)),
        ("devices", f"{cluster.min_devices} to {most}{multiple}; {found}"),
        ("save", save),
    ]
    if spec.batch:
        lines.append(
            ("batch", f"{spec.batch.global_batch} in all, at most {spec.batch.micro_batch} on a device at once")
        )
    lines += [
        ("checkpoints", f"{spec.tier_location(tier)} (tier {tier.name}, keep {tier.keep_last})")
        for tier in spec.checkpoint.tiers
    ]
    if prior is not None:
        lines.append(("prior", prior))
    lines.append(("web", spec.web.listen or "none"))
    idle = jobhost.idle_devices(spec)
    lines += [("warning", text) for text in (idle, *space.notes(spec)) if text is not None]
    return lines
