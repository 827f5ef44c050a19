"""A run of any length that nobody trained: made-up events, with everything that follows from them decided by the core.

The nodes do as they are told and fail at random; what is recorded about it (interruptions with their causes, restarts
with their parts, intervals) is what the production folds and the production policy make of it.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.commands import Record
from ckptd.core.policy import Policy
from ckptd.core.state import Status

EPOCH = 1_790_000_000.0
"""Wall clock of the run's start."""
DAY = 86_400.0

_TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 120, in <module>
    main()
  File "train.py", line 96, in main
    loss.backward()
RuntimeError: CUDA error: uncorrectable ECC error encountered"""
_LOGS = (
    (-9, "rank {rank} was killed"),
    (1, _TRACEBACK),
    (-11, "Fatal Python error: Segmentation fault"),
    (1, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank {rank} <script>alert(1)</script>"),
)


class MadeUpRun:
    """Builds `events` and `picture`. `mtbf_s` etc. are the truth that the run is to find out. Seconds."""

    def __init__(
        self, *, nodes=2, devices=4, mtbf_s=2600.0, stall_s=45.0, upload_s=60.0, step_s=2.0, seed=1, name="llm"
    ):
        self.random = random.Random(seed)
        self.events = []
        self.picture = picture.Picture()
        self.t = 0.0
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.devices = devices
        self.truth = {"mtbf": mtbf_s, "stall": stall_s, "upload": upload_s, "step": step_s}
        self.sequence = 0
        self.commits = []
        policy = Policy(
            run_id="made-up", name=name, prior_device_seconds=mtbf_s * nodes * devices, max_without_progress=1000
        )  # fmt: skip
        self.happen(ev.DaemonStarted(t=0.0, policy=policy.to_dict()))
        for node in self.nodes:
            found = [{"index": i, "id": f"{node}-{i}", "name": "made-up"} for i in range(devices)]
            self.happen(ev.AgentConnected(t=1.0, node=node, devices=found))

    @property
    def attempt(self):
        return self.picture.run.attempt

    def happen(self, event):
        """Append and fold an event, and whatever the core records because of it."""
        self._append(event)
        self.t = max(self.t, event.t)
        for _ in range(20):
            record = next((c for c in picture.decide(self.picture, self.t) if isinstance(c, Record)), None)
            if record is None:
                return
            self._append(record.event)
        raise AssertionError("recorded for ever")

    def _append(self, event):
        event = replace(event, at=EPOCH + event.t)
        self.events.append(event)
        self.picture = picture.apply(self.picture, event)

    def after(self, cls, seconds, **values):
        self.happen(cls(t=self.t + seconds, attempt=self.attempt, node=values.pop("node", self.nodes[0]), **values))

    def launch(self):
        """From the questions before an attempt to its first step."""
        while self.picture.run.status is not Status.LAUNCHING:
            chosen = next((c for c in reversed(self.commits) if c["path"] not in self.picture.run.suspects), None)
            sick = [0] if self.random.random() < 0.05 else []
            for node in self.nodes:
                self.happen(
                    ev.HealthReported(t=self.t + 0.1, node=node, unhealthy=sick if node == self.nodes[-1] else [])
                )
                self.happen(
                    ev.InventoryReported(t=self.t + 0.4, node=node, chosen=chosen, commits=self.sequence,
                                         newest_sequence=self.sequence))  # fmt: skip
            if self.picture.run.status is Status.ENDED:
                raise AssertionError(f"the run gave up: {self.picture.run.outcome}")
            self.t += max(0.0, self.picture.run.not_before - self.t)
        for node in self.nodes:
            self.after(ev.WorkersStarted, 0.3, node=node, warm=self.random.random() < 0.9)
        self.step = (self.picture.run.resume or {"step": 0})["step"]
        self.after(ev.WorkersInitialised, self.random.uniform(5, 12))
        self.after(ev.StateRestored, self.random.uniform(10, 30), step=self.step)
        self.after(ev.FirstStep, self.random.uniform(5, 15), step=self.step + 1)

    def train(self, seconds):
        """Train for so long, saving as the policy says. What is not committed when it ends is nobody's loss but the run's."""
        start, step, saved, until = self.t, self.step, 0.0, self.t + seconds
        while True:
            decision = self.picture.decision
            at = self.t + (decision.interval_s if decision and decision.interval_s else 60.0)
            stall = self.truth["stall"] * self.random.uniform(0.9, 1.2)
            upload = self.truth["upload"] * self.random.uniform(0.8, 1.5)
            if at + stall + upload >= until:
                self.step = step + max(1, int((until - start - saved) / self.truth["step"]))
                self.t = until
                return
            self.step = step + max(1, int((at - start - saved) / self.truth["step"]))
            saved += stall
            self.t = at
            self.after(ev.SaveStaged, stall, step=self.step, stall_s=stall)
            self._commit(stall, upload)
            if self.picture.run.request is not None:
                self._relaunch()
                start, step, saved = self.t, self.step, 0.0
                until = max(until, self.t)

    def _relaunch(self):
        """The core asked for it: the workers save, end, and are launched again."""
        self.t += self.truth["upload"] + 1.0
        self.after(ev.SaveStaged, 1.0, step=self.step, stall_s=1.0)
        self._commit(1.0, 5.0)
        self.t += 6.0
        for node in self.nodes:
            self.after(ev.WorkersFinished, 0.5, node=node, step=self.step, stopping=True)
            self.after(ev.AttemptEnded, 0.5, node=node, step=self.step)
        self.launch()

    def _commit(self, stall, upload):
        staged, self.t = self.t, self.t + upload
        step, samples, world = self.step, self.step * 64, self.picture.run.world_size
        if self.random.random() < 0.01:
            self.after(ev.SaveFailed, 0.0, step=step, tier="disk", stall_s=stall, error="No space left on device")
        else:
            self.sequence += 1
            path = f"/ckpt/step_{step:09d}.a{self.attempt:04d}"
            self.after(
                ev.SaveCommitted, 0.0, step=step, samples=samples, tier="disk", path=path, bytes=7 << 30, stall_s=stall,
                upload_s=upload + stall, sequence=self.sequence, marker_crc32c="0", world_size=world,
            )  # fmt: skip
            found = {
                "step": step, "tier": "disk", "path": path, "marker_crc32c": "0", "sequence": self.sequence,
                "attempt": self.attempt, "samples_seen": samples, "world_size": world, "comparable": True, "run_id": "made-up",
            }  # fmt: skip
            self.commits = [*self.commits[-9:], found]
        loss = 8.0 / (1 + step) ** 0.1
        if self.sequence % 5 == 0:
            self.after(ev.Progress, 0.0, step=step, samples=samples, loss=loss, step_s=self.truth["step"])
        self.t = staged  # the next save counts from here: this one was written meanwhile

    def fail(self):
        """A rank dies, all of them are stopped, and the core finds out why."""
        rank = self.random.randrange(len(self.nodes) * self.devices)
        code, log = self.random.choice(_LOGS)
        self.happen(
            ev.FailureDetected(t=self.t + 0.01, detected_t=self.t + self.random.uniform(0.1, 2.0), attempt=self.attempt,
                               node=self.nodes[0], rank=rank, exitcode=code, step=self.step))  # fmt: skip
        exits = [{"rank": rank, "exitcode": code, "order": 0, "stderr_tail": log.format(rank=rank)}]
        for node in self.nodes:
            self.after(ev.AttemptEnded, 1.0, node=node, step=self.step, exits=exits if node == self.nodes[0] else [])

    def interrupted_times(self, times):
        """Go on until the run was interrupted so often."""
        for _ in range(times):
            self.launch()
            self.train(min(self.random.expovariate(1 / self.truth["mtbf"]), 6 * self.truth["mtbf"]))
            self.fail()
        return self


def thirty_days():
    """30 days, 1,000 interruptions."""
    run = MadeUpRun(stall_s=90.0).interrupted_times(1000)
    run.launch()
    run.train(1800.0)
    return run
