"""The kernel's log: Xid lines, lost GPUs, kills for memory."""

from __future__ import annotations

import pytest

from ckptd.core import kernel_log


def test_xids_with_and_without_timestamps_and_fields():
    found = kernel_log.read(
        [
            "[Mon Mar  3 10:00:00 2025] NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.",
            "Mar  3 10:00:01 n1 kernel: [12.5] NVRM: Xid (PCI:0000:90:1c): 64, ...",
            "NVRM: Xid (PCI:0000:af:00): 31",
            "NVRM: GPU at PCI:0000:3b:00: GPU-0000",
        ]
    )
    assert [(x.bus, x.number, x.blames_device) for x in found.xids] == [
        ("0000:3b:00", 79, True), ("0000:90:1c", 64, True), ("0000:af:00", 31, False),
    ]  # fmt: skip
    assert found.lost


def test_a_gpu_that_is_lost_without_an_xid():
    assert kernel_log.read(["NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."]).lost
    assert not kernel_log.read(["eth0: link is up"]).lost


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 4711 (python3) total-vm:1kB, anon-rss:1kB",
        "Memory cgroup out of memory: Killed process 4711 (pt_main_thread), UID 0",
    ],
)
def test_kills_for_memory(line):
    assert kernel_log.read([line]).oom_killed == (4711,)


def test_pci_addresses_are_written_in_many_ways():
    assert kernel_log.same_bus("0000:9b:00", "00000000:9B:00.0")
    assert not kernel_log.same_bus("0000:9b:00", "0000:9c:00")
