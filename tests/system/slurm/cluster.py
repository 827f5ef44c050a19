"""A Slurm of its own, in one directory: a controller, a munged, and one slurmd for each made-up node of this machine.

It needs root and the programs of Slurm, and neither systemd, cgroups, fixed ports nor anything outside its directory. Nodes
share the machine, and so its files; each of them has a slurmd and step daemons of its own, and can be killed whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ckptd.node import processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
PATIENCE_S = 60.0
SBIN = "/usr/sbin:/sbin"

CONF = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_setup_env_fail
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout=6
KillWait=20
MinJobAge=600
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    path = f"{os.environ['PATH']}:{SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(absent)} (slurmctld, slurmd, slurm-client, munge)" if absent else None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


class Cluster:
    """Nodes `n1` to `n<count>`, each with two CPUs."""

    def __init__(self, directory: Path, *, count: int = 3) -> None:
        self.directory = directory
        self.nodes = [f"n{i}" for i in range(1, count + 1)]
        directory.mkdir(parents=True)
        directory.chmod(0o755)
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (directory / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(count + 1)
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        self.conf = directory / "slurm.conf"
        self.conf.write_text(CONF.format(host=host, controller=controller, directory=directory, nodes="\n".join(lines)))
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:{SBIN}"}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        sock = self.directory / "munge.sock"
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}",
            f"--pid-file={self.directory}/munged.pid", f"--log-file={self.directory}/munged.log",
            f"--seed-file={self.directory}/munged.seed",
        )  # fmt: skip
        self.wait_until(sock.exists, "munged listens")
        self.start_controller(clean=True)
        for node in self.nodes:
            self.start_node(node)
        self.wait_until(lambda: set(self.states()) == set(self.nodes) and set(self.states().values()) == {"idle"},
                        "all nodes are idle")  # fmt: skip

    def start_controller(self, *, clean: bool = False) -> None:
        self._spawn("slurmctld", "slurmctld", "-D", *(["-c"] if clean else []))

    def kill_controller(self) -> None:
        self._kill("slurmctld")

    def start_node(self, node: str) -> None:
        self._spawn(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """The node is gone at once: its slurmd, its step daemons, and all that they started."""
        doomed = [*self._of_node(node), self._started[node].pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody there is to tell of another's end
            for pid in doomed:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        self._kill(node)

    def _of_node(self, node: str) -> list[int]:
        """What runs on a node: step daemons, which write into its log, and what steps started, which knows its name."""
        log = os.fsencode(self.directory / f"slurmd.{node}.log")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    ours = f"SLURM_CONF={self.conf}".encode() in environment
                    named = f"SLURMD_NODENAME={node}".encode() in environment
                    if (ours and named) or log in self._files(entry).splitlines():
                        found.append(int(entry))
        return found

    @staticmethod
    def _files(pid: str) -> bytes:
        found = b""
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.fsencode(os.readlink(f"/proc/{pid}/fd/{entry}")) + b"\n"
        return found

    def _spawn(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.out", "ab") as output:
            self._started[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.directory,
                start_new_session=True,
            )  # fmt: skip

    def _kill(self, name: str) -> None:
        process = self._started.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    # --- what a user types ---

    def ask(self, *command: str, check: bool = True, timeout: float = 30.0) -> str:
        done = subprocess.run(
            command,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        said = self.ask("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)

    def job_state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", check=False)

    def batch_host(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%B")

    def wait_until(self, true, what: str, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"never: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        parts = [f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(self.directory.glob("*.log"))]
        return "\n".join(parts)

    # --- the end ---

    def left_over(self) -> list[int]:
        """Living processes that a job of this cluster started."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) != os.getpid():
                stat = processes.read_stat(int(entry))
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    job = any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)
                    if stat and stat.state not in "ZX" and job and f"SLURM_CONF={self.conf}".encode() in environment:
                        found.append(int(entry))
        return found

    def close(self) -> None:
        """End all of it: jobs, nodes, controller."""
        for pid in self.left_over():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for name in list(self._started):
            self._kill(name)
        for entry in os.listdir("/proc"):  # step daemons have sessions of their own
            if entry.isdecimal() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    if f"SLURM_CONF={self.conf}".encode() in environment:
                        os.kill(int(entry), signal.SIGKILL)
