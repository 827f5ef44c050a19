"""A real kill for memory is seen in the cgroup's counter and in the kernel's log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.node import evidence
from ckptd.node.evidence import KernelLog, OomCounter


@pytest.fixture
def small_cgroup():
    """A cgroup (version 1) that allows 60 MB; needs root and a writable memory controller."""
    place = Path("/sys/fs/cgroup/memory") / f"ckptd-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text("62914560")
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield place
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            place.rmdir()
            return
        except OSError:
            time.sleep(0.05)


SCRIPT = """
import os, sys
sys.path[:0] = {path!r}
from ckptd.node.evidence import OomCounter
open({procs!r}, "w").write(str(os.getpid()))
counter = OomCounter()
pid = os.fork()
if pid == 0:
    block = bytearray(200 << 20)
    for i in range(0, len(block), 4096):
        block[i] = 1
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), counter.rose(), counter.rose())
"""


def test_a_kill_for_memory_leaves_evidence(small_cgroup):
    log = KernelLog()
    log.news()
    script = SCRIPT.format(path=sys.path, procs=str(small_cgroup / "cgroup.procs"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-9", "True", "False"], done
    if os.access("/dev/kmsg", os.R_OK):
        assert log.news().oom_killed
    log.close()


def test_without_a_kill_there_is_none():
    counter = OomCounter()
    assert not counter.rose()


def test_what_the_kernel_said_long_ago_is_not_about_now(monkeypatch):
    reader, writer = os.pipe2(os.O_NONBLOCK)
    log = KernelLog()
    log.close()
    log._fd = reader  # a record a read, as of /dev/kmsg
    try:
        os.write(writer, b"3,1,1000,-;NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.")
        log.look()
        monkeypatch.setattr(evidence, "RECENT_S", -1.0)
        assert not log.news().xids
        monkeypatch.undo()
        os.write(writer, b"3,2,2000,-;NVRM: Xid (PCI:0000:9c:00): 48, DBE")
        log.look()
        assert [x.number for x in log.news().xids] == [48]
        assert not log.news().xids, "told twice"
    finally:
        log.close()
        os.close(writer)
