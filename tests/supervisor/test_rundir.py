"""The run directory: one daemon in it, one user, and the right one found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptd import __version__, rundir
from ckptd.errors import ExitStatus, JobSpecError, RunLocked, RunNotFound, UsageError
from ckptd.rundir import LockHolder, RunDir, find_run, runs_root

HOLDER = """
import sys
from ckptd.rundir import RunDir
run = RunDir(sys.argv[1])
run.create()
with run.acquire_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_daemon(path):
    """Another process that holds the lock of a run directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def run(tmp_path):
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def short():
    """A directory whose path is short enough for sockets, wherever the tests run."""
    path = tempfile.mkdtemp(prefix="ckptd-t", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


class TestDirectory:
    def test_names(self, run):
        assert run.job_path == run.path / "job.yaml"
        assert run.ledger_path == run.path / "ledger.db"
        assert run.lock_path == run.path / "lock"
        assert run.control_path == run.path / "control.json"
        assert run.attempt_dir(3) == run.path / "attempts" / "0003"
        assert not run.attempt_dir(3).exists()
        assert run.make_attempt_dir(3).is_dir()
        assert run.make_attempt_dir(3) == run.attempt_dir(3)

    def test_is_private_whatever_the_umask(self, tmp_path):
        before = os.umask(0)
        try:
            run = RunDir(tmp_path / "deep" / "er" / "run")
            run.create()
            run.make_attempt_dir(1)
        finally:
            os.umask(before)
        for path in (run.path, run.attempts_path, run.attempt_dir(1)):
            assert path.stat().st_mode & 0o777 == 0o700

    def test_one_that_is_there_already_becomes_private(self, tmp_path):
        path = tmp_path / "run"
        path.mkdir(mode=0o755)
        (path / "lock").touch()
        (path / "other").touch()
        RunDir(path).create()
        assert path.stat().st_mode & 0o777 == 0o700

    def test_a_directory_of_something_else_is_refused(self, tmp_path):
        (tmp_path / "thesis.tex").touch()
        mode = tmp_path.stat().st_mode
        with pytest.raises(UsageError, match="holds files and is no run directory"):
            RunDir(tmp_path).create()
        assert tmp_path.stat().st_mode == mode

    def test_one_whose_daemon_died_before_it_locked(self, run):
        run.create()

    def test_a_job_written_by_hand_is_never_overwritten(self, tmp_path):
        (tmp_path / "job.yaml").write_text("name: x")
        with pytest.raises(UsageError, match="is no run directory"):
            RunDir(tmp_path).create()

    def test_a_place_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="cannot be made"):
            RunDir(tmp_path / "file" / "run").create()

    def test_the_frozen_job_is_replaced_whole(self, run):
        run.freeze_job(b"name: a\n")
        run.freeze_job(b"name: b\n")
        assert run.job_path.read_bytes() == b"name: b\n"
        assert sorted(os.listdir(run.path)) == ["attempts", "job.yaml"]


class TestLock:
    def test_says_who_holds_it(self, run):
        assert run.lock_holder() is None
        with other_daemon(run.path) as daemon:
            with pytest.raises(RunLocked) as caught:
                run.acquire_lock()
            message = str(caught.value)
            assert f"process {daemon.pid}" in message
            assert socket.gethostname() in message
            assert f"ckptd {__version__}" in message
            assert f"ckptd stop {run.path}" in message
            assert caught.value.exit_status == ExitStatus.USAGE
            holder = run.lock_holder()
            assert (holder.pid, holder.host) == (daemon.pid, socket.gethostname())
            assert holder.start_time == rundir.start_time(daemon.pid)
            # Even an insistent user does not get what the kernel knows to be taken.
            with pytest.raises(RunLocked):
                run.acquire_lock(take_over=True)

    def test_of_a_daemon_killed_with_minus_nine_is_taken_over(self, run):
        with other_daemon(run.path) as daemon:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            assert json.loads(run.lock_path.read_bytes())["pid"] == daemon.pid  # it could not tidy up
            assert run.lock_holder() is None
            with run.acquire_lock() as lock:
                assert lock.holder.pid == os.getpid()
                assert json.loads(run.lock_path.read_bytes())["pid"] == os.getpid()

    def test_is_free_after_an_orderly_end(self, run):
        with other_daemon(run.path) as daemon:
            daemon.communicate()  # closes its standard input
        assert run.lock_path.read_bytes() == b""
        lock = run.acquire_lock()
        lock.release()
        lock.release()
        run.acquire_lock().release()

    def test_excludes_within_one_process_too(self, run):
        with run.acquire_lock(), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
            RunDir(run.path).acquire_lock()

    def test_is_not_inherited_by_programs_that_the_daemon_starts(self, run):
        lock = run.acquire_lock()
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
        try:
            lock.release()
            run.acquire_lock().release()
        finally:
            child.kill()
            child.communicate()

    def test_a_status_that_looks_does_not_stop_a_daemon_from_starting(self, run):
        code = """
import sys
from ckptd.rundir import RunDir
run = RunDir(sys.argv[1])
run.acquire_lock().release()
print("looking", flush=True)
while True:
    run.lock_holder()
"""
        looker = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
        try:
            assert looker.stdout.readline() == "looking\n"
            for _ in range(20):
                run.acquire_lock().release()
        finally:
            looker.kill()
            looker.communicate()

    def write(self, run, **changes):
        holder = {name: getattr(LockHolder.this_process(), name) for name in LockHolder.__dataclass_fields__}
        run.lock_path.write_text(json.dumps({**holder, **changes}))

    def test_of_another_host_needs_take_over(self, run):
        """On a network file system, or in a copied directory, the kernel here knows nothing of the owner there."""
        self.write(run, host="elsewhere", boot_id="another", pid=4711)
        with pytest.raises(RunLocked, match=r"host elsewhere, process 4711.*--take-over"):
            run.acquire_lock()
        assert json.loads(run.lock_path.read_bytes())["host"] == "elsewhere"
        with run.acquire_lock(take_over=True) as lock:
            assert lock.holder.host == socket.gethostname()

    def test_of_this_host_before_a_reboot_is_stale(self, run):
        self.write(run, boot_id="another")
        run.acquire_lock().release()

    def test_of_another_container_on_this_kernel_is_stale(self, run):
        self.write(run, host="pod-7")
        run.acquire_lock().release()

    def test_of_a_pid_that_is_used_again_is_stale(self, run):
        self.write(run, start_time=1)
        run.acquire_lock().release()

    def test_in_a_copy_of_a_directory_in_use(self, run, tmp_path):
        with other_daemon(run.path) as daemon:
            copy = RunDir(tmp_path / "copy")
            shutil.copytree(run.path, copy.path)
            with pytest.raises(RunLocked, match=rf"process {daemon.pid}.*copy"):
                copy.acquire_lock()
            copy.acquire_lock(take_over=True).release()

    @pytest.mark.parametrize("content", [b"", b"\0\0", b"[1]", b'{"host": "x"}', b"\xff"])
    def test_with_nonsense_in_it_is_the_kernels_to_decide(self, run, content):
        run.lock_path.write_bytes(content)
        run.acquire_lock().release()

    def test_without_a_directory(self, tmp_path):
        with pytest.raises(RunLocked, match="cannot be opened"):
            RunDir(tmp_path / "none").acquire_lock()

    def test_start_time_of_nobody(self):
        child = subprocess.Popen(["true"])
        try:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert rundir.start_time(child.pid) is None  # a zombie
        finally:
            child.wait()
        assert rundir.start_time(child.pid) is None


def talk(path):
    """Bind a socket there, dial it, and pass a word."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        peer, _ = server.accept()
        with peer:
            client.sendall(b"hello")
            return peer.recv(5)


class TestSocket:
    def test_lies_in_the_run_directory(self, short):
        run = RunDir(short / "run")
        run.create()
        assert run.socket_path() == str(run.path / "ckptd.sock")
        assert talk(run.socket_path()) == b"hello"

    def test_the_longest_path_that_fits(self, short):
        fitting = RunDir(short / ("x" * (rundir.SOCKET_PATH_LIMIT - len(str(short)) - len("//ckptd.sock"))))
        fitting.create()
        assert len(fitting.socket_path()) == rundir.SOCKET_PATH_LIMIT
        assert talk(fitting.socket_path()) == b"hello"

    @pytest.fixture
    def long(self, short):
        made = RunDir(short / ("d" * 100) / "run")
        made.create()
        return made

    def test_of_a_long_path_is_short_private_and_the_same_for_all(self, long, short, monkeypatch):
        runtime = short / "xdg"
        runtime.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        path = long.socket_path()
        assert path.startswith(f"{runtime}/ckptd/")
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        assert talk(path) == b"hello"
        # A client whose environment says something else.
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
        assert RunDir(long.path).socket_path() == path
        # The runtime directory is emptied by a reboot; the link in the run directory is not.
        shutil.rmtree(runtime)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        again = long.socket_path()
        assert again.startswith(f"{short}/ckptd/")
        assert talk(again) == b"hello"

    def test_of_two_runs_are_two(self, long, short, monkeypatch):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        other = RunDir(long.path.with_name("other"))
        other.create()
        assert other.socket_path() != long.socket_path()

    def test_directory_that_others_can_enter_is_refused(self, long, short, monkeypatch):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        (short / "ckptd").mkdir()
        os.chmod(short / "ckptd", 0o755)
        with pytest.raises(UsageError, match="you alone can enter"):
            long.socket_path()

    def test_directory_that_is_a_link_is_refused(self, long, short, monkeypatch):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        (short / "trap").mkdir(mode=0o700)
        (short / "ckptd").symlink_to(short / "trap")
        with pytest.raises(UsageError, match="you alone can enter"):
            long.socket_path()


class TestFind:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.chdir(tmp_path)

    def started(self, name):
        run = RunDir(runs_root() / name)
        run.create()
        run.ledger_path.touch()
        return run

    def job(self, directory, name, **more):
        directory.mkdir(exist_ok=True)
        path = directory / "job.yaml"
        path.write_text(json.dumps({"name": name, "command": ["gone.py"], **more}))
        return path

    def test_the_only_one(self):
        with pytest.raises(RunNotFound, match="there is no run in"):
            find_run(None)
        run = self.started("one")
        (runs_root() / "junk").mkdir()
        assert find_run(None) == run
        self.started("two")
        with pytest.raises(RunNotFound, match=r"There are 2 in .*: one, two") as caught:
            find_run(None)
        assert caught.value.exit_status == ExitStatus.USAGE

    def test_by_name(self):
        runs = [self.started("one"), self.started("two")]
        assert find_run("two") == runs[1]
        with pytest.raises(RunNotFound, match="did you mean 'two'"):
            find_run("tow")
        with pytest.raises(RunNotFound, match="known: one, two"):
            find_run("zzz")
        for escape in ("..", ".", "", "../runs/two/attempts"):
            with pytest.raises(RunNotFound):
                find_run(escape)

    def test_by_directory(self, tmp_path):
        run = RunDir(tmp_path / "here")
        run.create()
        run.ledger_path.touch()
        assert find_run(str(tmp_path / "here")) == run
        assert find_run("here") == run
        assert find_run("./here/") == run

    def test_a_directory_in_the_way_does_not_hide_a_name(self, tmp_path):
        run = self.started("gpt")
        (tmp_path / "gpt").mkdir()
        assert find_run("gpt") == run

    def test_by_job(self, tmp_path):
        path = self.job(tmp_path / "project", "one")
        with pytest.raises(RunNotFound, match=r"the run 'one' .* was never started; `ckptd run"):
            find_run(str(path))
        run = self.started("one")
        # Its script is gone, which is no reason not to find the run.
        assert find_run(str(path)) == run
        assert find_run(str(path.parent)) == run
        (path.parent / "job.yaml").write_text("name: [")
        with pytest.raises(JobSpecError):
            find_run(str(path))

    def test_by_a_job_that_names_its_directory(self, tmp_path):
        path = self.job(tmp_path / "project", "one", run_dir="../elsewhere")
        run = RunDir(tmp_path / "elsewhere")
        run.create()
        run.ledger_path.touch()
        assert find_run(str(path)) == run

    def test_by_the_frozen_job_in_it(self):
        run = self.started("one")
        run.freeze_job(b"not even yaml: [")
        assert find_run(str(run.job_path)) == run
