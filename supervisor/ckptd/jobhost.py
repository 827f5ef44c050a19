"""Has this machine what a job.yaml asks for: an interpreter, a place for checkpoints, devices that a world takes up?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from ckptd.tiers import Crew, open_store
from ckptd.tiers.objects import scheme_of, why_unusable
from ckptd.units import shortened

if TYPE_CHECKING:
    from ckptd.jobspec import JobSpec

_PYTHON_TIMEOUT_S: Final = 20.0
"""An interpreter on a network file system may take its time; no answer is not held against it."""
_STORE_TIMEOUT_S: Final = 60.0
_MISSING_MODULES: Final = (
    "import importlib.util as u; print('python', *(m for m in ('torch', 'ckptd_shim') if u.find_spec(m) is None))"
)


def interpreter_problem(spec: JobSpec) -> str | None:
    """Why `python` cannot run workers; None: it can. It is asked, for an environment without ckptd looks like any other."""
    path = shutil.which(spec.python_path)
    if path is None:
        return f"there is no program {spec.python_path}"
    if path == sys.executable:
        return None
    try:
        asked = subprocess.run(
            [path, "-c", _MISSING_MODULES],
            env={**os.environ, **spec.env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_PYTHON_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    except (OSError, ValueError) as error:
        return f"{path} cannot be started: {error}"
    answer = asked.stdout.split()
    if asked.returncode != 0 or answer[:1] != ["python"]:
        said = (asked.stderr.strip().splitlines() or ["nothing"])[-1]
        return f"{path} is no Python to run workers with: it ended with status {asked.returncode} and said {shortened(said)}"
    missing = ["ckptd" if module == "ckptd_shim" else module for module in answer[1:]]
    if missing:
        return f"{path} cannot import {' or '.join(missing)}, which the workers need; install it there"
    return None


def url_problem(url: str) -> str | None:
    """What is wrong with the `url` of a tier, on this machine; None: nothing that can be told without asking the store."""
    if "://" not in url:
        return f"{shortened(url)} is no url, such as s3://bucket/prefix; a directory is given as `path`"
    rest = url.partition("://")[2]
    if "@" in rest.partition("/")[0]:
        return "a url holds no credentials here: they are taken from the environment, as the store's own tools do"
    if not rest.strip("/") and scheme_of(url) != "memory":
        return f"{shortened(url)} names no bucket and no directory"
    if scheme_of(url) in ("file", "local") and not rest.startswith("/"):
        return f"{shortened(url)} is relative; three slashes begin an absolute one"
    return why_unusable(url)


def place_of(url: str) -> str:
    """What two urls of one place have in common; that of a `file://` is the directory."""
    rest = url.partition("://")[2]
    return os.path.realpath(rest) if scheme_of(url) in ("file", "local") else f"{scheme_of(url)}://{rest.strip('/')}"


def tier_problem(spec: JobSpec, *, fresh: bool) -> str | None:
    """Why checkpoints cannot be written here, or None: said before training, and not at its first save.

    Makes the directories, which the first attempt would do. Object stores are asked only in front of a `fresh` run:
    one that has begun goes on from what it can reach.
    """
    for i, tier in enumerate(spec.checkpoint.tiers):
        if tier.url is not None:
            if fresh and (problem := _store_problem(spec.tier_location(tier))) is not None:
                return f"checkpoint.tiers[{i}].url: {problem}"
            continue
        directory = spec.tier_dir(tier)
        where = f"checkpoint.tiers[{i}].path: checkpoints cannot be written to {directory}"
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            return f"{where}: {error.strerror} ({error.filename})"
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"{where}: this user may not, or its file system is read-only"
    return None


def _store_problem(location: str) -> str | None:
    """Why an object store cannot be listed; that it may be written to shows at the first copy."""
    try:
        Crew().run(location, lambda _pace: open_store(location).names(), stall_s=_STORE_TIMEOUT_S)
    except OSError as error:
        return f"checkpoints cannot be looked for there: {error}"
    return None


def idle_devices(spec: JobSpec) -> str | None:
    """What a person should know of devices that no world takes up; None: all of them are used, or are not known yet."""
    devices = spec.cluster.devices_per_node
    if devices == "auto" or spec.cluster.launcher != "local":
        return None
    wanted = min(devices, spec.cluster.max_devices or devices)
    most = max(allowed_worlds(spec, devices), default=wanted)
    if spec.batch is None or most >= wanted:
        return None
    return (
        f"{wanted - most} of {wanted} devices will be idle: a world of {most} is the largest that divides batch.global, "
        f"{spec.batch.global_batch}"
    )


def allowed_worlds(spec: JobSpec, limit: int) -> list[int]:
    """World sizes up to `limit` devices that the job may train at, smallest first."""
    c = spec.cluster
    most = min(limit, c.max_devices or limit)
    return [
        world
        for world in range(c.multiple_of, most + 1, c.multiple_of)
        if world >= c.min_devices and (spec.batch is None or spec.batch.global_batch % world == 0)
    ]
