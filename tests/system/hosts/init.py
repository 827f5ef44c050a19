"""Process 1 of a host of the tests: makes its own root of the world, starts sshd, collects orphans, and dies with the test.

    python -I init.py '{"name", "address", "tmp", "home", "shared", "hosts", "boot_id", "keep"}'

It has been put into fresh namespaces already (see `cluster`). When its standard input ends, the test is gone, and the
kernel ends every process of this host with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


def private(place: str, own: str, keep: list[str]) -> None:
    """Put the host's own directory in a place of the machine's, with what of the machine's has to stay visible there."""
    for path in keep:
        if path.startswith(place + "/"):
            os.makedirs(own + path.removeprefix(place), exist_ok=True)
            mount("--rbind", path, own + path.removeprefix(place))
    mount("--rbind", own, place)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    socket.sethostname(wanted["name"])
    os.makedirs(wanted["tmp"] + "/shared", exist_ok=True)
    mount("--bind", wanted["shared"], wanted["tmp"] + "/shared")
    mount("--bind", wanted["hosts"], "/etc/hosts")
    mount("--bind", wanted["boot_id"], "/proc/sys/kernel/random/boot_id")
    private(os.path.expanduser("~"), wanted["home"], wanted["keep"])
    private("/tmp", wanted["tmp"], wanted["keep"])
    mount("-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", "/dev/shm")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    os.mkdir("/run/sshd")
    os.chdir("/tmp")
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w", encoding="ascii") as file:
        file.write("1")
    while not os.path.exists("/sys/class/net/eth0") and "eth0" not in [name for _, name in socket.if_nameindex()]:
        time.sleep(0.01)
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", wanted["address"] + "/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
        ["/usr/sbin/sshd", "-f", os.path.expanduser("~/sshd_config"), "-E", os.path.expanduser("~/sshd.log")],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def live_with_the_test() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=live_with_the_test, daemon=True).start()
    print("ready", flush=True)
    while True:
        with contextlib.suppress(ChildProcessError):
            os.wait()
            continue
        time.sleep(0.1)


if __name__ == "__main__":
    main()
