"""Which processes belong to an attempt: all of its own are found and ended, and nobody else's is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from ckptd.node import processes
from ckptd.node.processes import Process
from ckptd_shim.contract import ENV_ATTEMPT, ENV_RUN_ID

SLEEP = "import time; time.sleep(600)"
DAEMONISE = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdout.close()
time.sleep(600)
"""
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_id():
    return uuid.uuid4().hex


@pytest.fixture
def start():
    """Starts Python in a session of its own, with marks; at the end of the test it is gone, whatever happened."""
    started = []

    def begin(code, **marks):
        environment = {k: v for k, v in os.environ.items() if k not in (ENV_RUN_ID, ENV_ATTEMPT)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**environment, **marks}, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def doomed(pid):
    """A process that is not our child, and is dead at the end."""
    process = processes.identify(pid)
    try:
        yield process
    finally:
        if process is not None:
            processes.send(process, signal.SIGKILL)


def marks(run_id, attempt=1):
    return {ENV_RUN_ID: run_id, ENV_ATTEMPT: str(attempt)}


class TestWhoIsThere:
    def test_a_zombie_is_dead(self, start):
        process = start("")
        known = processes.identify(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert processes.read_stat(process.pid).state == "Z"
        assert not processes.alive(known)
        assert processes.wait_gone([known], 0.0) == []

    def test_a_pid_that_was_given_out_again_is_somebody_else(self, start):
        process = start(SLEEP)
        known = processes.identify(process.pid)
        earlier = Process(known.pid, known.start_time - 1)
        assert processes.alive(known)
        assert not processes.alive(earlier)
        processes.send(earlier, signal.SIGKILL)
        assert processes.wait_gone([known], 0.1) == [known]
        processes.send(known, signal.SIGKILL)
        assert processes.wait_gone([known], 10.0) == []

    def test_a_name_with_brackets_and_spaces_hides_nothing(self, start):
        process = start(
            "import ctypes, time\nctypes.CDLL(None).prctl(15, b'a) Z 1 (b')\nprint(flush=True)\ntime.sleep(600)"
        )
        process.stdout.readline()
        stat = processes.read_stat(process.pid)
        assert (stat.name, stat.session, stat.parent) == ("a) Z 1 (b", process.pid, os.getpid())
        assert stat.state in "SR"

    def test_nobody(self):
        assert processes.identify(2**22 + 1) is None
        processes.send(Process(2**22 + 1, 1), signal.SIGKILL)

    def test_waiting_ends_as_soon_as_the_last_is_dead_and_not_later_than_asked(self, start):
        short, long = start("import time; time.sleep(0.3)"), start(SLEEP)
        begun = time.monotonic()
        assert processes.wait_gone([processes.identify(short.pid)], 30.0) == []
        assert time.monotonic() - begun < 10
        begun = time.monotonic()
        known = processes.identify(long.pid)
        assert processes.wait_gone([known], 0.2) == [known]
        assert 0.2 <= time.monotonic() - begun < 5

    def test_a_process_whose_main_thread_ended_lives_on_in_its_others(self, start, run_id):
        # As after a SIGKILL that one thread cannot take, inside of a driver that hangs: the leader is a zombie.
        number = {"x86_64": 60, "aarch64": 93}.get(os.uname().machine)
        if number is None:
            pytest.skip("the number of exit(2) is not known here")
        process = start(
            "import ctypes, threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,)).start()\n"
            f"print(flush=True)\nctypes.CDLL(None).syscall({number}, 0)\n",
            **marks(run_id),
        )
        process.stdout.readline()
        known = processes.identify(process.pid)
        deadline = time.monotonic() + 10
        while processes.read_stat(process.pid).state != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert processes.alive(known)
        assert processes.wait_gone([known], 0.1) == [known]
        assert processes.sweep(run_id, 1, [known]).killed == [known]
        assert not processes.alive(known)


class TestSweep:
    def test_finds_a_child_that_made_a_session_of_its_own_and_hid_behind_a_dead_parent(self, start, run_id):
        parent = start(DAEMONISE, **marks(run_id))
        with doomed(int(parent.stdout.readline())) as hidden:
            parent.wait()
            assert processes.read_stat(hidden.pid).session not in (os.getsid(0), parent.pid)
            swept = processes.sweep(run_id, 1, [])
            assert swept.killed == [hidden]
            assert not processes.alive(hidden)
            assert (swept.names[hidden.pid][:6], swept.unkillable) == ("python", [])

    def test_finds_what_lives_in_the_session_of_a_dead_worker_without_any_mark(self, start, run_id):
        worker = start(FAMILY, **marks(run_id))
        known = processes.identify(worker.pid)
        with doomed(int(worker.stdout.readline())) as child:
            worker.kill()
            worker.wait()
            assert processes.alive(child)
            assert processes.sweep(run_id, 1, [known]).killed == [child]
            assert not processes.alive(child)

    def test_ends_workers_that_are_deaf_or_stand_still(self, start, run_id):
        deaf = start(
            "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(600)",
            **marks(run_id),
        )
        still = start(SLEEP, **marks(run_id))
        deaf.stdout.readline()
        still.send_signal(signal.SIGSTOP)
        workers = [processes.identify(p.pid) for p in (deaf, still)]
        swept = processes.sweep(run_id, 1, workers)
        assert {p.pid for p in swept.killed} == {deaf.pid, still.pid}
        assert not any(map(processes.alive, workers))

    def test_ends_what_forks_faster_than_it_is_found(self, start, run_id):
        restless = start(
            "import os, time\nprint(flush=True)\n"
            "for _ in range(200):\n    if os.fork(): os._exit(0)\n    os.setsid()\n    time.sleep(0.01)\n"
            "time.sleep(600)",
            **marks(run_id),
        )
        restless.stdout.readline()
        restless.wait()
        processes.sweep(run_id, 1, [])
        assert processes.members(run_id, 1, []) == []
        time.sleep(0.1)  # nothing comes back: there is no event for nothing
        assert processes.members(run_id, 1, []) == []

    def test_leaves_everybody_else_alone(self, start, run_id):
        others = {
            "another run": start(SLEEP, **marks(uuid.uuid4().hex)),
            "another attempt": start(SLEEP, **marks(run_id, 2)),
            "an attempt whose number begins alike": start(SLEEP, **marks(run_id, 11)),
            "the agent": start(SLEEP, **{ENV_RUN_ID: run_id}),
            "a user who wrote it on the command line": start(f"x = {run_id!r}\n{SLEEP}"),
            "nobody's": start(SLEEP),
        }
        own = start(SLEEP, **marks(run_id))
        swept = processes.sweep(run_id, 1, [processes.identify(own.pid)])
        assert [p.pid for p in swept.killed] == [own.pid]
        for who, process in others.items():
            assert process.poll() is None, who

    def test_takes_a_newcomer_with_a_workers_old_pid_for_what_it_is(self, start, run_id):
        newcomer = start(FAMILY)
        with doomed(int(newcomer.stdout.readline())) as child:
            known = processes.identify(newcomer.pid)
            earlier = Process(known.pid, known.start_time - 1)
            assert processes.members(run_id, 1, [earlier]) == []
            assert processes.sweep(run_id, 1, [earlier]).killed == []
            assert processes.alive(known)
            assert processes.alive(child)

    def test_nothing_to_do(self, run_id):
        swept = processes.sweep(run_id, 1, [])
        assert (swept.killed, swept.unkillable) == ([], [])
        assert swept.seconds < 5
