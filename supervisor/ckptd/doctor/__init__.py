"""What will go wrong tonight? A machine, and the job that is to run on it, are looked at before the night.

Each check gives one or more findings; none raises. Nothing is changed, but for a file that is written to each tier and
removed, and a forkserver that is started and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptd.doctor import findings, job, machine
from ckptd.doctor.findings import Finding
from ckptd.jobspec import JobSpec
from ckptd.rundir import RunDir

__all__ = ["Finding", "examine"]


def examine(spec: JobSpec | None) -> Iterator[Finding]:
    """All findings, one by one as they are made; None: only of the machine."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("clock", machine.clock), ("shared memory", machine.shared_memory), ("limits", machine.limits), ("memory", machine.overcommit),
        ("kernel log", machine.kernel_log), ("network", machine.host_name),
    ]  # fmt: skip
    if spec is not None:
        held = RunDir(spec.run_dir_path).lock_holder() is not None
        size = job.checkpoint_size(spec)
        checks += [
            ("python", lambda: job.python(spec)),
            ("devices", lambda: job.devices(spec)),
            ("run directory", lambda: job.run_directory(spec)),
            ("port", lambda: job.port(spec, held=held)),
            *((f"tier {tier.name}", lambda tier=tier: job.tier(spec, tier, size)) for tier in spec.checkpoint.tiers),
            ("memory", lambda: job.memory(size, held=held)),
            ("preload", lambda: job.preload(spec)),
        ]
    else:
        checks.insert(0, ("python", job.this_python))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that cannot be made says so, and the others are made
            yield findings.warn(name, f"cannot be looked at: {type(error).__name__}: {error}", "look at it by hand")
