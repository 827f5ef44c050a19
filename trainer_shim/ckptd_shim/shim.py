"""What does a training script need of ckptd?

`TrainerShim`: resume, one call a step, close. Under ckptd (`CKPTD_LAUNCH` is set) it is told where to resume from, when
to save and when to stop; alone it does the same with a directory and an interval of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import math
import os
import sys
import time
import uuid
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ckptd_shim import contract, loading
from ckptd_shim.adopting import check_source
from ckptd_shim.checkpoint import Job, Saver, Target
from ckptd_shim.contract import DrillResult, Guard, LaunchContext, Phase, Report
from ckptd_shim.errors import CheckpointError, SetupError, StateRejected
from ckptd_shim.extras import dump
from ckptd_shim.guard import LossWatch
from ckptd_shim.interval import parse_interval
from ckptd_shim.loss import LastLoss, read_norm
from ckptd_shim.pulse import PulseWriter, ReportWriter
from ckptd_shim.ranks import Ranks
from ckptd_shim.sampler import accumulation_steps
from ckptd_shim.schedule import Schedule
from ckptd_shim.sigterm import Sigterm
from ckptd_shim.state import Position, TrainState
from ckptd_shim.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_AGREEMENT_TIMEOUT: Final = timedelta(minutes=30)
"""How far apart ranks may come to an agreed step; a hang is noticed by the heartbeat, long before."""
_SAVER_TIMEOUT: Final = timedelta(hours=2)
"""How long ranks that have written wait for those that have more to write."""
_EXIT_WAIT_S: Final = 10.0
"""How long a script that ended without `close` waits for a save in flight."""
_SMOOTHING: Final = 0.1


class TrainerShim:
    """Saves and resumes a training script. Every rank makes one, with the same arguments, after the model is wrapped.

    Args:
        model: a module, or a list or dict of them: bare, compiled, under DDP, or sharded by `fully_shard`.
        optimizer: an optimizer or a list of them.
        scheduler: a learning-rate scheduler or a list of them.
        scaler: a GradScaler.
        dataloader: the training loader; a GlobalSampler in it is put at the right sample on resume.
        extra: whatever else has state_dict and load_state_dict, by name.
        seed: what random numbers begin from where the world size has changed.
        directory: where checkpoints go when ckptd did not start this script; under ckptd it is ignored.
        interval: seconds, a duration such as "10m", or {"steps": 500}; without ckptd only.
        global_batch: samples of one optimizer step over all ranks, where neither job.yaml nor a sampler says.
        guard: what a state must not have to be committed, `{"finite": True, "loss_spike": None, "param_norm": None}` where
            nothing is said; without ckptd only, which takes it from job.yaml.
        total_steps: the step at which this script ends by itself, if it knows: a run that ends before is told apart.
        overlap: let parameters and optimizer state be copied until the next `optimizer.step`, which is told of it by itself.
            False: for scripts that change them in between through `tensor.data`, where not every change can be seen.

    Raises:
        TypeError, ValueError: an argument that makes no sense, named in the message.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        extra: Mapping[str, Any] | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        interval: float | str | Mapping[str, int] | None = None,
        global_batch: int | None = None,
        guard: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        overlap: bool = True,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed should be an int, is {seed!r}")
        interval_s, interval_steps = parse_interval(interval)
        path = os.environ.get(contract.ENV_LAUNCH)
        self._launch = LaunchContext.read(path) if path else None
        if self._launch is None and interval is not None and directory is None:
            raise ValueError("interval= is given without directory=: nothing could be saved")
        self._directory = None if directory is None else os.fspath(directory)
        wanted = Guard(**(guard or {}))
        self._guard = wanted if self._launch is None else (self._launch.guard or Guard())
        self._seed = seed
        self._total_steps = total_steps
        self.rank, self.world_size = 0, 1
        agreement = saving = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            # Two, and private: one for this thread, one for the saver's, so that neither can disturb the other.
            agreement = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
            saving = dist.new_group(backend="gloo", timeout=_SAVER_TIMEOUT)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "WORLD_SIZE is above 1: call torch.distributed.init_process_group before making TrainerShim"
            )
        self._state = TrainState(
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, dataloader=dataloader, extra=extra,
            rank=self.rank,
        )  # fmt: skip
        self._agreement = Ranks(agreement)
        self._saving = Ranks(saving)

        self.global_step = 0
        self.samples_seen = 0
        self.stopping = False
        self.resumed_from: str | None = None
        self._global_batch = self._find_global_batch(global_batch)
        self._incomparable: str | None = None
        self._saver: Saver | None = None
        self._resumed = self._closed = False
        self._no_room = False  # so it was at the last look
        self._begun_step: int | None = None  # of the newest save that was begun
        self._first_step: int | None = None
        self._step_s: float | None = None
        self._last_beat = 0.0
        self._foreign = self._stop_held = False
        self._held: Job | None = None  # what belongs to a checkpoint that a framework is writing
        self._waited_s = 0.0  # for a copy, in the present step
        self._skipped = 0  # global samples that were passed over
        self._loss = LastLoss()
        self._gradient: float | torch.Tensor | None = None  # its norm, of the newest step
        self._loss_watch = LossWatch(self._guard)
        self._looked_at: int | None = None  # the step whose loss is known, where losses come as tensors
        self._sigterm: Sigterm | None = None
        self._validation: tuple[int, float] | None = None  # (step, loss) of the newest evaluation

        launch = self._launch
        self._pulse = PulseWriter(
            None if launch is None else os.path.join(launch.attempt_dir, contract.pulse_name(self.rank))
        )
        self._report = ReportWriter(
            os.path.join(launch.attempt_dir, contract.REPORT_FILE) if launch is not None and self.rank == 0 else None
        )
        self._pulse.phase(Phase.INIT)
        self._schedule = Schedule(
            rank=self.rank,
            world_size=self.world_size,
            group=agreement,
            attempt=0 if launch is None else launch.attempt,
            control_path=None if launch is None else launch.control_path,
            interval_s=interval_s if launch is None else launch.interval_s,
            interval_steps=interval_steps if launch is None else launch.interval_steps,
            on_ignored=self._ignored,
            may_save=self._has_room,
        )
        drill = None if launch is None else launch.drill
        self._tracer: Tracer | None = None
        if drill is not None:
            self._tracer = Tracer(drill, state=self._state, rank=self.rank, world_size=self.world_size)
        self._late = overlap and bool(self._state.optimizers)
        self._hooks = [
            each.optimizer.register_step_pre_hook(_before_step(weakref.ref(self))) for each in self._state.optimizers
        ]
        self._state.data.seed(seed, 0, self.rank)
        self._sigterm = Sigterm.install()
        # Weakly: a shim that the script has dropped need not live until the end.
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)

    # --- what the script reads --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0; 0 where the loader does not say."""
        return self._state.data.epoch(self.samples_seen + self._skipped)

    @property
    def accumulation_steps(self) -> int:
        """In how many micro-batches a rank takes its share of the global batch; 1 where no micro-batch is given."""
        own = self._state.data.accumulation_steps
        if own is not None:
            return int(own)
        micro = None if self._launch is None else self._launch.micro_batch
        if self._global_batch is None or micro is None:
            return 1
        return accumulation_steps(self._global_batch, self.world_size, micro)

    @property
    def drill(self) -> bool:
        """Whether this is a drill: after `resume`, evaluate, tell `evaluated`, and end. Nothing is ever saved in one."""
        return self._launch is not None and self._launch.restore_drill is not None

    # --- resuming ---------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Put back the newest committed checkpoint; where nothing was ever committed, this is a fresh start.

        Raises:
            CheckpointMismatch: the checkpoint was saved by a script that differs from this one. Nothing is touched.
            CheckpointError: there is a checkpoint and it cannot be put back.
            TypeError: the state holds something that no checkpoint could.
        """
        if self._resumed:
            raise RuntimeError("resume() was called before")
        begun = time.monotonic()
        self._report.write(Report.INITIALISED, world_size=self.world_size)
        self._pulse.phase(Phase.RESTORE)
        loaded = self._load()
        if loaded is not None:
            self.global_step, self.samples_seen = loaded.position.step, loaded.position.samples
            self._skipped = loaded.position.skipped
            self.resumed_from = loaded.path
            self._incomparable = loaded.incomparable
            before = loaded.position.global_batch
            if self._incomparable is None and before != self._global_batch:
                self._incomparable = (
                    f"global batch changed from {before} to {self._global_batch} at step {self.global_step}"
                )
            self._begun_step = self.global_step
        steps = {each["step"] for each in self._agreement.exchange({"step": self.global_step})}
        if len(steps) > 1:
            raise CheckpointError(f"the ranks resumed at different steps: {sorted(steps)}")
        if self._saver is not None:
            # What cannot be saved is better known now than at the first save.
            dump(self._capture().tree)
        self._resumed = True
        self._first_step = self.global_step + 1
        self._schedule.start(self.global_step)
        self._pulse.beat(self.global_step, self.samples_seen)
        self._pulse.phase(Phase.FIRST_STEP)
        self._report.write(
            Report.RESTORED,
            step=self.global_step,
            samples=self.samples_seen,
            seconds=time.monotonic() - begun,
            path=self.resumed_from,
        )
        if self._tracer is not None:
            self._tracer.begin(self.global_step)
        self._last_beat = time.monotonic()

    def _load(self) -> loading.Loaded | None:
        """Make the saver, and restore what there is."""
        launch = self._launch
        chosen: tuple[str, str] | None = None
        if launch is not None:
            target = Target(
                save_dir=launch.save_dir,
                run_id=launch.run_id,
                attempt=launch.attempt,
                tier=launch.tier,
                durable=launch.durable_writes,
                node=None if launch.shared else os.environ.get(contract.ENV_NODE, ""),
                leads=not launch.shared and os.environ.get("LOCAL_RANK") == "0",
            )
            sequence = launch.commit_sequence
            if launch.resume is not None:
                chosen = launch.resume.path, launch.resume.marker_crc32c
        elif self._directory is not None:
            found = loading.agree_on(self._saving, self._directory)
            mine = (
                {"run_id": uuid.uuid4().hex, "attempt": loading.next_attempt(self._directory)} if self.rank == 0 else {}
            )
            told = self._saving.exchange(mine)[0]
            run_id, sequence = told["run_id"], 0
            if found is not None:
                chosen = found[0], found[1]
                run_id, sequence = found[2]["run_id"], found[2]["sequence"]
            target = Target(save_dir=self._directory, run_id=run_id, attempt=told["attempt"], tier="")
        else:
            if self.rank == 0:
                print(
                    "ckptd: neither started by ckptd nor given a directory=: nothing is saved",
                    file=sys.stderr,
                    flush=True,
                )
            return None
        loaded = None
        if chosen is not None:
            path, crc = chosen
            loaded = loading.load(
                path, state=self._state, ranks=self._saving, seed=self._seed, marker_crc32c=crc,
                skip_data_to=None if launch is None else launch.skip_data_to,
                partial=launch is not None and launch.resume is not None and launch.resume.partial,
            )  # fmt: skip
            sequence = max(sequence, loaded.marker.sequence)
        self._saver = Saver(
            target=target, ranks=self._saving, sequence=sequence, report=self._report, guard=self._guard,
            late=self._late,
            norms=() if loaded is None else loaded.marker.param_norms,
            newest=None if loaded is None else loaded.marker,
        )  # fmt: skip
        return loaded

    # --- stepping ---------------------------------------------------------------------------------------------------

    def step(
        self,
        loss: float | torch.Tensor | None = None,
        *,
        grad_norm: float | torch.Tensor | None = None,
        samples: int | None = None,
    ) -> bool:
        """Say that one optimizer step is complete. True: the run is asked to stop, and all is saved.

        A collective about once a second; between those it costs microseconds.

        Args:
            loss: of this step, for the record. A tensor is looked at only now and then.
            grad_norm: of the gradients that this step was taken with, unscaled and before clipping, as
                `torch.nn.utils.clip_grad_norm_` returns it: one that is not finite makes the state unfit to be committed,
                unless a GradScaler left the step out. Looked at only when there is a save.
            samples: global samples of this step, where no global batch is known.
        """
        if not self._resumed:
            raise RuntimeError("call resume() before the first step()")
        now = time.monotonic()
        step = self.global_step = self.global_step + 1
        self.samples_seen += (self._global_batch or 0) if samples is None else samples
        if type(loss) is float:
            self._loss.value = loss
        self._gradient = grad_norm
        if self._first_step is None:
            took = now - self._last_beat - self._waited_s
            if self._saver is not None:
                self._saver.slowdown.step(self._last_beat, took)
            self._step_s = took if self._step_s is None else self._step_s + _SMOOTHING * (took - self._step_s)
        self._last_beat, self._waited_s = now, 0.0
        self._pulse.beat(step, self.samples_seen, self._loss.value, self._step_s)
        if self._tracer is not None:
            return self._traced(self._tracer, step, loss)
        if self.drill:
            if not self.stopping:
                self._drilled(None if loss is None else float(loss), by="step")
            return self.stopping
        if not self._schedule.due(step):
            return self.stopping
        return self._agree(step, loss)

    def should_save(self, loss: float | torch.Tensor | None = None, *, samples: int | None = None) -> bool:
        """`step` for a framework that writes its own checkpoints. True, on every rank: write one of this step, then `committed`.

        The shim is made without model and optimizer; random numbers, schedulers, `extra` and the position in the data are kept
        as they are now. `stopping` is True once the save of a run that is asked to stop is committed.

        Raises:
            RuntimeError: the shim was given a model or an optimizer, which it would have to save itself.
        """
        if self._state.models or self._state.optimizers:
            raise RuntimeError(
                "should_save() is for frameworks that write model and optimizer themselves: make TrainerShim without model= "
                "and optimizer=, or call step()"
            )
        self._foreign = True
        held = self._held
        self.step(loss, samples=samples)
        return self._held is not held

    @property
    def save_path(self) -> str | None:
        """Directory that this step's checkpoint will be; a framework may write into it. None: nothing is saved."""
        if self._saver is None:
            return None
        target = self._saver.target
        return os.path.join(target.save_dir, contract.checkpoint_dirname(self.global_step, target.attempt))

    def committed(self, path: str | os.PathLike[str]) -> None:
        """Say that all ranks have written their files into the directory `path`: a checkpoint of the run from here on.

        A collective; rank 0's path counts. Its files, which have to be plain ones, are linked into the run's own directory, or
        copied from another file system, and must not be changed in place any more. They are digested in the background. Without
        a `should_save` that was True before, the state is taken to be that of the present step.

        Raises:
            CheckpointError: there is nothing there that could be committed; on every rank.
        """
        if self._saver is None:
            return
        self._foreign = True
        source, problem = os.path.abspath(path), None
        if self.rank == 0:
            try:
                check_source(source)
            except CheckpointError as error:
                problem = str(error)
        told = self._agreement.exchange({"source": source, "problem": problem})[0]
        if told["problem"] is not None:
            raise CheckpointError(told["problem"])
        job, self._held = self._held or self._hold(self.global_step, None), None
        if job is None:
            return
        self._saver.adopt(job, told["source"])
        self._pulse.phase(Phase.STEP)
        self._last_beat = time.monotonic()
        if self._stop_held:
            self._stop(self.global_step)

    def before_optimizer_step(self) -> None:
        """Wait until the state of the last save is copied. The optimizers given to the shim call it by themselves."""
        if self._saver is not None:
            self._waited_s += self._saver.release()

    def _traced(self, tracer: Tracer, step: int, loss: float | torch.Tensor | None) -> bool:
        """A step of a drill: the same, written down, and with an end and perhaps a death that were ordered."""
        drill = tracer.drill
        if step > drill.stop_at_step:
            raise RuntimeError(f"step() returned True at step {step - 1} and the script went on: it has to stop then")
        tracer.step(step, samples=self.samples_seen, loss=loss)
        if self._schedule.due(step):
            self._agree(step, loss)
        if step == drill.kill_at_step:
            self._drain()
            tracer.kill(step)
        if step == drill.stop_at_step and not self.stopping:
            self._save(step, loss)
            self._stop(step)
        return self.stopping

    def _agree(self, step: int, loss: float | torch.Tensor | None) -> bool:
        self._loss.look(loss)
        if isinstance(loss, torch.Tensor):
            self._looked_at = -1 if loss.is_cuda else step  # what comes from a GPU is of some step before
        if step == self._first_step:
            self._first_step = None
            self._report.write(Report.FIRST_STEP, step=step)
            self._pulse.phase(Phase.STEP)
            if self._saver is not None:
                # Only now do optimizers have all of their state.
                self._saver.prepare(self._capture())
        wants = self._sigterm is not None and self._sigterm.asked
        agreed = self._schedule.agree(step, step_s=self._step_s, want_stop=wants)
        if agreed.save:
            if self._foreign:
                self._held = self._hold(step, loss)
            else:
                self._save(step, loss)
            self._schedule.saved(step)
        self._loss_watch.note(self._loss.value)
        if agreed.stop and self._held is not None:
            self._stop_held = True
        elif agreed.stop:
            self._stop(step)
        self._last_beat = time.monotonic()
        return self.stopping

    def evaluated(self, loss: float | torch.Tensor) -> None:
        """Say what the validation loss of the present state is. Every rank calls it; rank 0's is kept.

        It goes into the markers of the saves that follow, and is what `ckptd drill` compares a restored state with: an
        evaluation right before a save can be held against it. In a drill this ends the run: `stopping` is True after it.
        """
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self.drill:
            self._drilled(value, by="evaluation")
        elif math.isfinite(value):
            self._validation = (self.global_step, value)

    def _drilled(self, loss: float | None, *, by: str) -> None:
        """End a drill with what was found."""
        assert self._launch is not None
        assert self._launch.restore_drill is not None
        if self.rank == 0:
            known = loss if loss is not None and math.isfinite(loss) else None
            restored = self.global_step - (by == "step")
            DrillResult(step=restored, loss=known, by=by).write(self._launch.restore_drill.result, durable=True)
        self._stop(self.global_step)

    def _stop(self, step: int) -> None:
        self._drain()
        self.stopping = True
        self._report.write(Report.STOPPING, step=step)

    def pin(self, label: str = "") -> None:
        """Keep the checkpoint of this step, or else the next one that is committed, until `ckptd unpin`. On every rank, or on rank 0.

        Asks for no save. Without ckptd nothing is ever deleted, and this does nothing.
        """
        if self._saver is None or not self._resumed:
            return
        if self.resumed_from is not None and self._resumed_step() == self.global_step:
            self._report.write(
                Report.PINNED,
                step=self.global_step,
                path=self.resumed_from,
                label=label,
                pinned=True,
                source="shim.pin",
            )
        else:
            self._saver.pin(self.global_step, label)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that the script does something else than training steps meanwhile, such as "eval": no hang."""
        try:
            phase = Phase[name.upper()]
        except KeyError:
            raise ValueError(f"{name!r} is no phase: use one of {', '.join(p.name.lower() for p in Phase)}") from None
        begun = time.monotonic()
        self._pulse.phase(phase)
        try:
            yield
        finally:
            self._pulse.phase(Phase.STEP if self._first_step is None else Phase.FIRST_STEP)
            self._last_beat += time.monotonic() - begun

    def close(self) -> None:
        """Save what is not saved yet, wait until it is committed, and report the end. May be called again.

        Raises:
            CheckpointError: the last save failed, though nobody asked for a stop: work is lost.
            StateRejected: likewise, because the guard refused the state.
        """
        if self._closed:
            return
        self._closed = True
        outcome = None
        try:
            if self._saver is not None and self._resumed:
                self._drain()
                if not self._foreign and self.global_step not in (
                    self._saver.committed_step,
                    self._resumed_step(),
                    self._rejected_step(),
                ):
                    self._begun_step = None
                    self._save(self.global_step)
                    self._drain()
                outcome = self._saver.outcome
                self._saver.close()
            failed = outcome is not None and not outcome.committed
            if failed and not self.stopping:
                assert outcome is not None
                if outcome.rejected:
                    raise StateRejected(
                        f"the state at the last step, {outcome.step}, is not fit to be committed: {outcome.error}"
                    )
                raise CheckpointError(f"the last save, of step {outcome.step}, failed: {outcome.error}")
            self._report.write(
                Report.FINISHED,
                step=self.global_step,
                samples=self.samples_seen,
                stopping=self.stopping,
                saved=not failed,
                total_steps=self._total_steps,
            )
        finally:
            self._pulse.phase(Phase.END)
            self._pulse.close()
            self._report.close()
            for hook in self._hooks:
                hook.remove()
            if self._sigterm is not None:
                self._sigterm.remove()
            atexit.unregister(self._at_exit)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _resumed_step(self) -> int | None:
        """The step that needs no save because it was resumed from; step 0 needs none either."""
        return self.global_step if self._first_step == self.global_step + 1 else None

    def _rejected_step(self) -> int | None:
        """The step whose state was refused: another look would find the same."""
        outcome = None if self._saver is None else self._saver.outcome
        return outcome.step if outcome is not None and outcome.rejected else None

    def _find_global_batch(self, given: int | None) -> int | None:
        told = {
            "job.yaml": None if self._launch is None else self._launch.global_batch,
            "the sampler": self._state.data.global_batch,
            "global_batch=": given,
        }
        known = {name: value for name, value in told.items() if value is not None}
        if len(set(known.values())) > 1:
            raise SetupError(
                f"the global batch is {', '.join(f'{v} by {k}' for k, v in known.items())}: make them equal"
            )
        return next(iter(known.values()), None)

    def _position(self) -> Position:
        return Position(
            step=self.global_step,
            samples=self.samples_seen,
            epoch=self.epoch,
            seed=self._seed,
            global_batch=self._global_batch,
            skipped=self._skipped,
        )

    def _capture(self) -> Any:
        return self._state.capture(self._position(), world_size=self.world_size, incomparable=self._incomparable)

    def _save(self, step: int, loss: float | torch.Tensor | None = None) -> None:
        if self._saver is None or step == self._begun_step or self.drill:
            return
        self._begun_step = step
        self._pulse.phase(Phase.SAVE)
        self._saver.save(self._capture, **self._circumstances(step, loss))
        self._pulse.phase(Phase.STEP)

    def _hold(self, step: int, loss: float | torch.Tensor | None) -> Job | None:
        """What is to lie beside the files that a framework writes from now on, until `committed`."""
        if self._saver is None or self.drill:
            return None
        self._pulse.phase(Phase.SAVE)
        return self._saver.hold(self._capture, **self._circumstances(step, loss))

    def _circumstances(self, step: int, loss: float | torch.Tensor | None) -> dict[str, Any]:
        """What a save is told beside the state."""
        if loss is not None:
            # A save waits for the GPU anyway.
            self._loss.value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        known = loss is not None or self._loss_is_of(step)
        problem = self._loss_watch.problem(self._loss.value) if known else None
        return {
            "position": self._position(),
            "loss": self._loss.finite,
            "loss_problem": problem or self._gradient_problem(),
            "validation": self._validation,
            "usual": self._loss_watch.usual(),
        }

    def _gradient_problem(self) -> str | None:
        if self._gradient is None or not self._guard.finite:
            return None
        norm = read_norm(self._gradient)  # a save waits for the GPU anyway
        scaler = self._state.scaler
        enabled = getattr(scaler, "is_enabled", None)
        scaled = scaler is not None and (enabled is None or bool(enabled()))
        return self._loss_watch.gradient_problem(norm, scaled=scaled)

    def _loss_is_of(self, step: int) -> bool:
        """Whether the loss that is known is that step's own. Floats come with every step, tensors are looked at now and then."""
        return self._looked_at in (None, step)

    def _has_room(self, step: int, request: int) -> bool:
        """Rank 0, before a save: whether it would fit. One that would not is reported, and not even begun."""
        lacking = None if self._saver is None else self._saver.lacks_room(f"the save of step {step}")
        # Asked about once a second while it lasts: said when it begins, and to whoever asked for the save.
        if lacking is not None and (request or not self._no_room) and self._saver is not None:
            self._saver.report_failed(step, lacking, errno.ENOSPC)
        self._no_room = lacking is not None
        return lacking is None

    def _drain(self) -> None:
        if self._saver is not None:
            self._pulse.phase(Phase.SAVE)
            self._saver.wait()
            self._pulse.phase(Phase.STEP)

    def _ignored(self, why: str) -> None:
        self._report.write(Report.CONTROL_IGNORED, why=why)


def _before_step(reference: weakref.ref[TrainerShim]) -> Callable[..., None]:
    def hook(*_args: Any) -> None:
        shim = reference()
        if shim is not None:
            shim.before_optimizer_step()

    return hook


def _leave(reference: weakref.ref[TrainerShim]) -> None:
    """The script ends without `close`: give a save in flight a moment, and no more."""
    shim = reference()
    if shim is not None and shim._saver is not None:
        with contextlib.suppress(Exception):
            shim._saver.wait(_EXIT_WAIT_S)
