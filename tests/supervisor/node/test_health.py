"""What `health.command` says about devices, and that one which hangs leaves nothing behind."""

from __future__ import annotations

import asyncio
import resource

import pytest

from ckptd.errors import LaunchError
from ckptd.node import health, processes

DEVICES = health.Devices(gpus=False, devices=[{"index": i, "id": f"cpu-slot-{i}", "name": "cpu"} for i in range(4)])


def ask(*command):
    return asyncio.run(health.ask(DEVICES, list(command) or None))


def test_no_command_no_complaint():
    assert ask() == health.Health()


def test_the_indices_that_it_prints_are_unhealthy():
    assert ask("printf", "1\n3\n") == health.Health(unhealthy=frozenset({1, 3}))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("printf", "7\nx\n"), "printed '7, x': no index of a device here"),
        (("printf", "1 of 4 is idle\n"), "printed '1 of 4 is idle': no index of a device here"),
        (("false",), "ended with status 1: it said nothing"),
        (("sh", "-c", "echo broken >&2; exit 3"), "ended with status 3: broken"),
        (("/no/such/command",), "cannot be started"),
    ],
)
def test_what_it_cannot_say_is_not_held_against_a_device(command, why):
    found = ask(*command)
    assert found.unhealthy == frozenset()
    assert why in found.detail


def test_one_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "COMMAND_TIMEOUT_S", 0.5)
    found = ask("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    assert "did not end within" in found.detail
    child = processes.identify(int((tmp_path / "pid").read_text()))
    assert child is None or processes.wait_gone([child], 10.0) == []


def test_one_that_never_stops_talking_fills_no_memory(monkeypatch):
    monkeypatch.setattr(health, "COMMAND_TIMEOUT_S", 2.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = ask("yes", "no")
    assert "did not end within" in found.detail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_much_talk_makes_no_long_message():
    found = ask("sh", "-c", "echo 2; head -c 300000 /dev/zero | tr '\\0' x; exit 0")
    assert found.unhealthy == frozenset({2})
    assert len(found.detail) < 400


def test_no_gpu_and_no_number():
    if health._nvml_devices():
        pytest.skip("there is a GPU here")
    with pytest.raises(LaunchError, match="devices_per_node: 2"):
        health.find_devices(None)
    assert health.find_devices(3).indices == [0, 1, 2]


GPUS = [{"index": i, "id": f"GPU-{name}", "name": "gpu", "bus": f"00000000:{i}0:00.0"} for i, name in enumerate("abcd")]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]), ("2,3", [2, 3]), ("3, 1", [3, 1]), ("GPU-c,0", [2, 0]), ("", []), ("-1", []),
        ("1,7,2", [1]), ("1,1,2", [1]), ("GPU-", []), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_only_the_gpus_that_this_job_was_given_are_its_own(setting, indices):
    assert [d["index"] for d in health.visible(GPUS, setting)] == indices


def test_a_device_has_its_name_and_its_place_whatever_its_rank():
    devices = health.Devices(gpus=True, devices=health.visible(GPUS, "3,1"))
    assert devices.identity(3) == "GPU-d"
    assert devices.buses({0: 1, 1: 3}) == {0: "00000000:10:00.0", 1: "00000000:30:00.0"}
    assert DEVICES.buses({0: 0}) == {}
