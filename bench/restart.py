"""R, from kill -9 of a worker to the first step after it: ckptd against torchrun, the same script, in one run.

    python bench/restart.py --kills 50 --peer-kills 50
    python bench/restart.py --kills 20 --peer-kills 10 --megabytes 33      # a checkpoint of 100 MB is restored
    python bench/restart.py --kills 10 --peer-kills 3 --deaf               # workers that block SIGTERM

torchrun runs twice: as it comes, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (`fair`), without which a part of its
restarts hangs (a restart that takes more than --patience counts as hung, and the job is started again).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

JOB = Path(__file__).with_name("restart_job.py")


class Runner:
    """One way to run the job, killed again and again."""

    name = ""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self.trace = directory / "trace"
        self.trace.touch()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()
        self.restarts: list[float] = []
        self.hung = 0
        self.warmth = float("nan")
        self.arguments = ["--trace", str(self.trace), "--megabytes", str(options.megabytes)]
        self.arguments += ["--deaf"] if options.deaf else []

    @property
    def kills(self) -> int:
        return len(self.restarts) + self.hung

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **self.environment()},
            )  # fmt: skip
        if self.first_step_after(time.monotonic(), set(), timeout=120) is None:
            raise SystemExit(f"{self.name} does not start; see {self.directory / 'log'}")

    def lines(self) -> list[tuple[float, int, int, int]]:
        found = []
        for line in self.trace.read_text().splitlines():
            with contextlib.suppress(ValueError):
                at, pid, rank, step = line.split()
                found.append((float(at), int(pid), int(rank), int(step)))
        return found

    def first_step_after(self, moment: float, old: set[int], *, timeout: float) -> float | None:
        """When every rank had completed a step in a process that is not one of `old`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            fresh: dict[int, tuple[float, int]] = {}
            for at, pid, rank, _ in self.lines()[-4000:]:
                if at > moment and pid not in old and rank not in fresh:
                    fresh[rank] = (at, pid)
            if len(fresh) == 2:
                self.pids = {pid for _, pid in fresh.values()}
                return max(at for at, _ in fresh.values())
            time.sleep(0.005)
        return None

    def victim(self) -> int:
        newest = {rank: pid for _, pid, rank, _ in self.lines()[-200:]}
        return newest[random.randrange(2)]

    def kill_once(self) -> None:
        time.sleep(random.uniform(1.0, 2.0))
        old = {pid for _, pid, _, _ in self.lines()}
        victim = self.victim()
        moment = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        after = self.first_step_after(moment, old, timeout=self.options.patience)
        if after is None:
            self.hung += 1
            self.stop()
            self.start()
        else:
            self.restarts.append(after - moment)

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        while left := self.children():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def children(self) -> list[int]:
        """Everything whose command line or environment names this runner's directory."""
        mark = str(self.directory).encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    place = Path("/proc") / entry
                    if mark in (place / "cmdline").read_bytes() or mark in (place / "environ").read_bytes():
                        found.append(int(entry))
        return found


class Torchrun(Runner):
    name = "torchrun"

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000",
            str(JOB), *self.arguments, "--directory", str(self.directory / "checkpoints"),
        ]  # fmt: skip


class FairTorchrun(Torchrun):
    name = "torchrun, fair"

    def environment(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Ckptd(Runner):
    name = "ckptd"
    warm = True

    def command(self) -> list[str]:
        spec = {
            "name": "bench",
            "command": [str(JOB), *self.arguments],
            "run_dir": str(self.directory / "run"),
            "cluster": {"devices_per_node": 2},
            "checkpoint": {
                "interval": {"steps": 20},
                "tiers": [{"name": "disk", "path": str(self.directory / "checkpoints")}],
            },
            "restart": {"max_without_progress": 1000, "warm": self.warm},
            "web": {"listen": None},
        }
        path = self.directory / "job.yaml"
        path.write_text(yaml.safe_dump(spec))
        return [sys.executable, "-m", "ckptd", "run", str(path)]

    def stop(self) -> None:
        # Killing the daemon would leave the job alone, as it is meant to: ask it, and it leaves nothing.
        assert self.process is not None
        subprocess.run(
            [sys.executable, "-m", "ckptd", "stop", "--now", str(self.directory / "run")],
            check=False,
            capture_output=True,
        )
        self.process.wait(timeout=60)
        super().stop()


class ColdCkptd(Ckptd):
    name = "ckptd, cold"
    warm = False


def memory_of_warmth(runner: Runner) -> float:
    """Memory of the forkserver that nobody shares (proportional set size), MiB; NaN where there is none."""
    parents = {int(entry): _parent(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()}
    agents = {pid for pid in runner.children() if b"ckptd.node" in _command(pid)}
    for pid, parent in parents.items():
        # It carries its code on the command line; the workers that are forked from it have another parent by then.
        if parent in agents and b"ckptd_shim" in _command(pid) and pid not in runner.pids:
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                return sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024
    return float("nan")


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of ckptd")
    parser.add_argument("--peer-kills", type=int, default=None, help="of each other runner (default: as many)")
    parser.add_argument("--megabytes", type=float, default=0.1)
    parser.add_argument("--turn", type=int, default=5, help="kills before it is the next one's turn")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--only", nargs="*", default=["ckptd", "torchrun, fair", "torchrun"])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    peers = options.kills if options.peer_kills is None else options.peer_kills
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as scratch:
        runners = [
            cls(Path(scratch) / cls.__name__, options)
            for cls in (Ckptd, ColdCkptd, FairTorchrun, Torchrun)
            if cls.name in options.only
        ]
        try:
            # One at a time, so that they do not take each other's cores; in turns, so that the machine's moods are shared.
            wanted = {runner.name: options.kills if runner.name == "ckptd" else peers for runner in runners}
            while due := [each for each in runners if each.kills < wanted[each.name]]:
                for runner in due:
                    runner.start()
                    for _ in range(min(options.turn, wanted[runner.name] - runner.kills)):
                        runner.kill_once()
                        print(
                            f"\r{runner.name}: {runner.kills}/{wanted[runner.name]}  ",
                            end="",
                            file=sys.stderr,
                            flush=True,
                        )
                    runner.warmth = memory_of_warmth(runner)
                    runner.stop()
                    runner.process = None
        finally:
            for runner in runners:
                if runner.process is not None:
                    runner.stop()
        table(runners)


def table(runners: list[Runner]) -> None:
    rows = {}
    for runner in runners:
        if runner.restarts:
            r = sorted(runner.restarts)
            rows[runner.name] = {
                "restarts": len(r), "hung": runner.hung, "first_s": runner.restarts[0], "median_s": statistics.median(r),
                "min_s": r[0], "max_s": r[-1],
                "forkserver_mib": None if math.isnan(runner.warmth) else round(runner.warmth),
            }  # fmt: skip
    fair = rows.get("torchrun, fair", {}).get("median_s")
    print(
        f"{'':16} {'restarts':>8} {'hung':>5} {'first':>8} {'median':>8} {'min':>8} {'max':>8} {'of fair torchrun':>17}"
    )
    for name, row in rows.items():
        ratio = f"{row['median_s'] / fair:.3f}" if fair else "-"
        print(
            f"{name:16} {row['restarts']:8} {row['hung']:5} {row['first_s']:7.2f}s {row['median_s']:7.2f}s "
            f"{row['min_s']:7.2f}s {row['max_s']:7.2f}s {ratio:>17}"
            + (f"  forkserver {row['forkserver_mib']} MiB" if row["forkserver_mib"] is not None else "")
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
