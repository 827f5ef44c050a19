"""A real `ckptd run` of a small real job, watched through its ledger, with nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ckptd.core import events as ev
from ckptd.ledger import Ledger
from ckptd.node import processes

HERE = Path(__file__).parent
TRAIN = HERE / "train.py"
PATIENCE_S = 90.0
"""A generous bound on anything that should happen: a worker's start alone takes seconds on a busy machine."""


class Job:
    """One run in a directory of its own."""

    def __init__(
        self, directory: Path, *args: str, devices: int = 2, script: str | Path = TRAIN, **sections: Any
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.run_dir = directory / "run"
        self.tier = directory / "ckpt"
        self.losses_path = directory / "losses"
        spec: dict[str, Any] = {
            "version": 1,
            "name": "job",
            "command": [str(script), "--losses", str(self.losses_path), *args],
            "run_dir": str(self.run_dir),
            "cluster": {"devices_per_node": devices},
            "batch": {"global": 12, "micro": 12},
            "checkpoint": {"interval": {"steps": 10}, "tiers": [{"name": "disk", "path": str(self.tier)}]},
            "web": {"listen": None},
        }
        for name, value in sections.items():
            spec[name] = (
                {**spec[name], **value} if isinstance(spec.get(name), dict) and isinstance(value, dict) else value
            )
        self.spec = spec
        self.path = directory / "job.yaml"
        self._write()
        self.process: subprocess.Popen[bytes] | None = None
        self.output_path = directory / "output"

    def _write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.spec))

    # --- the command line ---

    def start(self, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`ckptd run` in a session of its own, as a shell would start it."""
        with open(self.output_path, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptd", "run", str(self.path), *options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        return self.process

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """The daemon's exit status."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.output()}\n{self.story()}") from None

    def run(self, timeout: float = PATIENCE_S) -> int:
        self.start()
        return self.wait(timeout)

    def ckptd(self, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Another command on this run."""
        return subprocess.run(
            [sys.executable, "-m", "ckptd", *args], capture_output=True, text=True, timeout=timeout, check=False
        )

    def status(self) -> dict[str, Any]:
        done = self.ckptd("status", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def output(self) -> str:
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""

    # --- what happened ---

    def events(self) -> list[ev.Event]:
        path = self.run_dir / "ledger.db"
        if not path.exists():
            return []
        with contextlib.suppress(Exception), Ledger.open(path, readonly=True) as ledger:
            return [event for _, event in ledger.events()]
        return []  # it is being made just now

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in self.events() if isinstance(event, kind)]

    def wait_for(
        self, kind: type[ev.Event], where: Callable[[Any], bool] = lambda _event: True, *, timeout: float = PATIENCE_S,
        poll_s: float = 0.02,
    ) -> Any:  # fmt: skip
        """The first event of a kind that satisfies `where`, as soon as it is in the ledger."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.of(kind):
                if where(event):
                    return event
            ended = self.process is not None and self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no such {kind.__name__}\n{self.output()}\n{self.story()}")
            time.sleep(poll_s)

    def wait_until(self, true: Callable[[], bool], what: str, *, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"never: {what}\n{self.output()}\n{self.story()}")
            time.sleep(0.02)

    def story(self) -> str:
        """The ledger in words, for a failed assertion."""
        return "\n".join(f"{e.t:9.3f} a{e.attempt} {e.kind} {json.dumps(ev.data_of(e))[:300]}" for e in self.events())

    def workers(self, attempt: int | None = None) -> dict[int, int]:
        """rank -> pid of the newest attempt that started (or of `attempt`)."""
        started = [e for e in self.of(ev.WorkersStarted) if attempt is None or e.attempt == attempt]
        return {int(rank): worker["pid"] for rank, worker in started[-1].workers.items()}

    def attempt_dir(self, attempt: int) -> Path:
        return self.run_dir / "attempts" / f"{attempt:04d}"

    def losses(self) -> dict[int, str]:
        """step -> loss as rank 0 had it, exactly (hex); of a step trained twice, the last."""
        found: dict[int, str] = {}
        if self.losses_path.exists():
            for line in self.losses_path.read_text().splitlines():
                step, _, loss = line.partition(" ")
                if loss:
                    found[int(step)] = loss
        return found

    def commits(self) -> list[Path]:
        """Directories with a COMMITTED, by step."""
        return sorted(p.parent for p in (self.tier / "job").glob("step_*/COMMITTED"))

    def agent_pid(self) -> int:
        return int(json.loads((self.run_dir / "agent-local.json").read_text())["pid"])

    # --- afterwards ---

    @property
    def run_id(self) -> str | None:
        for event in self.events():
            if isinstance(event, ev.DaemonStarted):
                return str(event.policy["run_id"])
        return None

    def left_over(self) -> list[str]:
        """Living processes of this run: the daemon's, its agent's, its workers' and theirs."""
        run_id = self.run_id
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdecimal():
                continue
            stat = processes.read_stat(int(entry))
            if stat is None or stat.state in "ZX":
                continue
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            marked = run_id is not None and f"CKPTD_RUN_ID={run_id}".encode() in environment
            if marked or str(self.path).encode() in command:
                found.append(f"{entry} {stat.name} {command.decode(errors='replace')[:120]}")
        return found

    def close(self) -> None:
        """End whatever still lives; for a test that failed in the middle."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for line in self.left_over():
            with contextlib.suppress(OSError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def reference_losses(directory: Path, *args: str, world: int = 2) -> dict[int, str]:
    """Loss by step of the same script without a failure and without ckptd: the run that would have happened."""
    directory.mkdir(parents=True, exist_ok=True)
    losses = directory / "losses"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(TRAIN),
         "--losses", str(losses), *args],
        check=True, timeout=PATIENCE_S, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    return {int(step): loss for step, _, loss in (line.partition(" ") for line in losses.read_text().splitlines())}
