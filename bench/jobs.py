"""A small real run under a real daemon, for the benchmarks that look at the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

SCRIPT = """
import time
import torch
from torch import nn
from ckptd_shim import TrainerShim

model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
shim = TrainerShim(model=model, optimizer=optimizer, seed=1, global_batch=8)
shim.resume()
while not shim.stopping:
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    shim.step(loss=loss)
shim.close()
"""
PATIENCE_S = 120.0


@dataclass
class Running:
    """A run that trains: its directory and its daemon."""

    run_dir: Path
    daemon: int

    def status(self) -> dict:
        command = [sys.executable, "-m", "ckptd", "status", str(self.run_dir), "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout)


@contextlib.contextmanager
def training(**sections) -> Iterator[Running]:
    """A run with one worker, at 20 steps a second; it is stopped at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as scratch:
        directory = Path(scratch)
        (directory / "train.py").write_text(SCRIPT)
        document = {
            "version": 1, "name": "bench", "command": ["train.py"], "run_dir": "run",
            "cluster": {"devices_per_node": 1}, "web": {"listen": "127.0.0.1:0"},
            "checkpoint": {"interval": "10s", "tiers": [{"name": "disk", "path": "ckpt"}]}, **sections,
        }  # fmt: skip
        (directory / "job.yaml").write_text(yaml.safe_dump(document))
        with open(directory / "output", "wb") as output:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "ckptd", "run", str(directory / "job.yaml")],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        running = Running(directory / "run", daemon.pid)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _trains(running):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the job did not come to train:\n{(directory / 'output').read_text()}")
                time.sleep(0.2)
            yield running
        finally:
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(60)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _trains(running: Running) -> bool:
    if not os.path.exists(running.run_dir / "ckptd.sock"):
        return False
    with contextlib.suppress(subprocess.CalledProcessError):
        return running.status()["state"] == "training"
    return False
