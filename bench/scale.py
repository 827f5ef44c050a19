"""What does the daemon cost with many nodes, and how fast does it launch all of them, or do without one?

    python bench/scale.py [--sizes 16,64,256,1024,2048] [--seconds 40]

For each size one real daemon, in a process of its own, and that many nodes of 8 devices on paper (`paper_nodes.py`): real
TCP connections with the real handshake and protocol, in two more processes. First all dial in and are launched on; then
the daemon is watched for a while as heartbeats come in; then one node falls silent, as if its cable were cut, and training
is to go on without it. Times are read off the ledger, on the run's own clock, and the daemon's processor time off the
kernel: on a machine that is busy with other things only the latter means much. Prints a table and a JSON line.

Aims at 2,048 nodes: 30 % of a core, 2 s to launch, `heartbeat_timeout` + 3 s from silence to relaunch, 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from daemon_idle import cpu_seconds

from ckptd import jobspec, link
from ckptd.core import events as ev
from ckptd.daemon import Daemon
from ckptd.door import open_door
from ckptd.ledger import Ledger
from ckptd.rundir import RunDir

RUN_ID = "0123456789ab"
PARTS = 2
PATIENCE_S = 240.0
HEARTBEAT_TIMEOUT_S = 30.0
AIMS = {"cpu_percent": 30.0, "launch_s": 2.0, "relaunch_s": 3.0, "rss_mb": 300.0}


class Nobody:
    """A launcher that starts nothing: the nodes on paper dial by themselves."""

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[str]:
        return self._nodes

    def python(self, _node: str) -> None:
        return None

    def start(self, node: str, *, replace: bool) -> None: ...

    def end(self, node: str) -> None: ...

    def busy(self, _node: str) -> bool:
        return False

    def arrival(self, _node: str) -> None:
        return None

    def close(self, *, over: bool) -> None: ...


def supervise(job: str) -> int:
    """The daemon's process."""
    spec = jobspec.load(job)
    run_dir = RunDir(spec.run_dir_path)
    run_dir.create()
    with run_dir.acquire_lock(), Ledger.open(run_dir.ledger_path) as ledger:
        door = open_door(spec, run_dir, epoch=0)
        launcher = Nobody([host.host for host in spec.cluster.hosts])
        daemon = Daemon(
            spec=spec, run_dir=run_dir, run_id=RUN_ID, ledger=ledger, launcher=launcher, door=door,
            socket_path=run_dir.socket_path(),
        )  # fmt: skip
        return asyncio.run(daemon.run())


def memory_mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1000


class Cluster:
    """One daemon and its nodes on paper."""

    def __init__(self, directory: Path, size: int) -> None:
        self.run_dir = RunDir(directory / "run")
        self.names = [f"n{i:04d}" for i in range(size)]
        (directory / "train.py").write_text("")
        document = {
            "version": 1, "name": "scale", "command": ["train.py"], "run_dir": "run", "web": {"listen": None},
            "cluster": {"launcher": "ssh", "hosts": self.names, "devices_per_node": 8, "listen": "127.0.0.1:0",
                        "heartbeat_timeout": HEARTBEAT_TIMEOUT_S},
            "checkpoint": {"interval": "1h", "tiers": [{"name": "disk", "path": "ckpt", "shared": True}]},
        }  # fmt: skip
        (directory / "job.yaml").write_text(yaml.safe_dump(document))
        self.daemon = subprocess.Popen([sys.executable, __file__, "--daemon", str(directory / "job.yaml")])
        self.parts: list[subprocess.Popen[str]] = []
        self._events: list[ev.Event] = []
        self._last = 0

    def dial(self) -> None:
        """Have all nodes dial in at once."""
        self.wait(lambda: self.of(ev.DaemonStarted), 0.1)
        listens = json.loads(self.run_dir.listen_path.read_text())
        common = {"run_id": RUN_ID, "secret": self.run_dir.secret_path.read_text().strip(), "host": "127.0.0.1",
                  "port": listens["port"]}  # fmt: skip
        script = str(Path(__file__).with_name("paper_nodes.py"))
        for part in range(PARTS):
            process = subprocess.Popen(
                [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            process.stdin.write(json.dumps({**common, "nodes": self.names[part::PARTS]}) + "\n")
            process.stdin.flush()
            self.parts.append(process)

    def silence(self, index: int) -> float:
        """Cut the cable of a node; returns when it was last heard, by the monotonic clock."""
        process = self.parts[index % PARTS]
        process.stdin.write(self.names[index] + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())["last_word"]

    def of(self, kind: type, attempt: int | None = None) -> list:
        """The events of a kind so far."""
        if self.run_dir.ledger_path.exists():
            with contextlib.suppress(Exception), Ledger.open(self.run_dir.ledger_path, readonly=True) as ledger:
                found = list(ledger.events(self._last))
                self._events += [event for _, event in found]
                self._last = found[-1][0] if found else self._last
        return [e for e in self._events if isinstance(e, kind) and attempt in (None, e.attempt)]

    def wait(self, true, every_s: float = 1.0):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true()):
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cluster of {len(self.names)} did not come to it")
            time.sleep(every_s)
        return found

    def until_started(self, attempt: int, size: int) -> tuple[float, float]:
        """(when the attempt was launched, when its last node had started), on the run's clock."""
        started = self.wait(lambda: len(found := self.of(ev.WorkersStarted, attempt)) >= size and found)
        return self.of(ev.AttemptLaunched, attempt)[0].t, max(e.t for e in started)

    def on_run_clock(self, mono: float) -> float:
        begun = self.of(ev.DaemonStarted)[0]
        return begun.t + mono - begun.mono

    def close(self) -> None:
        for process in [*self.parts, self.daemon]:
            process.kill()
            process.wait()


def measure(size: int, seconds: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as scratch:
        cluster = Cluster(Path(scratch), size)
        pid = cluster.daemon.pid
        try:
            began = cpu_seconds(pid)
            cluster.dial()
            first, last = cluster.until_started(1, size)
            dialled = [e.t for e in cluster.of(ev.AgentConnected)]
            time.sleep(5.0)  # let what the launch has left behind be done
            settled = cpu_seconds(pid)
            time.sleep(seconds)
            steady = cpu_seconds(pid) - settled
            rss = memory_mb(pid, "VmRSS")
            asked = time.monotonic()
            answer = link.ask_daemon(cluster.run_dir.socket_path(), {"what": "status"}, timeout=PATIENCE_S)
            asked = time.monotonic() - asked
            before, cut = cpu_seconds(pid), time.monotonic()
            quiet_from = cluster.on_run_clock(cluster.silence(size // 2))
            again, relaunched = cluster.until_started(2, size - 1)
            spent = cpu_seconds(pid) - before
            lost = cluster.of(ev.NodeLost)
            stopped = max(e.t for e in cluster.of(ev.AttemptEnded, 1))
            assert [e.node for e in lost] == [cluster.names[size // 2]], "the others are not lost"
            return {
                "nodes": size,
                "cpu_percent": round(100 * steady / seconds, 2),
                "rss_mb": round(rss, 1),
                "dial_s": round(max(dialled) - min(dialled), 2),
                "launch_s": round(last - first, 2),
                "start_cpu_s": round(settled - began, 2),
                "relaunch_s": round(relaunched - quiet_from - HEARTBEAT_TIMEOUT_S, 2),
                "noticed_s": round(lost[0].t - quiet_from - HEARTBEAT_TIMEOUT_S, 2),
                "stop_s": round(stopped - lost[0].t, 2),
                "ask_s": round(again - stopped, 2),
                "second_launch_s": round(relaunched - again, 2),
                # Without what the heartbeats of the meantime cost.
                "relaunch_cpu_s": round(spent - steady / seconds * (time.monotonic() - cut), 2),
                "peak_mb": round(memory_mb(pid, "VmHWM"), 1),
                "status_s": round(asked, 3),
                "status_kb": round(len(json.dumps(answer)) / 1000, 1),
                "ledger_mb": round(sum(p.stat().st_size for p in Path(scratch, "run").glob("ledger*")) / 1e6, 1),
                "load": round(os.getloadavg()[0], 1),
            }
        finally:
            cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,256,1024,2048")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long heartbeats are watched")
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.daemon:
        sys.exit(supervise(options.daemon))
    rows = []
    for size in map(int, options.sizes.split(",")):
        rows.append(measure(size, options.seconds))
        if len(rows) == 1:
            print(" ".join(f"{name:>15}" for name in rows[0]))
        print(" ".join(f"{value:15}" for value in rows[-1].values()), flush=True)
    print(json.dumps({"bench": "scale", "seconds": options.seconds, "aims": AIMS, "rows": rows}))


if __name__ == "__main__":
    main()
