"""Facts of this machine, against what it says elsewhere."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from ckptd import hostfacts
from ckptd.hostfacts import Filesystem


def test_the_file_system_of_a_path_is_the_one_that_df_names(tmp_path):
    for path in (tmp_path, "/dev/shm", "/proc", "/"):
        shown = subprocess.run(
            ["df", "-PT", str(path)], capture_output=True, text=True, check=True
        ).stdout.splitlines()[1]
        found = hostfacts.filesystem(path)
        assert (found.kind, found.mountpoint) == (shown.split()[1], shown.split()[6])


def test_a_path_that_is_not_there_yet_is_judged_by_what_is_above_it(tmp_path):
    found = hostfacts.filesystem(tmp_path / "not" / "yet")
    assert (found.kind, found.mountpoint) == (
        hostfacts.filesystem(tmp_path).kind,
        hostfacts.filesystem(tmp_path).mountpoint,
    )
    assert 0 < found.free <= found.size


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_mount_with_a_space_in_its_name(tmp_path):
    """In a namespace of its own, where its end is the mount's end."""
    place = tmp_path / "a place"
    place.mkdir()
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$0" -c "$2" "$1"'
    ask = "import sys; from ckptd import hostfacts; f = hostfacts.filesystem(sys.argv[1] + '/new'); print(f.kind, f.size, f.mountpoint)"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, str(place), ask], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == f"tmpfs {1 << 20} {place}\n"


@pytest.mark.parametrize(
    ("kind", "network", "memory"),
    [
        ("ext4", False, False),
        ("nfs4", True, False),
        ("fuse.sshfs", True, False),
        ("tmpfs", False, True),
        ("xfs", False, False),
    ],
)
def test_kinds(kind, network, memory):
    found = Filesystem(kind=kind, mountpoint="/", size=1, free=1, free_files=None)
    assert (found.network, found.memory) == (network, memory)


def test_limits():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hostfacts.limit(resource.RLIMIT_NOFILE) == (None if soft == resource.RLIM_INFINITY else soft)
    pids = hostfacts.pids_limit()
    assert pids is None or pids > 0
    assert hostfacts.clock_synchronised() in (True, False, None)
    assert hostfacts.read("/proc/sys/kernel/ostype") == "Linux"
    assert hostfacts.read("/proc/none") is None
