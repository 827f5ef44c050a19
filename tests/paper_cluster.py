"""A cluster that exists only on paper: it does what the core commands, and goes wrong where it is told to.

It knows the truth that the core can only infer: which processes live, and which checkpoints are whole. So it can tell
at each launch whether the core was right to ask for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.commands import Ask, Command, Launch, OpenStore, Record, Steer, Stop
from ckptd.core.policy import Policy
from ckptd.core.state import LIVE, Status

MAX_RECORDS = 10
FENCE_S, HEARTBEAT_S = 20.0, 30.0


@dataclass
class Commit:
    """A checkpoint on the disk that all nodes share."""

    sequence: int
    step: int
    attempt: int
    whole: bool = True

    def as_chosen(self) -> dict[str, Any]:
        name = f"/ckpt/step_{self.step:09d}.a{self.attempt:04d}"
        return {"step": self.step, "tier": "disk", "path": name, "marker_crc32c": "00000000",
                "sequence": self.sequence, "attempt": self.attempt, "samples_seen": self.step, "world_size": 1,
                "comparable": True, "run_id": "r"}  # fmt: skip


@dataclass
class Machine:
    """A node: its agent, and the processes of an attempt on it."""

    name: str
    devices: list[int]
    agent: int = 0
    """Number of its agent, 0 for none."""
    connected: bool = False
    sick: set[int] = field(default_factory=set)
    processes: int | None = None
    """The attempt whose workers live here."""
    carried: int | None = None
    """The attempt that the agent carries; None with `processes`: they are orphans of an agent before it."""
    ordered: int | None = None
    """An attempt that the agent is told to launch and has not launched yet."""
    opening: int | None = None
    """An attempt whose store the agent is told to open."""
    store: int | None = None
    """The attempt whose store it keeps open."""
    span: tuple[str, ...] = ()
    """All nodes of the attempt that it carries."""
    cut_t: float | None = None
    """Since when no network leads to it; its agent and its workers know nothing of that."""
    for_good: bool = False
    stop: int | None = None
    over: set[int | None] = field(default_factory=set)
    """Attempts whose end this agent has told."""
    questions: set[str] = field(default_factory=set)
    avoid: tuple[str, ...] = ()
    said: set[tuple[Any, ...]] = field(default_factory=set)
    spool: list[ev.Event] = field(default_factory=list)


class World:
    """One run in it, driven by `moves`."""

    def __init__(self, policy: Policy, nodes: dict[str, int], *, remote: bool = False) -> None:
        self.policy = dataclasses.replace(policy, nodes=tuple(nodes)) if remote else policy
        self.t = 0.0
        self.machines = {name: Machine(name, list(range(devices))) for name, devices in nodes.items()}
        self.disk: list[Commit] = []
        self.log: list[ev.Event] = []
        self.picture = picture.Picture()
        self.daemon = False
        self.agents = 0
        self.phase = 0
        """How far the live attempt has come: 0 launched, 1 initialised, 2 restored, 3 training."""
        self.step = 0
        self.closing = False
        """The last save is committed: what is left to do is to end."""
        self.steer: Steer | None = None
        self.launched_since_progress = 0
        self.newest_step = 0

    @property
    def state(self) -> Any:
        return self.picture.run

    @property
    def ended(self) -> bool:
        return self.state.status is Status.ENDED

    # --- the daemon ---

    def tell(self, event: ev.Event) -> None:
        """An event reaches the ledger."""
        self.log.append(event)
        self.picture = picture.apply(self.picture, event)

    def act(self) -> None:
        """What the daemon's loop does: decide until nothing more is to be recorded, then give orders."""
        for _ in range(MAX_RECORDS):
            if self.ended:
                self._check_end()
                return
            commands = picture.decide(self.picture, self.t)
            if not any(isinstance(c, Record) for c in commands):
                break
            assert len(commands) == 1, "a record stands alone"
            record = commands[0]
            assert isinstance(record, Record)
            self._check_record(record.event)
            self.tell(record.event)
        else:
            raise AssertionError(f"recorded for ever: {commands[0]}")
        self.steer = next((c for c in commands if isinstance(c, Steer)), None)
        for command in commands:
            self._order(command)

    def _order(self, command: Command) -> None:
        if not isinstance(command, Ask | OpenStore | Launch | Stop):
            return
        machine = self.machines[command.node]
        key = (command.node, command.what) if isinstance(command, Ask) else (
            type(command), *dataclasses.astuple(command))  # fmt: skip
        if not machine.connected or key in machine.said:
            return
        machine.said.add(key)
        match command:
            case Ask(what=what, avoid=avoid):
                machine.questions.add(what)
                machine.avoid = avoid
            case OpenStore(attempt=attempt):
                assert machine is self._first
                machine.opening = attempt
            case Launch(attempt=attempt):
                if len(self.state.placement) > 1:
                    assert self._first.store == attempt, "the workers would have nowhere to meet"
                assert machine.processes is None, f"{command} while attempt {machine.processes} lives there"
                machine.ordered = attempt
            case Stop(attempt=attempt):
                machine.stop = attempt

    def _check_record(self, event: ev.Event) -> None:
        if isinstance(event, ev.AttemptLaunched):
            self._check_launch(event)
        if isinstance(event, ev.RunEnded):
            alive = self._able_to_train()
            assert not alive, f"the run is called over while attempts live: {alive}"

    def _check_launch(self, event: ev.AttemptLaunched) -> None:
        alive = self._able_to_train()
        assert not alive, f"attempt {event.attempt} is launched beside {alive}"
        assert event.attempt == self.state.attempt + 1
        whole = [c for c in self.disk if c.whole]
        assert event.resume == self.state.inventory.chosen
        if not whole:
            assert event.resume is None
            assert not self.disk, "a cold start although there are commits"
        else:
            assert event.resume == self._newest(whole, self.state.suspects), "not the newest whole commit without doubt"
        used = {name: set(indices) for name, indices in event.placement.items()}
        for name, indices in used.items():
            assert indices <= set(self.machines[name].devices)
        assert sum(map(len, used.values())) == event.world_size > 0
        self.launched_since_progress += 1
        assert self.launched_since_progress <= self.policy.max_without_progress + self._free_launches()
        self.closing = False
        self.phase, self.step = 0, (event.resume or {}).get("step", 0)

    def _able_to_train(self) -> dict[str, int]:
        """Attempts that live, and on which node: but not what cannot train without the others, and is known to be there."""
        known = self.state.nodes
        return {
            m.name: m.processes
            for m in self.machines.values()
            if m.processes is not None and (self._moves(m) or known[m.name].unclean != m.processes)
        }

    def _moves(self, m: Machine) -> bool:
        """Whether every node of its attempt still carries it."""
        return all(self.machines[name].processes == m.processes for name in m.span)

    @staticmethod
    def _newest(whole, avoid):
        """What an agent chooses: the newest whole commit, those to avoid only where there is no other."""
        if not whole:
            return None
        clear = [c for c in whole if c.as_chosen()["path"] not in avoid]
        return (clear or whole)[-1].as_chosen()

    def _free_launches(self) -> int:
        """Launches since the last progress that the budget does not count.

        Planned ones, those that never ran, and a fresh budget for each time that a device was put into quarantine.
        """
        free = sum(1 for e in self.log if isinstance(e, ev.Interrupted) and (e.planned or e.severity == "launch"))
        return free + self.policy.max_without_progress * sum(r.times for r in self.state.book.records.values())

    def _check_end(self) -> None:
        outcome = self.state.outcome
        allowed = {"finished": {0}, "failed": {1}, "unavailable": {69}, "stopped": {75, 130}}
        assert outcome.exit_status in allowed[outcome.outcome], outcome

    # --- what can happen ---

    def moves(self, *, faults: bool) -> list[Callable[[], None]]:
        """Everything that may happen next by itself, or, with `faults`, everything that may go wrong."""
        found = [
            functools.partial(self._do, m, name)
            for m in self.machines.values()
            for name in (self.faults_of(m) if faults else self.moves_of(m))
        ]
        if not faults:
            return [*found, self.pass_time] if self.daemon else [*found, self.start_daemon]
        if self.daemon:
            asked = ("save", "stop", "stop_now") if self.t > 1000.0 else ("save",)  # later, or most runs would be short
            requests = [functools.partial(self.request, what) for what in asked]
            found += [self.kill_daemon, *requests]
        return [*found, self.damage]

    def _do(self, machine: Machine, name: str) -> None:
        getattr(self, name)(machine)
        if self.daemon:
            self.act()

    def moves_of(self, m: Machine) -> list[str]:
        """What a node may do next, by the names of methods."""
        reachable = self.daemon and m.cut_t is None
        if not m.agent:
            return ["start_agent"] if reachable else []
        names = ["dial"] if reachable and not m.connected else []
        if m.cut_t is not None and not m.for_good:
            names.append("rejoin")
        names += [f"answer_{what}" for what in sorted(m.questions)]
        if m.stop is not None:
            names.append("obey_stop")
        elif m.opening is not None:
            names.append("open_store")
        elif m.ordered is not None:
            names.append("launch")
        elif m.carried is not None:
            names += self._moves_of_workers(m)
        return names

    def faults_of(self, m: Machine) -> list[str]:
        """What may go wrong on a node now."""
        if not m.agent:
            return []
        # One that dies where nobody can see it, beside workers that nobody can reach, is a fault that is not survived.
        names = ["kill_agent"] if m.cut_t is None else []
        if m.connected:
            names += ["drop", "sicken"]
        if self.policy.nodes and m.cut_t is None:
            names += ["cut", "vanish"]
        if m.stop is None and m.ordered is not None:
            names.append("fail_launch")
        if m.stop is None and m.carried is not None:
            names.append("crash")
            if "train" in self._moves_of_workers(m):
                names.append("reject")
        return names

    def _moves_of_workers(self, m: Machine) -> list[str]:
        if m.carried != self.state.attempt or m.name not in self.state.placement:
            return []
        if self.closing:
            return ["finish"]
        everywhere = all(self.machines[n].processes == m.carried for n in self.state.placement)
        if not everywhere or m is not self._first:
            return []
        return ["advance"] if self.phase < 3 else ["train", "commit", "finish"]

    @property
    def _first(self) -> Machine:
        """The node of rank 0."""
        return self.machines[next(iter(self.state.placement))]

    # --- the daemon's and the agents' lives ---

    def start_daemon(self) -> None:
        self.daemon = True
        self.picture = picture.replay(self.log)
        if self.ended and self.state.outcome.outcome == "finished":
            return
        self.tell(ev.DaemonStarted(t=self.t, policy=self.policy.to_dict()))
        self.launched_since_progress = 0 if self.log[-2:-1] and isinstance(self.log[-2], ev.RunEnded) else (
            self.launched_since_progress)  # fmt: skip
        self.act()

    def kill_daemon(self) -> None:
        self.daemon = False
        for m in self.machines.values():
            self._hang_up(m)

    def _hang_up(self, m: Machine) -> None:
        m.connected = False
        m.said = set()
        m.questions = set()

    def drop(self, m: Machine) -> None:
        self._hang_up(m)

    def cut(self, m: Machine) -> None:
        """The network to a node fails: that is noticed by nobody, at first."""
        self._hang_up(m)
        m.cut_t = self.t

    def vanish(self, m: Machine) -> None:
        self.cut(m)
        m.for_good = True

    def rejoin(self, m: Machine) -> None:
        m.cut_t = None

    def start_agent(self, m: Machine) -> None:
        self.agents += 1
        m.agent = self.agents
        self.dial(m)

    def dial(self, m: Machine) -> None:
        m.connected = True
        devices = [{"index": i} for i in m.devices]
        running = m.carried if m.ordered is None else m.ordered
        self.tell(ev.AgentConnected(t=self.t, node=m.name, pid=m.agent, devices=devices, running=running))
        for event in m.spool:
            self.tell(event)
            self.act()
        m.spool = []

    def kill_agent(self, m: Machine) -> None:
        """Its workers live on. The daemon notices a death, since it looks for the process."""
        m.agent, m.carried, m.ordered, m.stop, m.spool, m.over = 0, None, None, None, [], set()
        m.opening = m.store = None
        self._hang_up(m)
        if self.daemon:
            self.tell(ev.AgentLost(t=self.t, node=m.name, why="killed"))

    def sicken(self, m: Machine) -> None:
        m.sick ^= {m.devices[0]}
        if self.state.nodes[m.name].health_known:
            self._emit(m, ev.HealthReported(t=self.t, node=m.name, unhealthy=sorted(m.sick)))

    def _emit(self, m: Machine, event: ev.Event) -> None:
        """An agent keeps what happened until a daemon has it."""
        if m.connected:
            self.tell(event)
        else:
            m.spool.append(event)

    # --- answers and orders ---

    def answer_health(self, m: Machine) -> None:
        m.questions.discard("health")
        m.said.discard((m.name, "health"))
        self._emit(m, ev.HealthReported(t=self.t, node=m.name, unhealthy=sorted(m.sick)))

    def answer_inventory(self, m: Machine) -> None:
        m.questions.discard("inventory")
        m.said.discard((m.name, "inventory"))
        whole = [c for c in self.disk if c.whole]
        self._emit(m,
            ev.InventoryReported(
                t=self.t, node=m.name, chosen=self._newest(whole, m.avoid), commits=len(self.disk),
                newest_sequence=max((c.sequence for c in self.disk), default=0),
                rejected=[{"path": f"step {c.step}", "problem": "damaged"} for c in self.disk if not c.whole],
            )
        )  # fmt: skip

    def open_store(self, m: Machine) -> None:
        m.store, m.opening = m.opening, None
        self._emit(m, ev.StoreOpened(t=self.t, attempt=m.store, node=m.name, host=m.name, port=1))

    def launch(self, m: Machine) -> None:
        m.span = tuple(self.state.placement) if m.ordered == self.state.attempt else (m.name,)
        assert m.processes is None, f"attempt {m.ordered} is launched beside {m.processes}"
        m.processes = m.carried = m.ordered
        m.ordered = None
        self._emit(m, ev.WorkersStarted(t=self.t, attempt=m.carried, node=m.name, workers={"0": {"pid": 1}}))

    def fail_launch(self, m: Machine) -> None:
        attempt, m.ordered = m.ordered, None
        self._emit(m, ev.FailureDetected(t=self.t, detected_t=self.t, attempt=attempt, node=m.name, launch=True))
        self._gone(m, attempt, [])

    def obey_stop(self, m: Machine) -> None:
        attempt, m.stop = m.stop, None
        assert attempt is not None
        if m.opening is not None and m.opening <= attempt:  # one that is newer was asked for since
            m.opening = None
        if attempt in m.over:
            return  # the order and the news that it is over have crossed
        assert m.processes in (None, attempt), f"told to stop {attempt}, here is {m.processes}"
        m.ordered = None
        self._gone(m, attempt, [{"rank": 0, "exitcode": -9, "killed_by_us": True}])

    def _gone(self, m: Machine, attempt: int | None, exits: list[dict[str, Any]]) -> None:
        m.processes = m.carried = m.stop = None
        m.over.add(attempt)
        self._emit(m, ev.AttemptEnded(t=self.t, attempt=attempt, node=m.name, exits=exits, step=self.step))

    # --- training ---

    def advance(self, m: Machine) -> None:
        made: ev.Event
        if self.phase == 0:
            made = ev.WorkersInitialised(t=self.t, attempt=m.carried, node=m.name, world_size=1)
        elif self.phase == 1:
            made = ev.StateRestored(t=self.t, attempt=m.carried, node=m.name, step=self.step)
        else:
            self.step += 1
            made = ev.FirstStep(t=self.t, attempt=m.carried, node=m.name, step=self.step)
        self.phase += 1
        self._emit(m, made)

    def train(self, m: Machine) -> None:
        self.step += 3
        self._emit(m, ev.Progress(t=self.t, attempt=m.carried, node=m.name, step=self.step))

    def commit(self, m: Machine) -> None:
        assert m.carried is not None
        if self.disk and (self.disk[-1].step, self.disk[-1].attempt) == (self.step, m.carried):
            return
        sequence = max((c.sequence for c in self.disk), default=0) + 1
        self.disk.append(Commit(sequence, self.step, m.carried))
        chosen = self.disk[-1].as_chosen()
        if self.step > self.newest_step:
            self.newest_step, self.launched_since_progress = self.step, 0
        self._emit(m,
            ev.SaveCommitted(t=self.t, attempt=m.carried, node=m.name, step=self.step, sequence=sequence,
                             path=chosen["path"], tier="disk", stall_s=0.1, upload_s=0.2)
        )  # fmt: skip

    def reject(self, m: Machine) -> None:
        """The guard refuses what would have been the next commit."""
        self.step += 1
        self._emit(m, ev.SaveRejected(t=self.t, attempt=m.carried, node=m.name, step=self.step, tier="disk", why="NaN"))

    def finish(self, m: Machine) -> None:
        """The node's workers end with 0: because all is done, or because the control file asks for it."""
        stopping = self.steer is not None and self.steer.stop_after_save
        if not self.closing:
            self.commit(m)
            self.closing = True
        attempt = m.carried
        m.processes = None
        self._emit(m, ev.WorkersFinished(t=self.t, attempt=attempt, node=m.name, step=self.step, stopping=stopping,
                                     closed=True))  # fmt: skip
        self._gone(m, attempt, [{"rank": 0, "exitcode": 0}])

    def crash(self, m: Machine) -> None:
        attempt = m.carried
        self._emit(m, ev.FailureDetected(t=self.t, detected_t=self.t, attempt=attempt, node=m.name, rank=0, exitcode=-9,
                                     step=self.step, detail="rank 0 was killed"))  # fmt: skip
        self._gone(m, attempt, [{"rank": 0, "exitcode": -9, "order": 0, "step": self.step}])

    # --- from outside ---

    def request(self, what: Any) -> None:
        status = 75 if what != "save" else None
        self.tell(ev.Requested(t=self.t, request=what, source="test", exit_status=status, timeout_s=60.0))
        self.act()

    def damage(self) -> None:
        """The newest commit rots; not while it is being read for a launch, which the shim would refuse."""
        if self.disk and self.state.status in LIVE:
            self.disk[-1].whole = False

    def pass_time(self, seconds: float = 40.0) -> None:
        self.t += seconds
        for m in self.machines.values():
            if m.cut_t is None or self.t - m.cut_t < FENCE_S:
                continue
            self._fence(m)
            known = self.state.nodes.get(m.name)
            if self.t - m.cut_t >= HEARTBEAT_S and (known is None or known.gone_t is None):
                self.tell(ev.NodeLost(t=self.t, node=m.name, why="no word", silent_s=HEARTBEAT_S))
                self.act()
        self.act()

    def _fence(self, m: Machine) -> None:
        """What an agent does that has not reached the daemon for a while."""
        m.opening = m.ordered = None
        if m.carried is None and m.processes is not None and m.agent:
            self._gone(m, m.processes, [])  # orphans of the agent before
        if m.carried is None or m.cut_t is None:
            return
        lone = len(m.span) < 2
        if lone or not self._moves(m) or self.t - m.cut_t >= self.policy.orphan_timeout_s:
            attempt = m.carried
            self._emit(m, ev.FailureDetected(t=self.t, detected_t=self.t, attempt=attempt, node=m.name, lost="node",
                                             step=self.step))  # fmt: skip
            self._gone(m, attempt, [{"rank": 0, "exitcode": -9, "killed_by_us": True}])

    def run_again(self) -> None:
        """`ckptd run` on a run that had ended."""
        self.kill_daemon()
        for m in self.machines.values():
            m.agent, m.carried, m.ordered, m.stop, m.spool, m.over = 0, None, None, None, [], set()
            m.opening = m.store = None
            if m.cut_t is not None:  # by the time that somebody comes back to it
                m.cut_t, m.processes = None, None
        self.start_daemon()
