"""Real hosts on one machine: each has its own network, host name, processes, /tmp, home, /dev/shm, boot id, and sshd.

They are joined by a bridge in a network namespace of its own, from which no way leads out. `/tmp/shared` is one directory
on all of them, as a network file system would be; /tmp is each host's own disk and survives that its power is lost.
Needs root and a few programs, see `lacking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptd.node import processes
from ckptd.node.processes import Process

NETWORK = "10.77.0"
PACKAGES = "openssh-server nftables iproute2"
PROGRAMS = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "nft", "tc", "ip", "unshare", "nsenter", "mount")
NAMESPACES = ["--net", "--uts", "--mount", "--ipc", "--pid"]
REPOSITORY = Path(__file__).resolve().parents[3]
UP_PATIENCE_S = 30.0

SSHD = """\
Port 22
ListenAddress {address}
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/id_ed25519.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
PrintMotd no
UseDNS no
MaxStartups 100
SetEnv {environment}
"""

SSH = """\
Host *
  IdentityFile ~/.ssh/id_ed25519
  IdentitiesOnly yes
  StrictHostKeyChecking yes
"""


def lacking() -> str | None:
    """Why no hosts can be made here; None: they can."""
    if os.geteuid() != 0:
        return "making hosts takes root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"making hosts takes {', '.join(missing)}: apt-get install {PACKAGES}"
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return None if probe.returncode == 0 else f"no namespaces can be made here: {probe.stderr.strip()}"


class Namespaced:
    """A process in namespaces of its own, which ends with this one, and everything in them with it."""

    def __init__(self, namespaces: Sequence[str], command: Sequence[str], log: Path) -> None:
        with open(log, "ab") as errors:
            self.outer = subprocess.Popen(
                ["unshare", *namespaces, "--fork", "--kill-child", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self.log = log
        path = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        while not (children := path.read_text().split()):  # it forks once it is in its namespaces
            if self.outer.poll() is not None:
                raise AssertionError(f"no namespaces: {log.read_text()}")
        self.pid = int(children[0])

    def await_ready(self) -> None:
        assert self.outer.stdout is not None
        said = select.select([self.outer.stdout], [], [], UP_PATIENCE_S)[0]
        if not said or self.outer.stdout.readline() != b"ready\n":
            raise AssertionError(f"a host did not come up: {self.log.read_text()}")

    def end(self) -> None:
        """Kill process 1; the kernel ends all the others, and what they held is closed."""
        if self.outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.outer.wait(UP_PATIENCE_S)
        for stream in (self.outer.stdin, self.outer.stdout):
            assert stream is not None
            stream.close()


class Host:
    """One machine. `tmp`: its /tmp, as seen from outside."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = f"h{number}"
        self.address = f"{NETWORK}.{number}"
        self.directory = cluster.directory / self.name
        self.tmp = self.directory / "tmp"
        self.home = self.directory / "home"
        self.tmp.mkdir(parents=True)
        shutil.copytree(cluster.directory / "home", self.home)
        self.clock_offset_s = 0.0
        """What its wall clock is off, as far as Python asks it; holds for what is started through ssh from now on."""
        self._one: Namespaced | None = None

    # --- power ---

    def power_on(self) -> None:
        assert self._one is None, f"{self.name} is on"
        self.set_clock(self.clock_offset_s)
        boot_id = self.directory / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        wanted = {
            "name": self.name, "address": self.address, "tmp": str(self.tmp), "home": str(self.home),
            "shared": str(self.cluster.shared), "hosts": str(self.cluster.directory / "hosts"),
            "boot_id": str(boot_id), "keep": _kept_visible(),
        }  # fmt: skip
        init = [sys.executable, "-I", str(Path(__file__).with_name("init.py")), json.dumps(wanted)]
        self._one = Namespaced([*NAMESPACES, "--mount-proc", "--propagation", "private"], init, self.directory / "log")
        # The same hardware address in every life: the others would go on sending to the one that they know.
        mac = f"02:00:00:00:77:{self.number:02x}"
        self.cluster.switch(
            "ip", "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(self.pid)
        )  # fmt: skip
        self.heal()
        self._one.await_ready()

    def processes_die(self) -> None:
        """Everything on it dies but the kernel, which still closes the connections."""
        assert self._one is not None
        self._one.end()
        self._one = None
        # The kernel takes a while to remove the interface of a namespace that ended.
        self.cluster.switch("ip", "link", "del", self.port, check=False)

    def power_off(self) -> None:
        """The power is lost: not a packet tells of it."""
        self.cut()
        self.processes_die()

    @property
    def on(self) -> bool:
        return self._one is not None

    @property
    def pid(self) -> int:
        assert self._one is not None, f"{self.name} is off"
        return self._one.pid

    # --- the network ---

    @property
    def port(self) -> str:
        """Its interface at the switch."""
        return f"v{self.number}"

    def cut(self) -> None:
        """No packet passes any more, and neither end can see it."""
        self.cluster.switch("ip", "link", "set", self.port, "nomaster")

    def heal(self) -> None:
        self.cluster.switch("ip", "link", "set", self.port, "master", "br0", "up")

    def lose_packets(self, percent: int) -> None:
        """Of all that come in, this many."""
        self.run("nft", "delete table inet loss", check=False)
        if percent:
            self.run(
                "nft", "add table inet loss; add chain inet loss in { type filter hook input priority 0; };"
                f"add rule inet loss in iif eth0 numgen random mod 100 < {percent} drop",
            )  # fmt: skip

    def slow_down(self, rate: str | None) -> None:
        """What it sends passes at `rate` (such as 512kbit), or as it comes."""
        if rate is None:
            self.run(*["tc", "qdisc", "del", "dev", "eth0", "root"])
        else:
            self.run(*f"tc qdisc replace dev eth0 root tbf rate {rate} burst 16kb latency 400ms".split())

    # --- what runs there ---

    def set_clock(self, offset_s: float) -> None:
        """Set the wall clock of all Python that is started through ssh from now on (the machine's own is one for all)."""
        self.clock_offset_s = offset_s
        environment = {"PYTHONPATH": os.pathsep.join(_import_paths())}
        if offset_s:
            clock = str(Path(__file__).with_name("wrong_clock"))
            environment["PYTHONPATH"] = clock + os.pathsep + environment["PYTHONPATH"]
            environment["CLOCK_OFFSET_S"] = str(offset_s)
        told = " ".join(f"{name}={value}" for name, value in environment.items())
        text = SSHD.format(address=self.address, home=_home(), environment=told)
        (self.home / "sshd_config").write_text(text)

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command there."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--wd=/tmp", "--", *command]

    def run(self, *command: str, check: bool = True, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.inside(*command), capture_output=True, text=True, timeout=timeout, check=False, env=environment()
        )
        assert done.returncode == 0 or not check, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done

    def processes(self) -> Iterator[tuple[Process, str]]:
        """What lives there besides process 1 and sshd: as seen from outside, with the command line."""
        one, namespace = self._one, None
        with contextlib.suppress(OSError):
            namespace = None if one is None else os.stat(f"/proc/{one.pid}/ns/pid").st_ino
        if one is None or namespace is None:
            return  # its power was turned off a moment ago
        for entry in os.listdir("/proc"):
            if not entry.isdecimal() or int(entry) == one.pid:
                continue
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/pid").st_ino != namespace:
                    continue
                stat = processes.read_stat(int(entry))
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if stat is not None and not stat.dead and stat.name != "sshd":
                    yield Process(int(entry), stat.start_time), command

    def outer_pid(self, inner: int) -> int:
        """The pid, seen from outside, of the process that has the pid `inner` there."""
        for process, _ in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                if next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1] == str(inner):
                    return process.pid
        raise AssertionError(f"{self.name} has no process {inner}")


class Cluster:
    """`count` hosts, h1 to hN, that are on and reach each other."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.shared.mkdir()
        self.hosts: list[Host] = []
        names = {f"h{number}": f"{NETWORK}.{number}" for number in range(1, count + 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (directory / "hosts").write_text("\n".join(lines) + "\n")
        ssh = directory / "home" / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        for path in (ssh / "id_ed25519", directory / "home" / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
        key = " ".join((directory / "home" / "host_key.pub").read_text().split()[:2])
        (ssh / "known_hosts").write_text("".join(f"{name},{address} {key}\n" for name, address in names.items()))
        (ssh / "config").write_text(SSH)
        self._switch = Namespaced(["--net", "--pid"], ["sh", "-c", "echo ready; cat"], directory / "switch.log")
        try:
            self._switch.await_ready()
            self.switch("ip", "link", "add", "br0", "type", "bridge")
            self.switch("ip", "link", "set", "br0", "up")
            for number in range(1, count + 1):
                self.hosts.append(Host(self, number))
                self.hosts[-1].power_on()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[int(name.removeprefix("h")) - 1]

    def switch(self, *command: str, check: bool = True) -> None:
        """Run a command where all hosts are plugged in."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._switch.pid), "-n", "--", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"

    def restore(self) -> None:
        """All hosts on, reachable, fast, and with the right clock."""
        for host in self.hosts:
            wrong = host.clock_offset_s
            host.set_clock(0.0)
            if host.on and wrong:
                host.processes_die()
            if not host.on:
                host.power_on()
            host.heal()
            host.lose_packets(0)
            host.run("tc", "qdisc", "del", "dev", "eth0", "root", check=False)

    def close(self) -> None:
        for host in self.hosts:
            if host.on:
                host.processes_die()
        self._switch.end()


def environment() -> dict[str, str]:
    """Of what the tests start on a host by themselves."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(_import_paths()), "HOME": _home()}


def _home() -> str:
    return pwd.getpwuid(os.geteuid()).pw_dir


def _import_paths() -> list[str]:
    return [str(REPOSITORY / "supervisor"), str(REPOSITORY / "trainer_shim")]


def _kept_visible() -> list[str]:
    """Directories that every host needs at the path where this machine has them: Python, its packages, this repository."""
    interpreter = Path(sys.executable).resolve().parents[1]
    wanted = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(interpreter)}
    # One that lies within another one comes with it.
    return [path for path in sorted(wanted) if not any(path.startswith(other + "/") for other in wanted)]
