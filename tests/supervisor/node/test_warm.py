"""Workers forked from a warm process behave as Python itself would have them, and a server that must not fork says why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from shim.test_launch import SAME

from ckptd.node import processes, warm
from ckptd.node.warm import Cold, ForkServer, Recipe, Warmth, become_subreaper

TIMEOUT = 90


@pytest.fixture(scope="module")
def subreaper():
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def recipe(directory, *preload, **env):
    return Recipe(
        python=sys.executable,
        env=tuple({"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **env}.items()),
        cwd=str(directory),
        path=str(directory),
        preload=preload,
    )


@pytest.fixture(scope="module")
def server(subreaper, tmp_path_factory):
    server = ForkServer(recipe(tmp_path_factory.mktemp("server")))
    server.start()
    yield server
    server.close()


class Warm:
    """A script run by a fork of the server."""

    def __init__(self, server, directory, *argv, cwd=None, env=None):
        self.out, self.err = directory / "warm.out", directory / "warm.err"
        (self.pid,) = server.fork(
            [
                {
                    "argv": list(argv),
                    "env": {**os.environ, "PYTHONHASHSEED": "0", **(env or {})},
                    "cwd": str(cwd or directory),
                    "stdout": str(self.out),
                    "stderr": str(self.err),
                }
            ]
        )

    def wait(self):
        fd = os.pidfd_open(self.pid)
        try:
            import select

            assert select.select([fd], [], [], TIMEOUT)[0], f"still running\n{self.err.read_text()}"
        except AssertionError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            os.close(fd)
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.out.read_text(), self.err.read_text()


def cold(directory, *argv):
    done = subprocess.run(
        [sys.executable, "-u", *argv], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", sorted(SAME))
def test_a_script_runs_as_under_python(name, server, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SAME[name]))
    argv = [str(script), "one", "--two"]
    assert Warm(server, tmp_path, *argv).wait() == cold(tmp_path, *argv)


def test_a_module_runs_as_under_python(server, tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mate.py").write_text("NAME = 'mate'\n")
    (package / "job.py").write_text(
        "import sys\nfrom .mate import NAME\nprint(NAME, __name__, __package__, sys.argv)\n"
    )
    assert Warm(server, tmp_path, "-m", "pkg.job", "x").wait() == cold(tmp_path, "-m", "pkg.job", "x")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_and_classes_of_main(method, server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pickle, sys
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return i * i
        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Squares()))) is Squares
            loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
            print([b.tolist() for b in loader])
        """)
    )
    status, out, err = Warm(server, tmp_path, str(script), method).wait()
    assert (status, out) == (0, "[[0, 1, 4, 9], [16, 25, 36, 49]]\n"), err


def test_each_worker_has_its_own_environment_session_and_randomness(server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, random, numpy, torch\n"
        "print(os.environ['WHO'], 'CKPTD_ATTEMPT' in os.environ, os.getsid(0) == os.getpid(), torch.get_num_threads())\n"
        "print(random.random(), numpy.random.random())\n"
    )
    found = []
    for who in ("a", "b"):
        directory = tmp_path / who
        directory.mkdir()
        status, out, err = Warm(server, directory, str(script), env={"WHO": who, "OMP_NUM_THREADS": "2"}).wait()
        assert status == 0, err
        first, second = out.splitlines()
        assert first == f"{who} False True 2"
        found += second.split()
    assert len(set(found)) == 4, "two workers drew the same random numbers"


def test_a_worker_inherits_no_descriptor_and_no_deaf_ear(subreaper, tmp_path):
    # The agent ignores SIGINT and SIGHUP: what is ignored stays so over an exec, down to the forkserver.
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "print([n for n in os.listdir('/proc/self/fd') if int(n) > 2 and os.path.exists(f'/proc/self/fd/{n}')])\n"
        "print(os.readlink('/proc/self/fd/0'))\n"
        "print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)])\n"
        "print([line for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))])\n"
    )
    kept = [(n, signal.signal(n, signal.SIG_IGN)) for n in (signal.SIGINT, signal.SIGHUP)]
    server = ForkServer(recipe(tmp_path))
    try:
        server.start()
        assert Warm(server, tmp_path, str(script)).wait() == cold_by_default(tmp_path, str(script))
    finally:
        for number, handler in kept:
            signal.signal(number, handler)
        server.close()


def test_what_a_worker_opens_stays_open_to_its_very_end(server, tmp_path):
    # Its first descriptor has the number of what the forkserver had: gloo's epoll, closed by a stranger, aborts.
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os\n"
        "opened = [os.open('/dev/null', os.O_RDONLY) for _ in range(16)]\n"
        "atexit.register(lambda: print([os.fstat(fd).st_rdev for fd in opened]))\n"
    )
    assert Warm(server, tmp_path, str(script)).wait() == cold(tmp_path, str(script))


def cold_by_default(directory, *argv):
    """As `cold`, from a parent that ignores nothing."""
    kept = [(n, signal.signal(n, signal.SIG_DFL)) for n in (signal.SIGINT, signal.SIGHUP)]
    try:
        return cold(directory, *argv)
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def test_a_killed_worker_is_ours_to_reap(server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    worker = Warm(server, tmp_path, str(script))
    deadline = time.monotonic() + TIMEOUT
    while worker.out.read_text() != "here\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.wait()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
            "starts threads",
        ),
        ("raise RuntimeError('no licence')\n", "no licence"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True\n", "initialised CUDA"),
        (
            # What is left of a question such as torch.cuda.device_count(): torch does not call that initialised.
            """
import os
real, kept = os.readlink, open("/dev/null")
os.readlink = lambda path, **dir_fd: "/dev/nvidiactl" if path.endswith(f"/{kept.fileno()}") else real(path, **dir_fd)
""",
            "asked CUDA for something",
        ),
    ],
)
def test_a_module_that_spoils_the_fork_is_refused_with_the_reason(subreaper, text, why, tmp_path):
    (tmp_path / "spoiler.py").write_text(text)
    warmth = Warmth(recipe(tmp_path, "spoiler"))
    try:
        with pytest.raises(Cold, match=why):
            warmth.fork([{}])
        assert why in warmth.why_cold
        first = warmth.pid
        warmth.kindle()
        assert warmth.pid == first, "a server that refused is not started again for nothing"
    finally:
        warmth.close()


def test_a_changed_module_makes_a_new_server(subreaper, tmp_path):
    module = tmp_path / "helpful.py"
    module.write_text("VALUE = 1\n")
    script = tmp_path / "script.py"
    script.write_text("import helpful; print(helpful.VALUE)\n")
    warmth = Warmth(recipe(tmp_path, "helpful"))
    try:
        for value in ("1", "22"):
            module.write_text(f"VALUE = {value}\n")
            status, out, err = Warm(warmth, tmp_path, str(script)).wait()
            assert (status, out) == (0, value + "\n"), err
    finally:
        warmth.close()


def test_a_server_that_died_is_replaced(subreaper, tmp_path):
    warmth = Warmth(recipe(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    try:
        warmth.kindle()
        os.kill(warmth.pid, signal.SIGKILL)
        with pytest.raises(Cold):
            warmth.fork([{}])
        assert Warm(warmth, tmp_path, str(script)).wait()[:2] == (0, "ran\n")
    finally:
        warmth.close()


def test_a_server_that_does_not_answer_forks_nothing_later(subreaper, tmp_path, monkeypatch):
    # Its order is in its socket: were it let go on, there would be two of that rank.
    monkeypatch.setattr(warm, "FORK_TIMEOUT_S", 0.3)
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    server = ForkServer(recipe(tmp_path))
    server.start()
    try:
        server.wait_ready()
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Cold, match="does not answer"):
            Warm(server, tmp_path, str(script))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while processes.read_stat(pid) is not None or processes.dead_children():
            assert time.monotonic() < deadline, "it lives on"
            processes.reap(processes.dead_children())
            time.sleep(0.01)
        assert not (tmp_path / "ran").exists()
    finally:
        server.close()


def test_a_server_that_was_late_once_is_not_waited_for_again(subreaper, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    warmth = Warmth(recipe(tmp_path, "slow"))
    try:
        monkeypatch.setattr(warm, "READY_TIMEOUT_S", 0.3)
        with pytest.raises(Cold, match="not ready within"):
            warmth.fork([{}])
        monkeypatch.setattr(warm, "READY_TIMEOUT_S", 1e6)
        with pytest.raises(Cold, match="not ready within"):
            warmth.fork([{}])
        (tmp_path / "go").touch()
        warmth._server.wait_ready(TIMEOUT)
        assert Warm(warmth, tmp_path, str(script)).wait()[:2] == (0, "ran\n")
    finally:
        warmth.close()
