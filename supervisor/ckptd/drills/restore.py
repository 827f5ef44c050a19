"""Would the newest checkpoint of a tier restore? It is: by the job's own script, in a directory of its own.

The attempt gets a tier that holds nothing but a link to the checkpoint, saves nothing, and ends with the loss that the
script's own evaluation gives, or, where it has none, with that of its next training step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptd import jobspec, orders
from ckptd.core import drilling, events, picture, placement
from ckptd.core.keeping import Range, is_suspect, name_of
from ckptd.daemon import Daemon
from ckptd.drills.scratch import DEVICES_PATIENCE_S, NEVER, supervise
from ckptd.errors import CkptdError, UsageError
from ckptd.jobscalars import Steps
from ckptd.jobspec import JobSpec, Tier
from ckptd.ledger import Ledger
from ckptd.node import tiers
from ckptd.rundir import RunDir
from ckptd.tiers import copy_checkpoint, is_url, open_store
from ckptd_shim.contract import DrillResult, Marker, RestoreDrill

MOST_WORDS = 4000
"""Characters of a script's last words that are kept."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `events.Drilled` says, without the times."""

    tier: str
    step: int | None = None
    path: str = ""
    ok: bool = False
    loss: float | None = None
    expected: float | None = None
    compared: str = ""
    seconds: float = 0.0
    problem: str = ""

    def event(self, *, t: float, at: float, source: str) -> events.Drilled:
        """As the ledger keeps it."""
        return events.Drilled(t=t, at=at, source=source, **dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The checkpoint to try."""

    path: str
    marker: Marker


def choose_tier(spec: JobSpec, name: str | None) -> Tier:
    """The tier called `name`; None: the slowest. Raises UsageError."""
    known = spec.checkpoint.tiers
    wanted = name or spec.drill.tier or known[-1].name
    for tier in known:
        if tier.name == wanted:
            return tier
    raise UsageError(f"no tier is called {wanted!r}; there are: {', '.join(tier.name for tier in known)}")


def newest(
    spec: JobSpec, tier: Tier, run_id: str, known: Mapping[str, str], suspect: Collection[str] = (), *,
    left: Collection[Range] = (),
) -> Candidate | Result:  # fmt: skip
    """The newest commit of the run on a tier, or why there is none to try. `left`: sequences that it went back from."""
    settings = next(each for each in orders.settings(spec)["tiers"] if each["name"] == tier.name)
    try:
        found = tiers.scan(tiers.Tier.from_dict(settings), known)
    except OSError as error:
        return Result(tier=tier.name, problem=f"tier {tier.name!r} cannot be read: {error}")
    found = [f for f in found if not is_suspect(left, f.sequence)]
    own = [f for f in found if f.path not in suspect and (f.problem or (f.marker and f.marker.run_id == run_id))]
    if not own:
        return Result(tier=tier.name, problem=f"tier {tier.name!r} holds no committed checkpoint of this run")
    last = max(own, key=lambda f: f.sequence)
    # A damaged marker tells no sequence: by its name it is as new as its step.
    broken = [f for f in own if f.marker is None and (last.marker is None or f.step > last.step)]
    if broken:
        last = max(broken, key=lambda f: f.step)
    if last.marker is None:
        return Result(tier=tier.name, step=last.step, path=last.path, problem=f"{last.path}: {last.problem}")
    return Candidate(path=last.path, marker=last.marker)


def world_for(spec: JobSpec, workers: int | None) -> int:
    """How many workers to restore on: as asked, else the fewest that the job allows. Raises UsageError."""
    policy = spec.policy("")
    most = workers if workers is not None else policy.global_batch or 10**6
    for world in range(workers or policy.min_devices, most + 1):
        if placement.wanted(world, dataclasses.replace(policy, min_devices=world, max_devices=world)) == world:
            return world
    raise UsageError(f"{workers} workers are no world that this job allows (multiple_of, the global batch)")


def restore(spec: JobSpec, candidate: Candidate, tier: Tier, *, scratch: Path, workers: int | None = None) -> Result:
    """Try one checkpoint. Everything that is written goes into `scratch`, which is empty and absolute.

    Raises:
        KeyboardInterrupt: by Ctrl-C; nothing is left running.
    """
    begun = time.monotonic()
    own = _spec(spec, scratch, world_for(spec, workers))
    directory = own.tier_dir(own.checkpoint.tiers[0])
    directory.mkdir(parents=True)
    answer = scratch / "result.json"
    problem = ""
    try:
        _bring(candidate, directory)
    except OSError as error:
        problem = f"it cannot be fetched: {error}"
        return Result(
            tier=tier.name, step=candidate.marker.step, path=candidate.path, seconds=time.monotonic() - begun,
            problem=problem,
        )  # fmt: skip
    try:
        problem = _problem(supervise(own, RunDir(scratch / "run"), RestoreDrill(result=str(answer))))
    except CkptdError as error:
        problem = str(error)
    said = DrillResult.read(answer) if answer.exists() else None
    marker = candidate.marker
    compared, expected = "training", marker.loss if marker.loss_median is None else marker.loss_median
    if said is not None and said.by == "evaluation" and marker.validation_loss is not None:
        compared, expected = "validation", marker.validation_loss
    if not problem and said is None:
        problem = "the script ended without shim.evaluated() and without a step"
    if not problem and said is not None and said.step != marker.step:
        problem = f"step {said.step} was restored, not {marker.step}"
    if not problem and said is not None:
        problem = drilling.judge(
            loss=said.loss, expected=expected, compared=compared, tolerance=spec.drill.tolerance,
            deviation=marker.loss_deviation,
        )  # fmt: skip
    return Result(
        tier=tier.name, step=marker.step, path=candidate.path, ok=not problem, loss=said.loss if said else None,
        expected=expected, compared=compared if said else "", seconds=time.monotonic() - begun, problem=problem,
    )  # fmt: skip


def _bring(candidate: Candidate, directory: Path) -> None:
    """Have the checkpoint in `directory`. A link will do: what is tried is the checkpoint itself, and nothing is written.

    What lies on an object store has to be copied.
    """
    name = name_of(candidate.path)
    if is_url(candidate.path):
        copy_checkpoint(open_store(candidate.path.removesuffix(name).rstrip("/")), open_store(str(directory)), name)
    else:
        (directory / name).symlink_to(candidate.path, target_is_directory=True)


def _spec(spec: JobSpec, scratch: Path, world: int) -> JobSpec:
    cluster = {
        "launcher": "local", "hosts": [], "spares": 0, "devices_per_node": world, "min_devices": world,
        "max_devices": world, "wait_for_devices": DEVICES_PATIENCE_S,
    }  # fmt: skip
    tier = Tier(name="scratch", path=str(scratch / "checkpoints"), keep_last=2)
    return spec.model_copy(
        update={
            "run_dir": str(scratch / "run"),
            "cluster": spec.cluster.model_copy(update=cluster),
            "checkpoint": spec.checkpoint.model_copy(update={"interval": Steps(steps=NEVER), "tiers": [tier]}),
            "restart": spec.restart.model_copy(update={"max_restarts": 0, "max_without_progress": 1, "warm": False}),
            "web": spec.web.model_copy(update={"listen": None}),
            "drill": spec.drill.model_copy(update={"every": None}),
        }
    )


def _problem(daemon: Daemon) -> str:
    """Why the scratch run did not come to its end, "": it did."""
    state, last = daemon.picture.run, daemon.picture.last_interruption
    outcome = state.outcome
    assert outcome is not None
    if state.attempt == 0:
        rejected = [note.what for note in daemon.picture.notes if note.level != "info"]
        return "; ".join(rejected) or outcome.detail
    if outcome.outcome == "stopped":
        return ""
    words = "" if last is None or not last.message else f"\n{last.message.rstrip()[-MOST_WORDS:]}"
    if outcome.outcome in ("finished", "ended early"):
        return "the script ended without shim.evaluated() and without a step"
    return f"{outcome.detail}{words}"


def rehearse(
    run_dir: RunDir, tier_name: str | None, *, hold: Callable[[str], None], workers: int | None = None,
    scratch: Path | None = None,
) -> Result:  # fmt: skip
    """Try the newest checkpoint of a run's tier. `hold` is called with its path before anything is read of it.

    `scratch`: an empty directory that is kept; None: a temporary one.

    Raises:
        UsageError: no such tier, no such world, or a run that never was.
    """
    spec = jobspec.load(run_dir.job_path, check=False)
    tier = choose_tier(spec, tier_name)
    with Ledger.open(run_dir.ledger_path, readonly=True) as ledger:
        history = [event for _, event in ledger.events()]
    run = picture.replay(history).run
    if not run.policy.run_id:
        raise UsageError(f"the run in {run_dir.path} was never started; `ckptd run` starts it")
    found = newest(
        spec, tier, run.policy.run_id, tiers.known_markers(history), run.suspects, left=run.keeping.suspects()
    )
    if isinstance(found, Result):
        return found
    world_for(spec, workers)
    hold(found.path)
    if scratch is not None:
        return restore(spec, found, tier, scratch=scratch, workers=workers)
    with tempfile.TemporaryDirectory(prefix="ckptd-drill-") as directory:
        return restore(spec, found, tier, scratch=Path(directory), workers=workers)


def main() -> None:
    """Entry of `python -m ckptd.drills.restore RUN_DIR [TIER]`, which a daemon starts beside its run.

    Prints two lines of JSON: `{"holding": path}` before the checkpoint is read, and the `Result`.
    """
    os.nice(19)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # training has them
    directory, *names = sys.argv[1:]
    result = rehearse(
        RunDir(directory), names[0] if names else None,
        hold=lambda path: print(json.dumps({"holding": path}), flush=True),
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    main()
