"""What does job.yaml ask for? The file as typed, frozen models, or every error in it at once.

A problem is one line: `job.yaml:12: checkpoint.intervall: unknown key; did you mean 'interval'?`. The models below say
what each key means; `jobcheck` says which keys contradict each other or the machine. Relative paths are relative to
the directory of job.yaml, the script's to `workdir`. `~` stands for the home directory; nothing else is expanded.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr

from ckptd import rundir
from ckptd.core.policy import Formula, OnReject, Policy
from ckptd.core.sitelog import MAX_FAILURES
from ckptd.core.sitelog import Prior as GammaPrior
from ckptd.errors import JobSpecError
from ckptd.jobscalars import (
    Bool,
    Count,
    Duration,
    Host,
    Name,
    PathText,
    Positive,
    Steps,
    Text,
    check_keep_last,
    optional,
    read_auto_or_count,
    read_host,
    read_interval,
    read_listen,
    read_number,
    read_size,
    read_steps_or_duration,
    read_text,
    read_whole_number,
)  # fmt: skip
from ckptd.units import shortened


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


NODE_IN_PATH: Final = "{node}"
"""In a tier's path: the name of the node."""


LOCAL_NODE: Final = "local"
"""Name of the one node that the local launcher has."""


def node_in_path(node: str) -> str:
    """A node's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node)


# --- the sections of job.yaml -----------------------------------------------------------------------------------------


class Cluster(_Model):
    """Where the job runs and on how many devices."""

    launcher: Annotated[Literal["local", "ssh", "slurm"], BeforeValidator(read_text)] = "local"
    """How a node agent is started."""
    hosts: list[Annotated[Host, PlainValidator(read_host)]] = []
    """The machines that the ssh launcher starts agents on, in the order in which they take ranks. Slurm names its own."""
    listen: Annotated[str, BeforeValidator(read_listen)] | None = None
    """`host:port` that agents on other machines dial; null: an address that reaches them, on a free port."""
    heartbeat_timeout: Positive = 30.0
    """A node that has said nothing for so long is lost. Seconds. Not for the local launcher."""
    fence_timeout: Positive = 20.0
    """An agent that has not reached the daemon for so long ends a lone attempt. Seconds. Not for the local launcher."""
    devices_per_node: Annotated[Literal["auto"] | int, PlainValidator(read_auto_or_count)] = "auto"
    """`auto`: the GPUs found; a number where there are none (CPU slots)."""
    min_devices: Count = 1
    """Train on no fewer."""
    max_devices: Count | None = None
    """Train on no more; null: on all that are healthy."""
    multiple_of: Count = 1
    """The model-parallel size: a world is a multiple of it."""
    spares: Annotated[int, BeforeValidator(read_whole_number), Field(ge=0, le=10**9)] = 0
    """Nodes kept idle to step in for a broken one."""
    wait_for_devices: Duration = 3600.0
    """How long to wait for `min_devices` healthy devices before giving up (exit status 69). Seconds."""
    orphan_timeout: Duration = 3600.0
    """How long agents go on without a daemon. Seconds."""


class Batch(_Model):
    """The global batch, which stays the same whatever the world size."""

    global_batch: Count = Field(alias="global")
    """Samples per optimizer step, over all ranks."""
    micro_batch: Count = Field(alias="micro")
    """The most samples that fit a device at once."""


class Tier(_Model):
    """A place that holds committed checkpoints."""

    name: Name
    """Its name in the ledger, in metrics and in `ckptd checkpoints`."""
    path: PathText | None = None
    """A directory; the run's checkpoints go to `<path>/<run name>`. `{node}` in it stands for the name of the node."""
    url: Text | None = None
    """An object store, such as `s3://bucket/prefix`; the run's checkpoints go to `<url>/<run name>`."""
    keep_last: Annotated[int, BeforeValidator(read_whole_number), AfterValidator(check_keep_last)] = 3
    """How many of the newest checkpoints stay."""
    keep_every: Annotated[Steps | float | None, PlainValidator(optional(read_steps_or_duration))] = None
    """Besides, keep one checkpoint every so many steps or every such duration (seconds)."""
    promote: Annotated[Literal["auto"] | int | None, PlainValidator(optional(read_auto_or_count))] = None
    """Every how many-th checkpoint of the tier before goes here; `auto` and null: from the failure rates."""
    shared: Bool | None = None
    """Do all nodes see the same files there? null: find out."""


class Checkpoint(_Model):
    """When to save, and where to."""

    interval: Annotated[Literal["auto"] | float | Steps, PlainValidator(read_interval)] = "auto"
    """`auto`: derived from the measured costs; a duration (seconds) or `{steps: N}`: fixed."""
    min_interval: Positive | None = None
    """`auto` never goes below. Seconds."""
    max_interval: Positive | None = 7200.0
    """`auto` never goes above. Seconds."""
    formula: Annotated[Formula, BeforeValidator(read_text)] = "daly"
    """Which optimum `auto` computes."""
    mirror_rate: Annotated[int, BeforeValidator(read_size), Field(ge=1 << 20)] | None = None
    """Each node copies the other's files at no more bytes a second; null: as fast as it goes, at the lowest priority."""
    tiers: list[Tier] = []
    """Fastest first; one is needed."""


class Restart(_Model):
    """How a failure is recovered from, and when to stop trying."""

    warm: Bool = True
    """Fork workers from a process that has imported torch already."""
    preload: list[Text] = []
    """More modules for that process to import."""
    stop_grace: Duration = 3.0
    """From SIGTERM to SIGKILL once a planned stop has saved. Seconds."""
    max_without_progress: Count = 3
    """Give up after so many attempts in a row that committed nothing new."""
    max_restarts: Annotated[int, BeforeValidator(read_whole_number), Field(ge=0, le=10**9)] | None = None
    """Give up after so many restarts in all; null: never."""
    grow: Annotated[Literal["at_checkpoint", "never"], BeforeValidator(read_text)] = "at_checkpoint"
    """When to take up devices that came back."""


class Hang(_Model):
    """When training that does not move counts as hung."""

    enabled: Bool = True
    """False: never."""
    factor: Annotated[float, BeforeValidator(read_number), Field(gt=1, allow_inf_nan=False)] = 10.0
    """Times the usual step time."""
    floor: Positive = 30.0
    """And at least so long. Seconds."""
    startup: Positive = 900.0
    """Before the first step of an attempt. Seconds."""


class Guard(_Model):
    """Which state is fit to be committed."""

    finite: Bool = True
    """Refuse NaN and infinity in the loss, the parameters and the optimizer's state."""
    loss_spike: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] | None = None
    """Refuse when the loss is so many robust standard deviations above its recent median; null: do not look."""
    param_norm: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] | None = None
    """Refuse when the norm of the parameters is larger; null: do not look."""
    param_norm_spike: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] | None = None
    """Refuse when that norm is so many robust standard deviations away from the recent commits'; null: do not look."""
    on_reject: Annotated[OnReject, BeforeValidator(read_text)] = "skip"
    """`skip`: do not commit, go on training; `rollback`: go back to the newest commit; `stop`: end the run."""
    rollback_after: Count = 3
    """Roll back after so many rejections in a row."""
    skip_data: Bool = False
    """After a roll-back go on behind the data that led to the rejection."""


class Health(_Model):
    """How broken devices are found."""

    interval: Positive = 30.0
    """How often `command` is asked while training runs. Seconds."""
    command: list[Text] | None = None
    """Prints the indices of unhealthy devices, one a line; null: every device that is found is healthy."""


class Drill(_Model):
    """When checkpoints are restored for trial."""

    every: Positive | None = None
    """How often, while training runs; null: only by `ckptd drill`. Seconds."""
    tier: Name | None = None
    """The tier whose newest checkpoint is tried; null: the slowest."""
    tolerance: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] = 0.1
    """How much worse the restored state's validation loss may be than the one that was saved, as a share of it."""


class Logs(_Model):
    """How much of what workers print is kept."""

    max_size: Annotated[int, BeforeValidator(read_size), Field(ge=64 << 10)] | None = 100 << 20
    """A log that grows beyond is moved aside; null: never. Bytes, of each log of each rank."""
    keep: Count = 2
    """How many older pieces of a log stay."""
    keep_attempts: Count | None = 50
    """How many of the newest attempts keep their directory with logs; null: all."""


class Prior(_Model):
    """What is believed about failures before any was seen: a Gamma prior on the rate per device."""

    failures: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] = 1.0
    """So many failures."""
    device_hours: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] = 50_000.0
    """In so many device-hours."""
    log: Name | None = None
    """Name of an imported log to take the two from instead; null: they are as they stand."""
    max_failures: Annotated[float, BeforeValidator(read_number), Field(gt=0, allow_inf_nan=False)] = MAX_FAILURES
    """The log weighs no more than so many failures: with more of its own the run goes by those."""


class Web(_Model):
    """Metrics, the page and its JSON."""

    listen: Annotated[str, BeforeValidator(read_listen)] | None = "127.0.0.1:9775"
    """`host:port`; port 0: any free one; null: no web at all."""


class JobSpec(_Model):
    """One training job, as job.yaml describes it. Durations are in seconds."""

    version: Annotated[Literal[1], BeforeValidator(read_whole_number)] = 1
    """Version of this file's format."""
    name: Name
    """The run's name."""
    command: list[Text] = Field(min_length=1)
    """The training script and its arguments, or `-m`, a module, and its arguments."""
    workdir: PathText = "."
    """Directory that the workers run in."""
    python: PathText | None = None
    """Interpreter of the workers; null: the one that runs ckptd."""
    env: dict[str, Text] = {}
    """Environment of the workers, on top of the daemon's. Values are taken as they stand."""
    run_dir: PathText | None = None
    """Where ledger, logs and socket live; null: `$XDG_STATE_HOME/ckptd/runs/<name>`. A local disk is best."""
    cluster: Cluster = Cluster()
    """Where the job runs and on how many devices."""
    batch: Batch | None = None
    """The global batch; without it any world size is allowed and the script sees to its batches itself."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save, and where to."""
    restart: Restart = Restart()
    """How a failure is recovered from."""
    hang: Hang = Hang()
    """When training that does not move counts as hung."""
    guard: Guard = Guard()
    """Which state is fit to be committed."""
    health: Health = Health()
    """How broken devices are found."""
    drill: Drill = Drill()
    """When checkpoints are restored for trial."""
    logs: Logs = Logs()
    """How much of what workers print is kept."""
    prior: Prior = Prior()
    """What is believed about failures at the start."""
    web: Web = Web()
    """Metrics and page."""

    _source: str | None = PrivateAttr(default=None)
    _text: bytes = PrivateAttr(default=b"")
    _prior: GammaPrior | None = PrivateAttr(default=None)

    @property
    def source(self) -> str | None:
        """Absolute path of the job.yaml that was written by hand; None for a spec that was built in Python."""
        return self._source

    @property
    def base_path(self) -> Path:
        """Directory that relative paths are relative to."""
        return Path(self._source).parent if self._source else Path.cwd()

    def resolve(self, path: str) -> Path:
        """Absolute form of a path that stands in job.yaml, `~` expanded, links left alone."""
        return Path(os.path.normpath(self.base_path / os.path.expanduser(path)))

    @property
    def workdir_path(self) -> Path:
        """Absolute path of the workers' directory."""
        return self.resolve(self.workdir)

    @property
    def run_dir_path(self) -> Path:
        """Absolute path of the run directory."""
        return self.resolve(self.run_dir) if self.run_dir else rundir.runs_root() / self.name

    @property
    def python_path(self) -> str:
        """The workers' interpreter: a path, or a name to be found on PATH."""
        if self.python is None:
            return sys.executable
        return str(self.resolve(self.python)) if "/" in self.python else self.python

    @property
    def script_path(self) -> Path | None:
        """Absolute path of the training script; None for `-m`."""
        return None if self.command[0] == "-m" else self.workdir_path / os.path.expanduser(self.command[0])

    def tier_dir(self, tier: Tier, node: str | None = None) -> Path:
        """`<tier>/<run name>`: where this run's checkpoints lie on a tier that has a path, on that node."""
        assert tier.path is not None, f"tier {tier.name} has no path"
        hosts = [host.host for host in self.cluster.hosts] or [LOCAL_NODE]
        if node is None and len(hosts) == 1:
            node = hosts[0]
        path = tier.path if node is None else tier.path.replace(NODE_IN_PATH, node_in_path(node))
        return self.resolve(path) / self.name

    def sharing(self, tier: Tier) -> bool | None:
        """Whether all nodes see the same files on a tier; None: that is to be found out."""
        if tier.url is not None or self.cluster.launcher == "local" or len(self.cluster.hosts) < 2:
            return True
        return False if NODE_IN_PATH in (tier.path or "") else tier.shared

    @property
    def text(self) -> bytes:
        """The file as it was read."""
        return self._text

    def believe(self, prior: GammaPrior) -> None:
        """Take the prior from here: `prior.log` says which log it is in, and not what that says."""
        self._prior = prior

    def tier_location(self, tier: Tier, node: str | None = None) -> str:
        """`<tier>/<run name>`: a directory, on that node, or a URL."""
        return str(self.tier_dir(tier, node)) if tier.url is None else f"{tier.url.rstrip('/')}/{self.name}"

    def policy(self, run_id: str) -> Policy:
        """What the core needs to decide. Without `jobprior.resolve`, `prior.log` is passed over: drills save when told to."""
        prior = self._prior or GammaPrior(failures=self.prior.failures, device_seconds=self.prior.device_hours * 3600.0)
        interval = self.checkpoint.interval
        return Policy(
            run_id=run_id,
            name=self.name,
            min_devices=self.cluster.min_devices,
            max_devices=self.cluster.max_devices,
            multiple_of=self.cluster.multiple_of,
            global_batch=self.batch.global_batch if self.batch else None,
            micro_batch=self.batch.micro_batch if self.batch else None,
            wait_for_devices_s=self.cluster.wait_for_devices,
            nodes=tuple(host.host for host in self.cluster.hosts),
            spares=self.cluster.spares,
            orphan_timeout_s=self.cluster.orphan_timeout,
            interval_s=interval if isinstance(interval, float) else None,
            interval_steps=interval.steps if isinstance(interval, Steps) else None,
            min_interval_s=self.checkpoint.min_interval,
            max_interval_s=self.checkpoint.max_interval,
            formula=self.checkpoint.formula,
            tiers=[
                {"name": tier.name, "promote": tier.promote, "shared": self.sharing(tier)}
                for tier in self.checkpoint.tiers
            ],
            max_without_progress=self.restart.max_without_progress,
            max_restarts=self.restart.max_restarts,
            grow_at_checkpoint=self.restart.grow == "at_checkpoint",
            warm=self.restart.warm,
            on_reject=self.guard.on_reject,
            rollback_after=self.guard.rollback_after,
            skip_data=self.guard.skip_data,
            drill_every_s=self.drill.every,
            drill_tier=self.drill.tier,
            prior_failures=prior.failures,
            prior_device_seconds=prior.device_seconds,
        )

    def on_nodes(self, names: list[str]) -> JobSpec:
        """The same job on nodes that job.yaml does not name, because they are those of an allocation.

        Raises:
            JobSpecError: job.yaml asks for what so many nodes cannot give.
        """
        cluster, count = self.cluster, len(names)
        problems = []
        if cluster.spares >= count:
            problems.append(
                f"cluster.spares: {cluster.spares} of the {count} nodes of the allocation leaves none to train on"
            )
        least = max(cluster.min_devices, cluster.multiple_of)
        if isinstance(cluster.devices_per_node, int) and not problems:
            total = cluster.devices_per_node * (count - cluster.spares)
            if total < least:
                problems.append(f"cluster.min_devices: the {total} devices of the allocation are less than {least}")
        hosts = [Host(host=name) for name in names]
        there = self.model_copy(update={"cluster": cluster.model_copy(update={"hosts": hosts})})
        if problems:
            raise JobSpecError([f"{self._source or 'job.yaml'}: {problem}" for problem in problems])
        return there

    def frozen_text(self) -> bytes:
        """The file to keep in the run directory: its own text below a line that says where its paths start from."""
        text = self._text.removeprefix(b"\xef\xbb\xbf")
        if _FROZEN.match(text):
            return text
        return f"{_FROZEN_MARK}{json.dumps(self._source)}\n".encode() + text


_FROZEN_MARK: Final = "# Frozen by ckptd; relative paths start from the directory of "
_FROZEN: Final = re.compile(re.escape(_FROZEN_MARK).encode() + rb'(".*")\r?\n')


def _source_of(path: str, data: bytes) -> str:
    """The file that was written by hand: `path` itself, unless it is a frozen copy, which names its origin."""
    match = _FROZEN.match(data)
    return str(json.loads(match[1])) if match else os.path.abspath(path)


def load(path: str | os.PathLike[str], *, check: bool = True) -> JobSpec:
    """Read a job.yaml, or the frozen copy of one.

    With `check` false the spec may contradict itself, name files that are gone, or ask for what this version does not
    do: for commands that only want to know which run is meant.

    Raises:
        JobSpecError: every problem of the file, sorted by line.
    """
    from ckptd import jobcheck

    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(jobcheck.READ_LIMIT)
    except FileNotFoundError:
        raise JobSpecError([f"{path}: no such file; `ckptd init` writes one to start from"]) from None
    except IsADirectoryError:
        raise JobSpecError([f"{path}: is a directory; name the job.yaml in it"]) from None
    except (OSError, ValueError) as error:
        raise JobSpecError([f"{shortened(path)}: cannot be read: {error}"]) from None
    try:
        source = _source_of(path, data)
    except ValueError as error:
        raise JobSpecError([f"{path}:1: the line that ckptd wrote was changed: {error}"]) from None
    spec, problems = jobcheck.validate(data, source=source, check=check)
    if spec is None or problems:
        raise JobSpecError([f"{path}:{problem.line}: {jobcheck.rendered(problem)}" for problem in problems])
    return spec
