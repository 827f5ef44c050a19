"""Does this job resume exactly? It is run straight, then interrupted and resumed, and the two are compared.

Every leg is an ordinary run under an ordinary daemon, in a scratch directory, with a `Drill` in its launch message: the
shim then traces what the script does and ends it at a given step. The job's own run directory and tiers are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.daemon import Daemon
from ckptd.drills import traces
from ckptd.drills.scratch import DEVICES_PATIENCE_S, NEVER, supervise
from ckptd.drills.traces import Trace, Verdict
from ckptd.errors import DrillFailed, UsageError
from ckptd.jobscalars import Steps
from ckptd.jobspec import JobSpec, Tier
from ckptd.rundir import RunDir
from ckptd_shim.contract import Drill

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was done and what came of it."""

    verdict: Verdict
    straight: Trace
    resumed: Trace
    steps: int
    """N: 2N steps in all, resumed after N."""
    worlds: tuple[int, int]
    """Workers before and after the resume."""
    killed: bool

    @property
    def holds(self) -> bool:
        """Whether the resumed run is the uninterrupted one, up to noise."""
        return self.verdict.outcome != "differs"

    def to_json(self) -> dict[str, Any]:
        """The proof as one JSON object."""
        return {
            "steps": 2 * self.steps,
            "resume_step": self.steps,
            "worlds": list(self.worlds),
            "killed": self.killed,
            **traces.as_json(self.verdict, self.straight, self.resumed),
        }


class Prover:
    """Carries out the legs of one proof.

    Args:
        spec: the job.
        scratch: an empty directory for everything that the legs write; absolute.
        steps: N.
        worlds: workers before and after the resume; None: as many as the job takes by itself, both times.
        kill: interrupt by SIGKILL of a worker instead of a planned stop.
        say: told what is going on, for a person.

    Raises:
        UsageError: numbers that make no sense for this job.
    """

    def __init__(
        self, spec: JobSpec, *, scratch: Path, steps: int, worlds: tuple[int, int] | None, kill: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.spec = spec
        self.scratch = scratch
        self.steps = steps
        self.worlds = worlds
        self.kill = kill
        self._say = say
        if steps < 2:
            raise UsageError(f"--steps {steps}: 2 at least, so that there is something to compare after the resume")
        for world in worlds or ():
            self._check_world(world)

    def _check_world(self, world: int) -> None:
        batch = self.spec.batch
        if world < 1 or world % self.spec.cluster.multiple_of:
            raise UsageError(
                f"a world of {world} is no multiple of cluster.multiple_of ({self.spec.cluster.multiple_of})"
            )
        if batch is not None and batch.global_batch % world:
            raise UsageError(f"a world of {world} does not divide the global batch of {batch.global_batch} samples")

    def prove(self) -> Proof:
        """Run all legs and judge.

        Raises:
            DrillFailed: a leg did not do what it should, so there is nothing to compare.
            KeyboardInterrupt: by Ctrl-C; nothing is left running.
        """
        n = self.steps
        before, after = self.worlds or (None, None)
        self._say(f"straight: {2 * n} steps without an interruption")
        straight, world = self._leg("straight", before, stop_at=2 * n)
        before = before or world
        killing = n + max(1, n // 2)
        if self.kill:
            self._say(f"interrupted: {n} steps, then SIGKILL of a worker at step {killing}")
            first, _ = self._leg("resumed", before, stop_at=2 * n, save_at=n, kill_at=killing)
        else:
            self._say(f"interrupted: {n} steps, then a stop")
            first, _ = self._leg("resumed", before, stop_at=n, save_at=n)
        self._say(f"resumed: {n} steps more" + (f" on {after} workers" if after not in (None, before) else ""))
        second, after = self._leg("resumed", after or before, stop_at=2 * n, save_at=n, begins_at=n)
        resumed = traces.joined(first, second, n)
        same = after == before
        verdict = traces.compare(straight, resumed, resume_step=n, same_world=same)
        if verdict.outcome == "differs" and same and traces.may_be_noise(straight, resumed):
            self._say("it differs; a second straight run will show how much the job differs from itself")
            again, _ = self._leg("straight2", before, stop_at=2 * n)
            verdict = traces.compare(straight, resumed, resume_step=n, second=again)
        return Proof(
            verdict=verdict, straight=straight, resumed=resumed, steps=n, worlds=(before, after), killed=self.kill
        )

    # --- one leg ----------------------------------------------------------------------------------------------------

    def _leg(
        self, name: str, world: int | None, *, stop_at: int, save_at: int = NEVER, kill_at: int | None = None,
        begins_at: int = 0,
    ) -> tuple[Trace, int]:  # fmt: skip
        """Run a leg in `<scratch>/<name>`; its trace and its number of workers. A name used again goes on."""
        directory = self.scratch / name
        directory.mkdir(exist_ok=True)
        trace = directory / f"trace{begins_at}.jsonl"
        spec = self._spec(directory, world, save_at, final=begins_at > 0)
        drill = Drill(
            trace=str(trace), stop_at_step=stop_at, digest_at=[self.steps, 2 * self.steps], kill_at_step=kill_at
        )
        daemon = supervise(spec, RunDir(directory / "run"), drill)
        found = traces.read(trace)
        self._check(name, daemon, found, kill_at or stop_at, begins_at, killed=kill_at is not None)
        return found, daemon.picture.run.world_size or daemon.picture.world

    def _spec(self, directory: Path, world: int | None, save_at: int, *, final: bool) -> JobSpec:
        spec = self.spec
        cluster: dict[str, Any] = {"wait_for_devices": DEVICES_PATIENCE_S}
        if world is not None:
            cluster |= {"min_devices": world, "max_devices": world}
        tier = Tier(name="scratch", path=str(directory / "checkpoints"), keep_last=2)
        return spec.model_copy(
            update={
                "run_dir": str(directory / "run"),
                "cluster": spec.cluster.model_copy(update=cluster),
                "checkpoint": spec.checkpoint.model_copy(update={"interval": Steps(steps=save_at), "tiers": [tier]}),
                # A leg that fails is a finding, not something to recover from.
                "restart": spec.restart.model_copy(
                    update={"max_restarts": None if final else 0, "max_without_progress": 1}
                ),
                "web": spec.web.model_copy(update={"listen": None}),
            }
        )

    def _check(self, name: str, daemon: Daemon, trace: Trace, until: int, begins_at: int, *, killed: bool) -> None:
        """Raise DrillFailed unless the leg went from where it should to where it should."""
        state = daemon.picture.run
        outcome = state.outcome
        assert outcome is not None
        where = f"in the leg {name!r} (logs in {daemon.run_dir.path})"
        last = daemon.picture.last_interruption
        if outcome.outcome != ("failed" if killed else "stopped") and not (
            outcome.outcome == "finished" and trace.last == until
        ):
            words = f"\n{last.message.rstrip()}" if last is not None and last.message else ""
            more = ""
            if outcome.outcome == "finished":
                more = f"; {until} steps were needed: give --steps a smaller number, or the job more steps"
            raise DrillFailed(f"{where}: {outcome.outcome}: {outcome.detail}{more}{words}")
        if trace.last != until:
            words = f"\n{last.message.rstrip()}" if last is not None and last.message else ""
            raise DrillFailed(f"{where} training came to step {trace.last}, not to {until}: {outcome.detail}{words}")
        if min(trace.steps, default=0) != begins_at + 1:
            raise DrillFailed(f"{where} the first step was {min(trace.steps)}, not {begins_at + 1}")
