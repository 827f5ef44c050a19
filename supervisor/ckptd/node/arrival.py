"""How does an agent come to be on a node that somebody reached, through ssh or srun? `python -m ckptd.node --stdin`.

One JSON object on standard input says what is wanted; the answer is one line on standard output, after `MARK`, since a
login shell may have said things of its own before. The agent runs in a session of its own, without a terminal, and with a
log of its own: it outlives the connection that started it. One that lives already is told where to dial, and left alone.

Under Slurm nothing outlives the task that started it. There (`stay`) this process itself becomes the agent, and answers
once it is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

from ckptd import __version__
from ckptd.node import dialling, processes
from ckptd.node.attempt import node_file
from ckptd.node.processes import Process
from ckptd.node.reports import tail_of
from ckptd_shim import contract

MARK = "ckptd-node: "
READY_PATIENCE_S = 40.0
"""What an agent may take until it has found its devices; it says so before it dials."""
KILL_PATIENCE_S = 5.0

Json = dict[str, Any]


class NotThere(Exception):
    """No agent came to be: why, in words that name what to do. `superseded`: another daemon has the run."""

    def __init__(self, why: str, *, superseded: bool = False) -> None:
        super().__init__(why)
        self.superseded = superseded


def main() -> int:
    """Do what standard input asks for, and answer."""
    node = None
    try:
        wanted = json.loads(sys.stdin.readline())
        node = wanted["node"] = wanted["node"] or _name_by_slurm()
        wanted["dial"]["host"] = wanted.get("hosts", {}).get(node, wanted["dial"]["host"])
        answer: Json = {"ok": True, **act(wanted)}
    except NotThere as error:
        answer = {"ok": False, "why": str(error), "superseded": error.superseded}
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer = {"ok": False, "why": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps({"node": node, **answer}), flush=True)
    return 0 if answer["ok"] else 1


def _name_by_slurm() -> str:
    """The name of this node. One order goes to all tasks of a step, each of which knows where it is."""
    name = os.environ.get("SLURMD_NODENAME")
    if not name:
        raise NotThere("SLURMD_NODENAME is not set there: Slurm did not start this")
    return name


def act(wanted: Json) -> Json:
    """`{"do": "start" | "kill", "version", "run_dir", "run_id", "node", "workdir", "devices", "dial", "secret", "replace"}`.

    And, optionally, `stay`. `main` also understands `node: null`, which means the name that Slurm gives to the task's node,
    and `hosts`, which names other addresses to dial for some of the nodes.

    Returns `{"pid", "before"}`: `before` says what was found of an earlier agent: `none`, `alive` (it goes on), `dead`, or
    `killed` (because of `replace`).

    Raises:
        NotThere: there is no agent now.
    """
    if wanted["version"] != __version__:
        raise NotThere(
            f"ckptd {__version__} is installed there, the daemon is {wanted['version']}: install one version"
        )
    run_dir, node = str(wanted["run_dir"]), str(wanted["node"])
    try:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
        status = os.stat(run_dir)
    except OSError as error:
        raise NotThere(f"its run directory {run_dir} cannot be made: {error.strerror}") from None
    if status.st_uid != os.geteuid():
        raise NotThere(f"its run directory {run_dir} belongs to user {status.st_uid}; name another run_dir")
    os.chmod(run_dir, 0o700)
    with _alone(os.path.join(run_dir, node_file("agent", node, "lock"))):
        return _kill(wanted) if wanted["do"] == "kill" else _start(wanted)


@contextlib.contextmanager
def _alone(path: str) -> Any:
    """One start at a time: two of them would make two agents."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(wanted: Json) -> Json:
    run_dir, node = str(wanted["run_dir"]), str(wanted["node"])
    dial = dialling.Dial(**wanted["dial"])
    with contextlib.suppress(OSError):
        known = dialling.read(run_dir, node)
        if known.epoch > dial.epoch:
            raise NotThere(f"the run was taken over: its daemon listens at {known.host} now", superseded=True)
    dialling.write(run_dir, node, dial)
    before = "none"
    earlier = _recorded(run_dir, node)
    if earlier is not None:
        before = "dead"
        if processes.alive(earlier):
            if not wanted["replace"]:
                return {"pid": earlier.pid, "before": "alive"}
            _end(earlier)
            before = "killed"
    if wanted.get("stay"):
        _become(wanted, before)
    return {"pid": _launch(wanted), "before": before}


def _kill(wanted: Json) -> Json:
    earlier = _recorded(str(wanted["run_dir"]), str(wanted["node"]))
    if earlier is None or not processes.alive(earlier):
        return {"pid": None, "before": "none" if earlier is None else "dead"}
    _end(earlier)
    return {"pid": None, "before": "killed"}


def _end(agent: Process) -> None:
    processes.send(agent, signal.SIGKILL)
    if processes.wait_gone([agent], KILL_PATIENCE_S):
        raise NotThere(f"the agent there, process {agent.pid}, cannot be killed: look at the machine")


def _record_path(run_dir: str, node: str) -> str:
    return os.path.join(run_dir, node_file("agent", node, "json"))


def _recorded(run_dir: str, node: str) -> Process | None:
    """The agent that was last started here, in this boot of the machine."""
    try:
        with open(_record_path(run_dir, node), "rb") as file:
            record = json.load(file)
        return Process(int(record["pid"]), int(record["start_time"])) if record["boot"] == _boot() else Process(0, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _record(wanted: Json, pid: int) -> None:
    identity = processes.identify(pid)
    if identity is not None:
        record = {"pid": identity.pid, "start_time": identity.start_time, "boot": _boot()}
        path = _record_path(str(wanted["run_dir"]), str(wanted["node"]))
        contract.write_atomically(path, json.dumps(record).encode())


def _workdir(wanted: Json) -> str:
    workdir = str(wanted["workdir"])
    if not os.path.isdir(workdir):
        raise NotThere(f"there is no directory {workdir} there, which job.yaml names as workdir")
    return workdir


def _log_path(wanted: Json) -> str:
    return os.path.join(str(wanted["run_dir"]), node_file("agent", str(wanted["node"]), "log"))


def _command(wanted: Json, **more: Any) -> list[str]:
    options = {
        "run_dir": wanted["run_dir"], "run_id": wanted["run_id"], "node": wanted["node"],
        "devices_wanted": wanted["devices"], "secret_on_stdin": True, **more,
    }  # fmt: skip
    return [sys.executable, "-m", "ckptd.node", json.dumps(options)]


def _environment(wanted: Json) -> dict[str, str]:
    unwanted = (contract.ENV_ATTEMPT, contract.ENV_LAUNCH)
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    return {**inherited, contract.ENV_RUN_ID: str(wanted["run_id"]), contract.ENV_NODE: str(wanted["node"])}


def _become(wanted: Json, before: str) -> NoReturn:
    """Be the agent: same process, same place in whatever started it."""
    os.chdir(_workdir(wanted))
    log = os.open(_log_path(wanted), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _record(wanted, os.getpid())
    read_end, write_end = os.pipe()
    os.write(write_end, f"{wanted['secret']}\n".encode())  # a pipe takes far more
    os.close(write_end)
    answer_fd = os.dup(1)
    os.set_inheritable(answer_fd, True)
    for given, wanted_fd in ((read_end, 0), (log, 1), (log, 2)):
        os.dup2(given, wanted_fd)
    answer = {"node": wanted["node"], "ok": True, "pid": os.getpid(), "before": before}
    command = _command(wanted, ready_fd=answer_fd, ready_says=MARK + json.dumps(answer))
    os.execve(sys.executable, command, _environment(wanted))  # noqa: S606  no shell is wanted


def _launch(wanted: Json) -> int:
    log_path = _log_path(wanted)
    workdir = _workdir(wanted)
    read_end, write_end = os.pipe()
    with open(log_path, "ab") as log:
        agent = subprocess.Popen(
            _command(wanted, ready_fd=write_end),
            cwd=workdir,
            env=_environment(wanted),
            stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_end], start_new_session=True,
        )  # fmt: skip
    os.close(write_end)
    _record(wanted, agent.pid)
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(f"{wanted['secret']}\n".encode())
        agent.stdin.close()
    deadline = time.monotonic() + READY_PATIENCE_S
    ready = b""
    while not ready and time.monotonic() < deadline and agent.poll() is None:
        if select.select([read_end], [], [], 0.5)[0]:
            ready = os.read(read_end, 64)
            break
    os.close(read_end)
    if not ready:
        agent.kill()
        last = tail_of(log_path, 2000).strip().rpartition("\n")[2]
        raise NotThere(f"the agent ended with status {agent.wait()}; its last words in {log_path}: {last}")
    return agent.pid
