"""The node agent: dials the daemon, carries one attempt at a time, and goes on when the daemon is gone.

The event loop lives in a thread; the main thread belongs to elastic, which needs it for its signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ckptd import __version__
from ckptd.auth import parse_secret
from ckptd.errors import CkptdError
from ckptd.link import AgentLink, Message
from ckptd.node import dialling, health, logs, processes, tiers, warm
from ckptd.node.attempt import Attempt, newest_attempt, node_file, rank_of, recorded_workers
from ckptd.node.evidence import KernelLog, OomCounter
from ckptd.node.keeper import Keeper
from ckptd.node.neighbours import Neighbours
from ckptd.node.retire import Holdings
from ckptd.place import Place
from ckptd_shim import contract

log = logging.getLogger(__name__)

FIRST_LIVE_INTERVAL_S = 0.5
FENCE_LOOK_S = 0.5
ADDRESS_LOOK_S = 1.0
WARMTH_INTERVAL_S = 5.0
REAP_INTERVAL_S = 5.0
THREADS = 32
"""For what may block. A file system that hangs keeps a few for ever, and ending workers needs one more."""
DELETION_PATIENCE_S = 4.0
"""How long an agent that leaves waits for deletions under way: less than the daemon waits for it."""
ALONE_SAVE_S = 600.0
"""How long an attempt may take to save and stop when no daemon is there to say."""
ALONE_DRAIN_S = 600.0
"""And the copies of its last commit to the slower tiers after that."""
TOLD_PATIENCE_S = 5.0
"""How long the daemon may take to acknowledge the last events of an agent that leaves."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the daemon tells an agent about the job when it dials in."""

    tiers: list[tiers.Tier]
    health_command: list[str] | None
    health_interval_s: float
    stop_grace_s: float
    orphan_timeout_s: float
    fence_timeout_s: float | None = None
    """None: the daemon is on this machine, and nothing can come between."""
    live_interval_s: float = 0.5
    warm: warm.Recipe | None = None
    logs: logs.Rules = field(default_factory=logs.Rules)
    mirror_rate: float | None = None

    @classmethod
    def from_message(cls, data: Message) -> Settings:
        recipe = data.get("warm")
        known = {f.name for f in fields(cls)}  # a newer daemon that adopts this agent may say more
        return cls(
            **{
                **{key: value for key, value in data.items() if key in known},
                "logs": logs.Rules.from_dict(data.get("logs", {})),
                "tiers": [tiers.Tier.from_dict(t) for t in data["tiers"]],
                "warm": None if recipe is None else warm.Recipe.from_message(recipe),
            }
        )


class Agent:
    """All state of a node agent. Everything but `run` and `_carry` happens on the event loop."""

    def __init__(
        self, *, run_dir: str, run_id: str, node: str, devices_wanted: int | None, socket: str | None = None,
        secret: bytes | None = None,
    ) -> None:  # fmt: skip
        """`socket`: of a daemon on this machine. None: `dialling` says which address to dial, `secret` is to be proved."""
        self.run_dir = run_dir
        self.run_id = run_id
        self.node = node
        self.agent_id = uuid.uuid4().hex
        self.devices = health.find_devices(devices_wanted)
        self.settings: Settings | None = None
        self.attempt: Attempt | None = None
        self._home = Place(run_dir)
        self._orders: queue.SimpleQueue[tuple[Attempt, Message] | None] = queue.SimpleQueue()
        self._link = AgentLink(
            self._where if socket is None else socket, hello=self._hello, on_order=self._on_order, secret=secret
        )
        self._dialled: dialling.Dial | None = None
        self._store: tuple[int, Any] | None = None
        """An attempt, and the store that its workers will meet at; it is handed on with the launch."""
        self._opened: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="agent"))
        self._health: health.Health | None = None
        self._exiting = asyncio.Event()
        self._control_seq = 0
        self._warmth: warm.Warmth | None = None
        self._kernel = KernelLog()
        self._logs = logs.LogKeeper(run_dir, f"agent-{node}.log")
        self._ended: set[int] = set()
        """Attempts whose end was told: a stop that crossed that news on the way needs no other answer."""
        self._stuck: list[processes.Process] = []
        """What survived SIGKILL: it was told, its device is left out, and no later end waits for it again."""
        self._keeper = Keeper(run_id, emit=self._link.event, say=self._link.say)
        self._neighbours = Neighbours(
            node=node, run_id=run_id, secret=secret or b"", keeper=self._keeper, emit=self._link.event
        )
        self._keeper.together = self._neighbours.copy_together
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- the two threads ---

    def run(self) -> None:
        """Run until the daemon says exit, or nobody has needed this agent for `orphan_timeout`."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, self._on_signal)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        thread = threading.Thread(target=self._run_loop, name="agent-loop", daemon=True)
        thread.start()
        # The hello must not wait for torch: it is imported here while the daemon asks its first questions.
        from ckptd.node import elastic

        warm.become_subreaper()
        elastic.warm_up()
        while (order := self._orders.get()) is not None:
            self._carry(*order)
        if self._warmth is not None:
            self._warmth.close()
        thread.join(timeout=5.0)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException:
            log.exception("the agent's event loop failed")
            os._exit(70)
        finally:
            self._orders.put(None)

    def _on_signal(self, number: int, _frame: Any) -> None:
        source = f"{signal.Signals(number).name} to the agent of node {self.node}"
        self._loop.call_soon_threadsafe(self._asked_to_stop, source)

    async def _main(self) -> None:
        jobs = [
            self._link.run(),
            self._tell_where_training_is(),
            self._watch_health(),
            self._watch_orphanhood(),
            self._watch_fence(),
            self._watch_address(),
            self._keep_warm(),
            self._reap_orphans(),
            self._mind_logs(),
        ]
        tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(job) for job in jobs]
        stopped: asyncio.Task[Any] = asyncio.ensure_future(self._exiting.wait())
        done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keeper.settle(DELETION_PATIENCE_S)
        if self.settings is not None:  # what was printed since the last look
            self._logs.look(self.settings.logs)
        for task in done:
            if task is not stopped:
                task.result()

    # --- talking to the daemon ---

    def _where(self) -> tuple[str, int]:
        """The address to dial now: whoever starts agents may have written another one since the last time."""
        self._dialled = found = dialling.read(self.run_dir, self.node)
        self._link.epoch = max(self._link.epoch, found.epoch)
        return found.host, found.port

    async def _watch_address(self) -> None:
        """Leave a daemon from which the run was taken over, though it lives and is connected."""
        while True:
            await asyncio.sleep(ADDRESS_LOOK_S)
            if self._dialled is None or not self._link.connected:
                continue
            with contextlib.suppress(OSError):
                if dialling.read(self.run_dir, self.node) != self._dialled:
                    log.warning("the daemon is said to be elsewhere now: dialling again")
                    self._link.hang_up()

    def _hello(self) -> Message:
        return {
            "node": self.node,
            "agent_id": self.agent_id,
            "run_id": self.run_id,
            "pid": os.getpid(),
            "version": __version__,
            "devices": self.devices.devices,
            "running": self.attempt.number if self.attempt is not None else None,
        }

    async def _on_order(self, order: Message) -> None:
        kind = order["type"]
        if kind == "welcome":
            self.settings = Settings.from_message(order["settings"])
            self._keeper.configure(self.settings.tiers)
            self._neighbours.configure(self.settings.tiers, self.settings.mirror_rate)
            self._kindle()
        elif kind == "store":
            self._spawn(self._open_store(int(order["attempt"])))
        elif kind == "launch":
            self._launch(order)
        elif kind == "stop":
            self._stop(int(order["attempt"]), grace=bool(order["grace"]), stacks=bool(order.get("stacks")))
        elif kind == "control":
            self._control(order)
        elif kind == "ask" and order["what"] == "health":
            self._spawn(self._answer_health())
        elif kind == "ask" and order["what"] == "inventory":
            self._spawn(self._answer_inventory(order))
        elif kind == "tiers":
            assert self.settings is not None
            self.settings = replace(self.settings, tiers=[tiers.Tier.from_dict(t) for t in order["tiers"]])
            self._keeper.configure(self.settings.tiers)
            self._neighbours.configure(self.settings.tiers, self.settings.mirror_rate)
        elif kind == "ask" and order["what"] == "sharing":
            self._spawn(self._neighbours.tell_sharing(order))
        elif kind == "ask" and order["what"] == "holdings":
            self._spawn(self._neighbours.tell_holdings(order, self._link.address or "127.0.0.1"))
        elif kind == "gather":
            self._spawn(self._gather(order))
        elif kind == "mirror":
            self._neighbours.follow(order)
        elif kind == "prune":
            holdings = Holdings.from_dict(order["holdings"])
            self._spawn(self._keeper.prune(holdings, shared=bool(order.get("shared", True))))
        elif kind == "consult":
            self._spawn(self._keeper.consulted(order))
        elif kind == "unpin":
            self._keeper.unpin(order["names"])
        elif kind == "promotion":
            self._keeper.promote(order["every"], here=bool(order["here"]))
        elif kind == "exit":
            self._spawn(self._leave(float(order.get("drain_s", 0.0))))
        else:
            log.warning("an order of an unknown kind: %s", kind)

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an order failed", exc_info=task.exception())

    def _kindle(self) -> None:
        """Have torch imported, where workers will be forked, before there is anything to launch."""
        assert self.settings is not None
        recipe = self.settings.warm
        if self._warmth is not None and self._warmth.recipe != recipe:
            # In a thread: a launch that waits for the old one holds it.
            self._spawn(asyncio.to_thread(self._warmth.close))
            self._warmth = None
        if recipe is not None and self._warmth is None:
            self._warmth = warm.Warmth(recipe)
            self._warmth.kindle()

    def _asked_to_stop(self, source: str) -> None:
        """Somebody sent this agent a signal: the daemon decides, and where there is none, the agent does."""
        self._link.event("requested", request="stop", source=source)
        if not self._link.connected:
            self._save_and_leave(source)

    def _emit(self, kind: str, **event: Any) -> None:
        """An event of the attempt."""
        self._link.event(kind, **event)
        self._keeper.saw(kind, event)

    async def _leave(self, drain_s: float) -> None:
        """The run is over, or nobody has needed this agent for long: see to its checkpoints, and go."""
        await self._keeper.finish(drain_s)
        self._neighbours.close()
        deadline = time.monotonic() + TOLD_PATIENCE_S
        while self._link.connected and self._link.unacknowledged and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._exiting.set()

    # --- orders ---

    async def _open_store(self, number: int) -> None:
        """Listen for the workers of all nodes of an attempt, at the address from which the daemon was dialled."""
        if self._opened.get("attempt") == number:
            self._link.event("store_opened", **self._opened)  # a new daemon asks once more
            return
        host = self._link.address or "127.0.0.1"
        try:
            store = await asyncio.to_thread(_open_store, host)
        except Exception as error:
            log.exception("no store for attempt %d", number)
            why = f"node {self.node} cannot listen on {host} for the other nodes' workers: {error}"
            self._link.event("failure_detected", attempt=number, detected_age_s=0.0, launch=True, detail=why)
            return
        if number in self._ended:
            return
        self._store = (number, store)
        self._opened = {"attempt": number, "host": host, "port": store.port}
        self._link.event("store_opened", **self._opened)

    async def _gather(self, order: Message) -> None:
        """Bring what the workers of an attempt will resume from into this node's own directory."""
        number = int(order["attempt"])
        try:
            await self._neighbours.gather(order)
        except OSError as error:
            why = f"node {self.node}: {error}"
            self._link.event("failure_detected", attempt=number, detected_age_s=0.0, launch=True, detail=why)

    def _launch(self, order: Message) -> None:
        number = int(order["context"]["attempt"])
        if self.attempt is not None:
            if self.attempt.number == number:
                return
            log.error("asked to launch attempt %d while attempt %d is here", number, self.attempt.number)
            return
        if number in self._ended:
            return  # a new daemon asks for what the one before it had launched: all of it is on the way to it
        assert self.settings is not None
        attempt = Attempt(
            run_id=self.run_id,
            number=number,
            node=self.node,
            directory=order["context"]["attempt_dir"],
            ranks=[int(rank) for rank in order["ranks"]],
            emit=self._emit,
            release=lambda: None,
            spare=self._own_children,
            stop_grace_s=self.settings.stop_grace_s,
            oom=OomCounter(),
            kernel=self._kernel,
            nodes=int(order["nodes"]),
            buses=self.devices.buses(dict(zip(order["ranks"], order["devices"], strict=True))),
        )
        self.attempt = attempt
        self._orders.put((attempt, order))
        self._spawn(self._forget(attempt))

    async def _forget(self, attempt: Attempt) -> None:
        await attempt.ended.wait()
        self._ended.add(attempt.number)
        self._stuck = [p for p in self._stuck if processes.alive(p)] + attempt.unkillable
        self.attempt = None

    def _carry(self, attempt: Attempt, order: Message) -> None:
        """Main thread: launch the workers of one attempt and reap them when all are dead."""
        from ckptd.node import elastic

        # Not self.attempt: while an earlier one was being reaped, this one may have ended and the next have come.
        if not attempt.claim():
            return

        def on_started(pids: dict[int, int], warm: bool) -> None:
            mono = time.monotonic()
            fds = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
            self._loop.call_soon_threadsafe(attempt.started, pids, fds, mono, warm)
            if self._warmth is not None and not warm:
                self._loop.call_soon_threadsafe(self._say_why_cold, self._warmth.why_cold)

        try:
            context = contract.LaunchContext.from_json(json.dumps(order["context"]), where="launch order")
            os.makedirs(attempt.directory, exist_ok=True)
            os.makedirs(context.save_dir, exist_ok=True)
            # Nodes may share the directory, as in a home that all of them mount.
            name = "launch.json" if attempt.nodes == 1 else node_file("launch", self.node, "json")
            launch_file = os.path.join(attempt.directory, name)
            context.write(launch_file)
            host, node_rank = str(order["host"]), int(order["node_rank"])
            store = self._store_of(attempt, host) if node_rank == 0 else None
            agent = elastic.make_agent(
                run_id=self.run_id, attempt=attempt.number, host=host, store=store,
                port=int(order["port"]) if store is None else store.port, node_rank=node_rank, nodes=attempt.nodes,
                ranks=attempt.ranks, world_size=int(order["world_size"]), argv=list(order["argv"]),
                environments=self._environments(order, launch_file), directory=attempt.directory, warmth=self._warmth,
                on_started=on_started, clear=lambda: self._clear(attempt.number),
            )  # fmt: skip
        except Exception as error:
            log.exception("attempt %d cannot be launched", attempt.number)
            self._loop.call_soon_threadsafe(attempt.launch_failed, f"{type(error).__name__}: {error}")
            return
        attempt.release = agent.release.set
        try:
            agent.run()
        except Exception as error:
            log.exception("launching attempt %d failed", attempt.number)
            self._loop.call_soon_threadsafe(attempt.launch_failed, f"{type(error).__name__}: {error}")

    def _store_of(self, attempt: Attempt, host: str) -> Any:
        if attempt.nodes == 1:
            return _open_store(host)
        kept, self._store = self._store, None
        if kept is None or kept[0] != attempt.number:
            raise RuntimeError(f"the store of attempt {attempt.number} is not open")
        return kept[1]

    def _clear(self, number: int) -> None:
        """End what a forkserver forked, or may be about to, of an attempt that will start cold."""
        processes.sweep(self.run_id, number, [], spare=self._own_children, node=self.node)

    def _say_why_cold(self, why: str) -> None:
        self._link.event("noted", level="warning", what=f"workers were started cold: {why}")

    def _environments(self, order: Message, launch_file: str) -> dict[int, dict[str, str]]:
        """The variables of each local rank, on top of this process's own and of what elastic sets."""
        indices = [int(index) for index in order["devices"]]
        defaults = {**order["defaults"], **dialling.interface_settings(self._link.address)}
        common = {
            **warm.environment(defaults, order["env"]),
            contract.ENV_LAUNCH: launch_file,
            contract.ENV_RUN_ID: self.run_id,
            contract.ENV_NODE: self.node,
            contract.ENV_ATTEMPT: str(order["context"]["attempt"]),
        }
        if self.devices.gpus:
            # By identity: the numbers are the driver's own, CUDA may count otherwise, and all shift when a GPU is lost.
            common["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices.identity(index) for index in indices)
        return {local: {**common, "CKPTD_DEVICE": str(index)} for local, index in enumerate(indices)}

    def _stop(self, number: int, *, grace: bool, stacks: bool) -> None:
        if self.attempt is not None and self.attempt.number == number:
            self.attempt.stop(grace=grace, stacks=stacks)
        elif number not in self._ended:
            self._spawn(self._sweep_orphans(number))

    async def _sweep_orphans(self, number: int) -> None:
        """End the workers of an attempt that an earlier agent of this node launched."""
        if self._store is not None and self._store[0] <= number:  # a newer one's has been asked for since
            self._store = None
        directory = os.path.join(self.run_dir, "attempts", contract.attempt_dirname(number))
        workers = recorded_workers(directory, self.node)
        swept = await asyncio.to_thread(
            processes.sweep, self.run_id, number, list(workers.values()), spare=self._own_children, node=self.node
        )
        self._ended.add(number)
        ranks = {worker.pid: rank for rank, worker in workers.items()}
        named = [{"pid": p.pid, "name": swept.names.get(p.pid, "?"), "seconds": swept.seconds} for p in swept.killed]
        stuck = [
            {"pid": p.pid, "name": swept.names.get(p.pid, "?"), "rank": rank_of(p, ranks)} for p in swept.unkillable
        ]
        self._stuck += swept.unkillable
        self._link.event("attempt_ended", attempt=number, leftovers=named, unkillable=stuck)

    def _own_children(self) -> Collection[int]:
        """Pids that no sweep is to touch. Called from several threads."""
        warmth = self._warmth
        server = warmth.pid if warmth is not None else None
        return {p.pid for p in self._stuck if processes.alive(p)} | ({server} if server is not None else set())

    def _control(self, order: Message) -> None:
        document = order["document"]
        self._control_seq = int(document["seq"])
        try:
            os.makedirs(
                self.run_dir, mode=0o700, exist_ok=True
            )  # where it was removed, a save still has to be asked for
            contract.write_atomically(order["path"], json.dumps(document).encode())
        except OSError as error:
            self._link.event(
                "noted", level="error", what=f"the control file {order['path']} cannot be written: {error}"
            )

    async def _answer_health(self) -> None:
        assert self.settings is not None
        self._health = await health.ask(self.devices, self.settings.health_command)
        self._tell_health()

    def _tell_health(self) -> None:
        assert self._health is not None
        self._link.event("health_reported", unhealthy=sorted(self._health.unhealthy), detail=self._health.detail)

    async def _answer_inventory(self, order: Message) -> None:
        self._link.event("inventory_reported", **await self._keeper.inventory(order))
        await self._keeper.clear_graves()  # no restart waits for this

    # --- by itself ---

    async def _tell_where_training_is(self) -> None:
        while True:
            # Said even where nothing runs: an agent that is silent counts as hanging.
            self._link.live(self.attempt.live() if self.attempt is not None else {"attempt": None, "ranks": {}})
            await asyncio.sleep(self.settings.live_interval_s if self.settings is not None else FIRST_LIVE_INTERVAL_S)

    async def _keep_warm(self) -> None:
        """Replace a forkserver that died or whose modules changed now, not when the next launch waits for it."""
        while True:
            await asyncio.sleep(WARMTH_INTERVAL_S)
            if self._warmth is not None and (self.attempt is None or self.attempt.workers):
                await asyncio.to_thread(self._warmth.kindle)

    async def _reap_orphans(self) -> None:
        """Collect children that were adopted and ended by themselves.

        The dead that somebody else is about to collect (elastic, asyncio) are not there any more at the next look.
        """
        before: set[processes.Process] = set()
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            self._kernel.look()
            attempt = self.attempt
            if attempt is not None and not attempt.workers:
                continue  # whom the launch has started is not known yet
            workers = {worker.pid for worker in attempt.workers.values()} if attempt is not None else set()
            dead = {p for p in processes.dead_children() if p.pid not in workers and p.pid not in self._own_children()}
            processes.reap(dead & before)
            before = dead

    async def _mind_logs(self) -> None:
        while True:
            await asyncio.sleep(logs.LOOK_INTERVAL_S)
            if self.attempt is not None:
                self._logs.begin(self.attempt.number, self.attempt.directory, self.attempt.ranks)
            if self.settings is not None:
                for warning in await asyncio.to_thread(self._logs.look, self.settings.logs):
                    self._link.event("noted", level="warning", what=warning)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health_interval_s if self.settings is not None else 1.0)
            if self.settings is None or self._health is None:
                continue
            before = self._health
            self._health = await health.ask(self.devices, self.settings.health_command)
            if self._health != before:
                self._tell_health()

    async def _watch_fence(self) -> None:
        """End what this node carries alone, once the daemon may take the node for lost and launch elsewhere."""
        while True:
            await asyncio.sleep(FENCE_LOOK_S)
            fence_s = self.settings.fence_timeout_s if self.settings is not None else None
            if fence_s is None:
                continue
            attempt = self.attempt
            alone_s = time.monotonic() - self._link.heard_at
            if attempt is None:
                # What an agent before this one launched is watched by nobody: the order to end it may not have come.
                number = newest_attempt(self.run_dir)
                if alone_s >= fence_s and number is not None and number not in self._ended:
                    await self._sweep_orphans(number)
                continue
            if attempt.fenced(alone_s, fence_s):
                attempt.fence(f"node {self.node} could not reach the daemon for {alone_s:.0f} s and ended its workers")

    async def _watch_orphanhood(self) -> None:
        """Without a daemon: go on for `orphan_timeout`, then save, stop, and leave."""
        asked = False
        while True:
            await asyncio.sleep(1.0)
            if self._link.connected:
                asked = False
                continue
            timeout = self.settings.orphan_timeout_s if self.settings is not None else 60.0
            alone = time.monotonic() - self._link.last_contact
            if self._home.gone() and not asked:
                # No daemon will ever find this agent again, and one of a new run would train beside it.
                asked = True
                self._save_and_leave(f"the run directory {self.run_dir} was removed")
            elif alone >= timeout and not asked:
                asked = True
                log.warning("no daemon for %.0f s", alone)
                self._save_and_leave("no daemon within cluster.orphan_timeout")

    def _save_and_leave(self, reason: str) -> None:
        """Nobody decides for this agent any more: have the attempt save and stop, then go."""
        attempt = self.attempt
        if attempt is None:
            log.warning("leaving: %s", reason)
            self._spawn(self._leave(ALONE_DRAIN_S))
            return
        log.warning("saving and stopping attempt %d: %s", attempt.number, reason)
        if 0 not in attempt.ranks:  # rank 0's node is alone as well, and asks for the save
            self._spawn(self._stop_late(attempt))
            return
        document = contract.Control(
            seq=self._control_seq + 1_000_000, attempt=attempt.number, interval_s=None, interval_steps=None,
            save_request=1_000_000, stop_after_save=True, reason=reason, issued_at=time.time(),
        )  # fmt: skip
        try:
            os.makedirs(self.run_dir, mode=0o700, exist_ok=True)
            document.write(os.path.join(self.run_dir, contract.CONTROL_FILE))
        except OSError as error:
            log.error("the control file cannot be written (%s): stopping without a save", error)
            attempt.stop(grace=True)
        self._spawn(self._stop_late(attempt))

    async def _stop_late(self, attempt: Attempt) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(attempt.ended.wait(), ALONE_SAVE_S)
        attempt.stop(grace=True)
        await attempt.ended.wait()
        if not self._link.connected:
            await self._leave(ALONE_DRAIN_S)


def _open_store(host: str) -> Any:
    from ckptd.node import elastic

    return elastic.open_store(host)


def main() -> None:
    """Entry of `python -m ckptd.node`: `--stdin` starts an agent beside it, one JSON object says what to carry."""
    if sys.argv[1:] == ["--stdin"]:
        from ckptd.node import arrival

        sys.exit(arrival.main())
    options = json.loads(sys.argv[1])
    ready_fd = options.pop("ready_fd", None)
    ready_says = options.pop("ready_says", "ready")
    if options.pop("secret_on_stdin", False):
        options["secret"] = parse_secret(sys.stdin.readline().strip(), where="standard input")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        agent = Agent(**options)
    except CkptdError as error:
        print(f"ckptd: {error}", file=sys.stderr)
        sys.exit(int(error.exit_status))
    if ready_fd is not None:
        os.write(ready_fd, f"{ready_says}\n".encode())
        os.close(ready_fd)
    agent.run()
