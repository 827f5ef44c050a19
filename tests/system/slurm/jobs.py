"""One run as a job of Slurm, submitted with the batch script that ckptd comes with."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from ckptd.core import events as ev
from ckptd.node import processes
from ckptd.node.processes import Process
from system.nodes import NodesJob
from system.slurm.cluster import Cluster

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "ckptd.sbatch"


class SlurmJob(NodesJob):
    """Two nodes with one CPU slot each, where nothing else is said."""

    def __init__(self, slurm: Cluster, directory: Path, *args: str, **sections: Any) -> None:
        spec = {
            "launcher": "slurm", "devices_per_node": 1, "heartbeat_timeout": "13s", "fence_timeout": "8s",
            **sections.pop("cluster", {}),
        }  # fmt: skip
        super().__init__(directory, *args, cluster=spec, **sections)
        self.spec["checkpoint"]["tiers"][0]["shared"] = True
        self._write()
        self.slurm = slurm
        self.id = ""
        # The script as it is, but for what asks for GPUs: these nodes have none.
        self.script = directory / "ckptd.sbatch"
        self.script.write_text(re.sub(r"^#SBATCH --(gpus|exclusive).*\n", "", SCRIPT.read_text(), flags=re.MULTILINE))
        programs = directory / "bin"
        programs.mkdir()
        paths = os.pathsep.join(p for p in sys.path if p.endswith(("supervisor", "trainer_shim")))
        (programs / "ckptd").write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -m ckptd "$@"\n')
        (programs / "ckptd").chmod(0o755)
        self.programs = programs

    def submit(self, *options: str) -> str:
        self.slurm.env["PATH"] = f"{self.programs}:{os.environ['PATH']}:/usr/sbin:/sbin"
        self.id = self.slurm.ask(
            "sbatch", "--parsable", "--nodes=2", "--time=20", f"--output={self.output_path}", *options,
            str(self.script), str(self.path),
        )  # fmt: skip
        return self.id

    def state(self) -> str:
        return self.slurm.job_state(self.id)

    def daemon(self) -> Process:
        """The newest."""
        found = processes.identify(self.of(ev.DaemonStarted)[-1].pid)
        assert found is not None
        return found

    def signal(self, name: str) -> None:
        """To the batch script alone, as `--signal=B:` has it sent."""
        self.slurm.ask("scancel", f"--signal={name}", "--batch", self.id)
