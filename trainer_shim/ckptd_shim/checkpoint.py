"""How does a state become a committed checkpoint while training goes on?

`Saver.save` copies the state into kept buffers, or has it copied until the optimizer's next step, and returns; one thread
then writes it as torch's distributed checkpoint lays it out, gathers the digests of all ranks' files, and on rank 0 writes
`COMMITTED` last of all. Every rank goes through the same collectives whatever happens to it: an error is something to
tell, not a reason to leave.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim import background, contract, guard, room
from ckptd_shim.adopting import adopt
from ckptd_shim.contract import FileDigest, Guard, Marker, Report
from ckptd_shim.digest import crc32c_bytes
from ckptd_shim.extras import Packer
from ckptd_shim.guard import NormWatch
from ckptd_shim.slowdown import Slowdown
from ckptd_shim.staging import Stager, local
from ckptd_shim.state import LASTING
from ckptd_shim.visible import await_files
from ckptd_shim.writing import (
    TensorWriter,
    check_plan,
    first_problem,
    needed_files,
    problem_of,
    remove_partial,
    signature_of,
    write_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from ckptd_shim.copying import Copying
    from ckptd_shim.extras import Packed
    from ckptd_shim.guard import Rejection
    from ckptd_shim.pulse import ReportWriter
    from ckptd_shim.ranks import Ranks
    from ckptd_shim.state import Position, Snapshot
    from ckptd_shim.writing import Problem


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a run's checkpoints go, and what its markers say of it."""

    save_dir: str
    run_id: str
    attempt: int
    tier: str
    durable: bool = True
    node: str | None = None
    """Each node has its own `save_dir`, and this is the name of this one; None: all see the same files."""
    leads: bool = False
    """This rank makes directories and writes markers on its node, as rank 0 does on its own."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a save; the same on every rank."""

    step: int
    path: str
    committed: bool
    error: str | None = None
    errno: int | None = None
    rejected: bool = False
    """Nothing failed: the guard refused the state, and `error` says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, from the copy to the commit."""

    position: Position
    path: str
    begun: float
    stall_s: float
    """In the call; what the optimizer waited for is the copy's to say."""
    slowdown_s: float | None
    loss: float | None
    validation: tuple[int, float] | None
    usual: tuple[float, float] | None
    incomparable: str | None
    live: dict[str, torch.Tensor]
    staged: dict[str, torch.Tensor]
    copying: Copying | None
    packed: Packed
    parameters: Mapping[str, str]
    loss_problem: str | None
    source: str | None = None
    """Where a framework has written the files of this checkpoint itself; None: nobody has."""


class Saver:
    """Saves one at a time. Every rank makes one, and calls `save` for the same steps.

    Args:
        target: where to, and as what.
        ranks: all ranks, on a group that only this saver uses.
        sequence: number of the newest commit of the run so far.
        report: rank 0's report file.
        guard: which states are fit to be committed; the same on every rank.
        late: the caller calls `release` before every step of an optimizer, so the state may be copied until then.
        norms: of the parameters in the recent commits, oldest first; the same on every rank.
        newest: marker of the checkpoint that was resumed from.
    """

    def __init__(
        self,
        *,
        target: Target,
        ranks: Ranks,
        sequence: int,
        report: ReportWriter,
        guard: Guard | None = None,
        late: bool = False,
        norms: Sequence[float] = (),
        newest: Marker | None = None,
    ) -> None:
        self.target = target
        self.sequence = sequence
        self._ranks = ranks
        self._leads = ranks.rank == 0 or target.leads
        self._report = report
        self._guard = guard or Guard()
        self._norms = NormWatch(self._guard, norms)
        self._footprint = None if newest is None else _footprint(newest.files)
        self._stager = Stager(rank=ranks.rank)
        self._gently = background.Gently(name="ckptd-gentle")
        self._writer = TensorWriter(rank=ranks.rank, group=ranks.group, durable=target.durable, gently=self._gently)
        self._packer = Packer(*LASTING)
        self._late = late
        self._copying: Copying | None = None
        self.slowdown = Slowdown()
        """What uploads cost the steps; whoever knows the steps tells it of them."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self.outcome: Outcome | None = None
        """What became of the newest save that is over."""
        self.committed_step: int | None = None
        """Step of the newest commit of this attempt."""
        self._pins: list[tuple[int, str]] = []
        """(step from which on a commit will do, label): pins that wait for theirs."""
        self._pinning = threading.Lock()
        self._thread = background.start(self._work, name="ckptd-saver")

    def lacks_room(self, what: str) -> str | None:
        """Rank 0: what is missing on disk for the next save, None: nothing, as far as is known. Its size is that of the
        newest checkpoint, or of the state before the first.
        """
        if self._footprint is None:
            return None
        size, files = self._footprint
        return room.shortage(self.target.save_dir, size=size, files=files, what=what)

    def report_failed(self, step: int, error: str, number: int | None) -> None:
        """Rank 0: report a save that was not begun."""
        path = os.path.join(self.target.save_dir, contract.checkpoint_dirname(step, self.target.attempt))
        self._report.write(
            Report.SAVE_FAILED, step=step, path=path, tier=self.target.tier, stall_s=0.0, left=False, error=error,
            errno=number,
        )  # fmt: skip

    def _measure(self, size: int) -> None:
        """Before the first save, in the saver's thread: how large it will be on all ranks together."""
        told = self._ranks.exchange({"size": size, "node": self.target.node})
        here = [each for each in told if each["node"] == self.target.node]
        copies = self._copies(told)
        if self._footprint is None:
            self._footprint = copies * sum(each["size"] for each in here), copies * (2 * len(here) + 3)

    def _copies(self, told: list[dict[str, Any]]) -> int:
        """How often as much as this node's ranks write comes to lie here: another node's part is mirrored to it."""
        return 2 if len({each["node"] for each in told}) > 1 else 1

    def prepare(self, snapshot: Snapshot) -> None:
        """Allocate the buffers that `snapshot` needs, in the background, so that the first save does not have to."""
        shapes = self._stager.shapes(snapshot)
        self.wait()
        size = sum(t.numel() * t.element_size() for t in map(local, self._stager.wanted(snapshot).values()))

        def prepare() -> None:
            self._writer.learn(self._stager.warm(shapes, self._gently))
            self._measure(size)

        self._submit(prepare)

    def save(
        self,
        capture: Callable[[], Snapshot],
        *,
        position: Position,
        loss: float | None,
        loss_problem: str | None = None,
        validation: tuple[int, float] | None = None,
        usual: tuple[float, float] | None = None,
    ) -> float:
        """Copy what `capture` returns, or begin to, and have it written. Returns this rank's stall so far in seconds.

        `loss_problem`: why this rank's loss makes the state unfit to be committed. `validation`: (step, loss) of the
        newest evaluation; `usual`: (median, deviation) of the recent losses. The stall is the time in here, the wait for an
        earlier save included; what `release` waits later comes on top.

        Raises:
            TypeError: the state holds something that a checkpoint cannot.
        """
        begun = time.monotonic()
        job = self.hold(
            capture, position=position, loss=loss, loss_problem=loss_problem, validation=validation, usual=usual
        )
        self._begin(job)
        return time.monotonic() - begun

    def adopt(self, job: Job, source: str) -> None:
        """Have the files in the directory `source` committed as the checkpoint that `job` was held for.

        The stall is the time since then: training stood still while the framework wrote.
        """
        self._begin(dataclasses.replace(job, source=source, stall_s=time.monotonic() - job.begun))

    def hold(
        self,
        capture: Callable[[], Snapshot],
        *,
        position: Position,
        loss: float | None,
        loss_problem: str | None = None,
        validation: tuple[int, float] | None = None,
        usual: tuple[float, float] | None = None,
    ) -> Job:
        """The first half of a save: what would be written, copied. `adopt` has it committed beside a framework's own files.

        Arguments and errors are those of `save`.
        """
        begun = time.monotonic()
        self.wait()
        slowdown_s = self.slowdown.take()
        snapshot = capture()
        staged, tree, copying = self._stager.stage(snapshot, late=self._late)
        job = Job(
            position=position,
            path=os.path.join(self.target.save_dir, contract.checkpoint_dirname(position.step, self.target.attempt)),
            begun=begun,
            packed=self._packer.pack(tree),
            stall_s=time.monotonic() - begun,
            slowdown_s=slowdown_s,
            loss=loss,
            validation=validation,
            usual=usual,
            incomparable=tree["shared"]["incomparable"],
            live=snapshot.tensors,
            staged=staged,
            copying=copying,
            parameters=snapshot.parameters,
            loss_problem=loss_problem,
        )
        self._copying = copying
        return job

    def _begin(self, job: Job) -> None:
        self.slowdown.begin()
        self._submit(lambda: self._carry_out(job))
        if self._ranks.rank == 0:
            self._report.write(Report.SAVE_STAGED, step=job.position.step, stall_s=job.stall_s)

    def release(self) -> float:
        """Let the state be changed: what is not copied yet is copied now. Returns the seconds that it took."""
        copying, self._copying = self._copying, None
        return 0.0 if copying is None else copying.release()

    def pin(self, step: int, label: str) -> None:
        """Have the checkpoint of `step` reported as pinned, or else the next one, as soon as it is committed."""
        with self._pinning:
            newest = self.outcome
            if newest is not None and newest.committed and newest.step >= step:
                self._report_pin(newest.step, newest.path, label)
            else:
                self._pins.append((step, label))

    def _report_pin(self, step: int, path: str, label: str) -> None:
        if self._ranks.rank == 0:
            self._report.write(Report.PINNED, step=step, path=path, label=label, pinned=True, source="shim.pin")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight. False: it still is after `timeout_s` seconds.

        Raises:
            RuntimeError: the saver itself failed, which is a bug.
        """
        self.release()
        with self._gently.hurry():
            if not self._idle.wait(timeout_s):
                return False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeError(f"the saver's thread failed: {failure!r}") from failure
        return True

    def close(self) -> None:
        """End the thread. What is in flight is waited for."""
        self._jobs.put(None)
        with self._gently.hurry():
            self._thread.join()
        self._gently.close()

    # --- the saver's thread -----------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        self._idle.clear()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._failure = error
            del job  # it holds the staged state
            self.slowdown.over(time.monotonic())
            self._idle.set()

    def _carry_out(self, job: Job) -> None:
        try:
            self._finish(job, *(self._attempt(job) if job.source is None else self._adopt(job, job.source)))
        except Exception as error:
            if self.outcome is not None and self.outcome.committed and self.outcome.path == job.path:
                return  # all was written and told: a rank died before it could hear of it
            # The exchange with the other ranks failed. They may be writing still, so nothing is removed.
            self._fail(
                job, {"error": f"the ranks lost each other: {error}", "errno": None}, stall_s=job.stall_s, left=True
            )

    def _attempt(self, job: Job) -> tuple[list[dict[str, Any]], Metadata | None, Problem | Rejection | None]:
        """Write, unless the guard refuses the state.

        Returns (what every rank says of its files, what was planned, the first problem of any rank).
        """
        problem: Problem | None = None
        mine: dict[str, Any] = {}
        stall_s = job.stall_s
        try:
            if job.copying is not None:
                problem = self._copied(job.copying)
                stall_s += job.copying.stalled_s
            mine = guard.inspect(
                self._guard,
                loss_problem=job.loss_problem,
                tensors={key: job.live[key] for key in job.staged},
                staged=job.staged,
                parameters=job.parameters,
                gently=self._gently,
            )
            signature, mine["alike"] = signature_of(job.live)
            layout = self._writer.layout
            mine["known"] = layout is not None and layout.signature == signature
            mine["shared"] = self._gently(job.packed.shared_crc32c)
        except Exception as error:
            problem = problem_of(error)
        if self._leads:
            try:
                self._make_directory(job)
            except OSError as error:
                problem = problem_of(error)
        told = self._ranks.exchange({"problem": problem, "stall_s": stall_s, "slowdown_s": job.slowdown_s, **mine})
        prices = [{"stall_s": each["stall_s"], "slowdown_s": each["slowdown_s"]} for each in told]
        problem = first_problem(told)
        for rank, each in enumerate(told):
            if problem is None and each["alike"] != told[0]["alike"]:
                text = f"rank {rank} holds other unsharded tensors than rank 0, which would be lost: shard them as DTensors"
                problem = {"error": text, "errno": None}
        unfit = problem or guard.verdict(self._guard, told, self._norms)
        if unfit is not None:
            return [{**price, "files": []} for price in prices], None, unfit
        files: list[FileDigest] = []
        metadata = None
        needs: list[str] = []
        again = all(each["known"] for each in told)
        try:
            files, metadata = self._writer.write(
                job.path,
                {key: t if isinstance(t := job.live[key], DTensor) else staged for key, staged in job.staged.items()},
                job.staged,
                signature=signature,
                again=again,
            )
            files.append(self._write_extras(job, alike=len({each["shared"] for each in told}) == 1))
            if self.target.node is not None:
                needs = needed_files(job.live, metadata)
        except BaseException as error:  # CheckpointException is no Exception
            problem = problem_of(error)
        told = self._tell_files(problem, files, needs)
        problem = first_problem(told)
        if problem is None and self.target.node is not None:
            problem = self._spread(job.path, again=again)
        return [each | price for each, price in zip(told, prices, strict=True)], metadata, problem

    def _tell_files(self, problem: Problem | None, files: list[FileDigest], needs: list[str]) -> list[dict[str, Any]]:
        """What every rank wrote on which node, and from which files it would read its tensors."""
        mine = {"problem": problem, "files": [dataclasses.asdict(each) for each in files]}
        return self._ranks.exchange({**mine, "node": self.target.node, "needs": needs})

    def _spread(self, path: str, *, again: bool) -> Problem | None:
        """Have the description of all tensors on every node; the first problem of any rank."""
        problem: Problem | None = None
        try:
            self._writer.spread(path, self._ranks.broadcast, again=again, leads=self._leads)
            if self.target.durable:
                contract.fsync_directory(path)
        except OSError as error:
            problem = problem_of(error)
        return first_problem(self._ranks.exchange({"problem": problem}))

    def _adopt(self, job: Job, source: str) -> tuple[list[dict[str, Any]], Metadata | None, Problem | Rejection | None]:
        """The same for files that are there already: rank 0 takes them over, every rank adds its extras."""
        problem: Problem | None = None
        if self._leads:
            try:
                self._make_directory(job)
            except OSError as error:
                problem = problem_of(error)
        price = {"stall_s": job.stall_s, "slowdown_s": job.slowdown_s}
        told = self._ranks.exchange({
            "problem": problem, "unfit": job.loss_problem, "squares": 0.0, "shared": job.packed.shared_crc32c(), **price
        })  # fmt: skip
        prices = [{key: each[key] for key in price} for each in told]
        unfit = first_problem(told) or guard.verdict(Guard(), told)
        if unfit is not None:
            return [{**each, "files": []} for each in prices], None, unfit
        files: list[FileDigest] = []
        try:
            # Where each node has its own tier, the framework may have left files on all of them.
            if self._ranks.rank == 0 or (self._leads and os.path.isdir(source)):
                files = self._gently(functools.partial(adopt, source, job.path, durable=self.target.durable))
            files.append(self._write_extras(job, alike=len({each["shared"] for each in told}) == 1))
        except Exception as error:
            problem = problem_of(error)
        told = self._tell_files(problem, files, [])
        return [each | price for each, price in zip(told, prices, strict=True)], None, first_problem(told)

    def _make_directory(self, job: Job) -> None:
        os.makedirs(self.target.save_dir, exist_ok=True)
        if job.source is None or not os.path.isdir(job.path):
            os.mkdir(job.path)
        with open(os.path.join(job.path, contract.OWNER), "x", encoding="utf-8") as file:
            file.write(self.target.run_id)

    def _copied(self, copying: Copying) -> Problem | None:
        """See the copy through to its end; the problem if it is not one of the state at the save."""
        # Not gently: the optimizer may be waiting for it at any moment.
        changed = copying.result()
        if changed is None:
            return None
        self._late = False
        text = (
            f"{changed} was changed outside of the optimizer's step while it was being copied; from now on all is copied "
            "before training goes on"
        )
        return {"error": text, "errno": None}

    def _write_extras(self, job: Job, *, alike: bool) -> FileDigest:
        """This rank's own, with what all ranks have alike written once: an average of the weights is as large as they are."""
        rank = self._ranks.rank
        path = os.path.join(job.path, contract.extras_name(rank))
        chunks = job.packed.chunks(shared=rank == 0 or not alike)
        written = write_bytes(path, chunks, durable=self.target.durable, gently=self._gently)
        if self.target.durable:
            contract.fsync_directory(job.path)
        return written

    def _finish(
        self,
        job: Job,
        told: list[dict[str, Any]],
        metadata: Metadata | None,
        problem: Problem | Rejection | None,
    ) -> None:
        stall_s = max(each["stall_s"] for each in told)
        slowdowns = [each["slowdown_s"] for each in told if each["slowdown_s"] is not None]
        if isinstance(problem, guard.Rejection):
            self._reject(job, problem, stall_s=stall_s)
            return
        left = False
        facts: dict[str, Any] = {}
        marker = None
        if self._ranks.rank == 0:
            if problem is None:
                try:
                    facts, marker = self._commit(job, told, metadata)
                except Exception as error:
                    problem = problem_of(error)
                else:
                    if slowdowns:
                        facts["slowdown_s"] = max(slowdowns)
                    # It is a fact now, whatever becomes of the ranks that are about to be told.
                    self._committed(job, stall_s=stall_s, facts=facts)
            if problem is not None:
                left = not remove_partial(job.path)
        word = self._ranks.exchange({"problem": problem, "marker": marker})[0]
        verdict = word["problem"]
        if self._leads and self._ranks.rank != 0:
            self._follow(job, verdict, word["marker"])
        if verdict is not None:
            self._fail(job, verdict, stall_s=stall_s, left=left)
            return
        if self._ranks.rank != 0:
            self._committed(job, stall_s=stall_s, facts=facts)

    def _follow(self, job: Job, verdict: Problem | None, marker: str | None) -> None:
        """On another node than rank 0's: do with this node's files as rank 0 has decided."""
        if verdict is not None or marker is None:
            remove_partial(job.path)
            return
        try:
            name = os.path.join(job.path, contract.COMMITTED)
            contract.write_atomically(name, marker.encode(), durable=self.target.durable)
        except OSError as error:
            # Committed it is all the same: what lies here is found by the other nodes' word, or fetched from a copy.
            print(
                f"ckptd: {job.path} was committed, and has no marker on this node: {error}", file=sys.stderr, flush=True
            )

    def _committed(self, job: Job, *, stall_s: float, facts: dict[str, Any]) -> None:
        self.sequence += 1
        self.committed_step = job.position.step
        with self._pinning:
            self.outcome = Outcome(step=job.position.step, path=job.path, committed=True)
            pins = [label for step, label in self._pins if step <= job.position.step]
            self._pins = [pin for pin in self._pins if pin[0] > job.position.step]
        if self._ranks.rank == 0:
            self._report.write(
                Report.SAVE_COMMITTED,
                step=job.position.step,
                samples=job.position.samples,
                path=job.path,
                tier=self.target.tier,
                stall_s=stall_s,
                loss=job.loss,
                comparable=job.incomparable is None,
                **facts,
            )
        for label in pins:
            self._report_pin(job.position.step, job.path, label)

    def _commit(
        self, job: Job, told: list[dict[str, Any]], metadata: Metadata | None
    ) -> tuple[dict[str, Any], str | None]:
        """Rank 0: check that all is there, then write `COMMITTED`.

        Returns what there is to report, and the marker's text where other nodes are to have it too.
        """
        files = _listed(told)
        places = {each.name: i for i, each in enumerate(files)}
        if job.source is None:
            assert metadata is not None
            check_plan(metadata, {each.name: each.size for each in files})
        if self.target.node is None:
            await_files(job.path, files)
        position = job.position
        marker = Marker(
            format=contract.FORMAT,
            run_id=self.target.run_id,
            sequence=self.sequence + 1,
            step=position.step,
            samples_seen=position.samples,
            epoch=position.epoch,
            attempt=self.target.attempt,
            world_size=self._ranks.size,
            global_batch=position.global_batch,
            loss=job.loss,
            created=time.time(),
            files=files,
            comparable=job.incomparable is None,
            comparable_reason=job.incomparable,
            torch=str(torch.__version__),
            param_norms=self._norms.recent,
            validation_step=None if job.validation is None else job.validation[0],
            validation_loss=None if job.validation is None else job.validation[1],
            loss_median=None if job.usual is None else job.usual[0],
            loss_deviation=None if job.usual is None else job.usual[1],
            nodes=_by_node(told, places) if self.target.node is not None else {},
            needs=[[places[name] for name in one["needs"]] for one in told] if _all_known(told) else [],
        )
        if self.target.durable:
            contract.fsync_directory(self.target.save_dir)
        name = os.path.join(job.path, contract.COMMITTED)
        marker.write(name, durable=self.target.durable)
        upload_s = time.monotonic() - job.begun
        with open(name, "rb") as file:
            data = file.read()
        total, count = _footprint(files)
        if self.target.node is not None:
            here = [files[place] for place in marker.nodes[self.target.node]]
            copies = self._copies(told)
            self._footprint = copies * sum(each.size for each in here), copies * len(here) + 2
        else:
            self._footprint = total, count
        facts = {
            "sequence": marker.sequence, "marker_crc32c": crc32c_bytes(data), "bytes": total, "upload_s": upload_s
        }  # fmt: skip
        return facts, data.decode() if self.target.node is not None else None

    def _reject(self, job: Job, found: Rejection, *, stall_s: float) -> None:
        """Every rank knows the verdict already: there is nothing left to agree on."""
        if self._leads:
            remove_partial(job.path)
        self.outcome = Outcome(step=job.position.step, path=job.path, committed=False, error=found.why, rejected=True)
        if self._ranks.rank == 0:
            self._report.write(
                Report.SAVE_REJECTED,
                step=job.position.step,
                path=job.path,
                tier=self.target.tier,
                stall_s=stall_s,
                why=found.why,
                rank=found.rank,
                position=job.position.data,
            )

    def _fail(self, job: Job, problem: Problem, *, stall_s: float, left: bool) -> None:
        self.outcome = Outcome(step=job.position.step, path=job.path, committed=False, **problem)
        if self._ranks.rank == 0:
            self._report.write(
                Report.SAVE_FAILED,
                step=job.position.step,
                path=job.path,
                tier=self.target.tier,
                stall_s=stall_s,
                left=left,
                **problem,
            )


def _footprint(files: list[FileDigest]) -> tuple[int, int]:
    """(bytes, number of files) of a checkpoint on disk, marker and signature included."""
    return sum(each.size for each in files), len(files) + 2


def _listed(told: list[dict[str, Any]]) -> list[FileDigest]:
    """Every file once. Raises ValueError where two nodes have different ones under one name."""
    files: dict[str, FileDigest] = {}
    for one in told:
        for each in one["files"]:
            file = FileDigest(**each)
            if files.setdefault(file.name, file) != file:
                raise ValueError(f"two nodes have written different files under the name {file.name}")
    return list(files.values())


def _by_node(told: list[dict[str, Any]], places: dict[str, int]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for one in told:
        found.setdefault(one["node"], set()).update(places[each["name"]] for each in one["files"])
    return {node: sorted(held) for node, held in found.items()}


def _all_known(told: list[dict[str, Any]]) -> bool:
    return all(one["needs"] for one in told)
