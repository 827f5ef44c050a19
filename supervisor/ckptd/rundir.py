"""Where does a run live, who owns it, and which run is meant? The run directory, its lock, and finding one.

A run directory belongs to one user (0700): whoever reaches its socket can stop the run. The lock is held as long as
the daemon lives, by the kernel (flock) and by its content, which says who it is; the kernel alone is not enough, as a
copied directory or a network file system shows a free lock where another host may be at work.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from ckptd import __version__
from ckptd.errors import RunLocked, RunNotFound, UsageError
from ckptd_shim import contract

if TYPE_CHECKING:
    from types import TracebackType

SOCKET_PATH_LIMIT: Final = 107
"""Bytes that fit `sun_path` on Linux, its final zero apart."""
_PROBE_TRIES: Final = 10
_PROBE_PAUSE: Final = 0.02


def runs_root() -> Path:
    """`$XDG_STATE_HOME/ckptd/runs`, or below `~/.local/state`. A relative XDG_STATE_HOME is ignored, as XDG says."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "ckptd" / "runs"


def boot_id() -> str:
    """Names this boot of this kernel: processes and flocks are known to the whole of it, and to nothing else."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: there is no such process. A zombie is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The content of a lock file."""

    host: str
    pid: int
    start_time: int
    """Clock ticks since boot: with `pid` and `boot_id` it names one process for ever."""
    boot_id: str
    since: float
    """Wall clock."""
    version: str

    @classmethod
    def this_process(cls) -> Self:
        """What this process writes into a lock."""
        pid = os.getpid()
        started = start_time(pid)
        assert started is not None
        return cls(
            host=socket.gethostname(),
            pid=pid,
            start_time=started,
            boot_id=boot_id(),
            since=time.time(),
            version=__version__,
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"ckptd {self.version} on host {self.host}, process {self.pid}, since {since}"


class RunLock:
    """A held lock. Leaving the `with` block or `release` gives it up; so does the end of the process."""

    def __init__(self, fd: int, holder: LockHolder) -> None:
        self._fd: int | None = fd
        self.holder = holder

    def release(self) -> None:
        """Empty the file and let go. The file stays: removing it would let two daemons lock two files of one name."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class RunDir:
    """One run's directory and the names in it. Building one touches no disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def job_path(self) -> Path:
        """The frozen copy of job.yaml."""
        return self.path / "job.yaml"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.db"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    @property
    def secret_path(self) -> Path:
        """What agents on other machines have to know; for nobody else to read."""
        return self.path / "secret"

    @property
    def listen_path(self) -> Path:
        """Where the newest daemon listened for them."""
        return self.path / "listen.json"

    @property
    def control_path(self) -> Path:
        return self.path / contract.CONTROL_FILE

    @property
    def attempts_path(self) -> Path:
        return self.path / "attempts"

    def attempt_dir(self, attempt: int) -> Path:
        """`attempts/0003`; it may not exist yet."""
        return self.attempts_path / contract.attempt_dirname(attempt)

    def exists(self) -> bool:
        """Has a run lived here?"""
        return self.ledger_path.is_file() or self.lock_path.is_file()

    def create(self) -> None:
        """Make the directory, private to its owner; one that is there already is taken as it is, but made private.

        Raises:
            UsageError: it cannot be made, belongs to somebody else, or is full of something that is not a run.
        """
        try:
            os.makedirs(self.path.parent, exist_ok=True)
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            status = os.stat(self.path)
            if status.st_uid != os.geteuid():
                raise UsageError(f"the run directory {self.path} belongs to user {status.st_uid}; name another run_dir")
            # A daemon that died between this and the lock left `attempts`; job.yaml may be the one written by hand.
            if not self.exists() and set(os.listdir(self.path)) - {self.attempts_path.name}:
                raise UsageError(
                    f"{self.path} holds files and is no run directory; name an empty or a new directory as run_dir"
                )
            os.chmod(self.path, 0o700)
            os.makedirs(self.attempts_path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the run directory {self.path} cannot be made: {error}") from None

    def make_attempt_dir(self, attempt: int) -> Path:
        """`attempt_dir`, made if need be."""
        path = self.attempt_dir(attempt)
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def freeze_job(self, text: bytes) -> None:
        """Keep job.yaml (see `JobSpec.frozen_text`), durably."""
        contract.write_atomically(self.job_path, text, durable=True)

    # --- the lock -----------------------------------------------------------------------------------------------------

    def acquire_lock(self, *, take_over: bool = False) -> RunLock:
        """Become the one daemon of this run. The directory exists.

        Args:
            take_over: believe the caller that the owner, on a host that cannot be seen from here, is gone.

        Raises:
            RunLocked: another daemon has it, or may have it; the message says which, and what to do.
        """
        try:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunLocked(f"the lock {self.lock_path} cannot be opened: {error}") from None
        try:
            self._flock(fd)
            me = LockHolder.this_process()
            self._judge(_read_holder(fd), me, take_over=take_over)
            content = json.dumps(asdict(me)).encode() + b"\n"
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
            os.fsync(fd)
        except OSError as error:
            os.close(fd)
            raise RunLocked(f"the lock {self.lock_path} cannot be written: {error}") from None
        except BaseException:
            os.close(fd)
            raise
        return RunLock(fd, me)

    def _flock(self, fd: int) -> None:
        for tries_left in reversed(range(_PROBE_TRIES)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # `lock_holder` of a `ckptd status` holds it for microseconds: only one that stays is a daemon.
                if tries_left:
                    time.sleep(_PROBE_PAUSE)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                raise RunLocked(
                    f"the file system of {self.path} has no locks ({error.strerror}); put run_dir on a local disk"
                ) from None
        holder = _read_holder(fd)
        who = str(holder) if holder else "another ckptd that is just starting"
        where = "" if holder is None or holder.host == socket.gethostname() else f" on {holder.host}"
        raise RunLocked(f"the run in {self.path} is supervised by {who}; to stop it: ckptd stop {self.path}{where}")

    def _judge(self, holder: LockHolder | None, me: LockHolder, *, take_over: bool) -> None:
        """The kernel says that the lock is free; does its content agree?"""
        if holder is None or take_over:
            return
        if holder.boot_id == me.boot_id:
            # One kernel, whose flock can be trusted, unless the directory is a copy of one that is in use.
            if holder.host == me.host and start_time(holder.pid) == holder.start_time:
                raise RunLocked(
                    f"{self.path} says that it is supervised by {holder}, which is alive, yet its lock is free: this "
                    f"is a copy of that run's directory. Stop it (kill {holder.pid}), or pass --take-over"
                )
            return
        if holder.host == me.host:
            return  # the machine was rebooted since
        raise RunLocked(
            f"{self.path} was last supervised by {holder}, and from here it cannot be seen whether that is over. "
            f"Make sure that no ckptd runs there, then pass --take-over"
        )

    def lock_holder(self) -> LockHolder | None:
        """The daemon that holds the lock now, None if nobody does. For `ckptd status`: it takes nothing."""
        try:
            fd = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except OSError:
            return _read_holder(fd)
        finally:
            os.close(fd)

    # --- the socket ---------------------------------------------------------------------------------------------------

    def socket_path(self) -> str:
        """Path to bind or to dial, short enough for a UNIX socket; daemon and clients get the same one.

        Where `<run dir>/ckptd.sock` is too long, that name is a link to a short one in a private directory.

        Raises:
            UsageError: that directory belongs to somebody else, or is open to others.
        """
        direct = str(self.path / "ckptd.sock")
        if len(os.fsencode(direct)) <= SOCKET_PATH_LIMIT:
            return direct
        digest = hashlib.sha256(os.fsencode(os.path.realpath(self.path))).hexdigest()[:16]
        with contextlib.suppress(OSError):
            # A daemon under systemd and a client over ssh may see different XDG_RUNTIME_DIRs: the link decides.
            target = os.readlink(direct)
            if os.path.basename(target) == f"{digest}.sock" and _is_private(os.path.dirname(target)):
                return target
        target = os.path.join(_short_directory(), f"{digest}.sock")
        temporary = f"{direct}.tmp{os.getpid()}"
        with contextlib.suppress(OSError):
            os.symlink(target, temporary)
            os.rename(temporary, direct)
        return target


def _read_holder(fd: int) -> LockHolder | None:
    try:
        content = json.loads(os.pread(fd, 4096, 0))
        return LockHolder(**{name: content[name] for name in LockHolder.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None


def _is_private(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _short_directory() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isabs(runtime) and len(os.fsencode(runtime)) <= 60 and os.access(runtime, os.W_OK)
    path = os.path.join(runtime, "ckptd") if usable else f"/tmp/ckptd-{os.geteuid()}"  # noqa: S108 - checked below
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not _is_private(path):
        # Somebody else may have made it first, to listen in.
        raise UsageError(f"{path}, for the run's socket, is not a directory that you alone can enter; remove it")
    return path


# --- finding a run ----------------------------------------------------------------------------------------------------


def find_run(arg: str | None) -> RunDir:
    """The run that a RUN argument means: a run directory, a job.yaml, or a name; None: the only run there is.

    Raises:
        RunNotFound: no run, or several where one was expected; the message lists what there is.
        JobSpecError: the job.yaml that was named cannot be read.
    """
    root = runs_root()
    if arg is None:
        names = _names(root)
        if len(names) == 1:
            return RunDir(root / names[0])
        if not names:
            raise RunNotFound(f"there is no run in {root}; `ckptd run job.yaml` starts one")
        raise RunNotFound(f"which run? There are {len(names)} in {root}: {', '.join(names)}")
    path = Path(os.path.expanduser(arg))
    if path.is_dir():
        if RunDir(path).exists():
            return RunDir(path)
        if (path / "job.yaml").is_file() and not _is_name(root, arg):
            return _run_of_job(path / "job.yaml")
    elif path.is_file():
        return RunDir(path.parent) if RunDir(path.parent).exists() else _run_of_job(path)
    if _is_name(root, arg):
        return RunDir(root / arg)
    near = difflib.get_close_matches(arg, _names(root), n=1)
    names = _names(root)
    known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}" if names else "there is none yet"
    raise RunNotFound(f"{arg!r} is no run directory, no job.yaml, and no name of a run in {root}; {known}")


def run_names() -> list[str]:
    """The names of all runs that live where runs live by default."""
    return _names(runs_root())


def _run_of_job(path: Path) -> RunDir:
    from ckptd import jobspec  # not at the top: it takes a while to import, and imports this module

    spec = jobspec.load(path, check=False)
    run = RunDir(spec.run_dir_path)
    if not run.exists():
        raise RunNotFound(f"the run {spec.name!r} of {path} was never started; `ckptd run {path}` starts it")
    return run


def _is_name(root: Path, arg: str) -> bool:
    return "/" not in arg and arg not in ("", ".", "..") and RunDir(root / arg).exists()


def _names(root: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(root) if RunDir(entry.path).exists())
    except OSError:
        return []
