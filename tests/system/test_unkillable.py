"""A process that cannot be killed: it is told, its device is left out, and the run goes on without either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core import events as ev
from ckptd.node import processes
from system.stuck_mount import StuckMount


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StuckMount]:
    directory = tmp_path / "stuck"
    directory.mkdir()
    try:
        mount = StuckMount(directory)
    except OSError as error:
        pytest.skip(f"a file system that hangs cannot be mounted here: {error}")
    yield mount
    mount.close()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("fault", ["stuck", "stuckthread"])
def test_a_rank_that_survives_sigkill_costs_its_device_and_nothing_else(warm, fault, stuck, make_job):
    job = make_job(
        "--steps", "100", "--pause", "0.05", "--fault", f"{fault}:70:2:1", "--stuck", str(stuck.directory / "file"), devices=3,
        restart={"warm": warm}, hang={"floor": "2s", "factor": 10, "startup": "60s"},
    )  # fmt: skip
    job.start()
    ended = job.wait_for(ev.AttemptEnded)
    (process,) = ended.unkillable
    assert stuck.reading.is_set()
    assert (process["rank"], process["pid"]) == (2, job.workers(1)[2])
    known = processes.identify(process["pid"])
    assert processes.alive(known), "it was not stuck at all"
    # Its restart waits neither for that process, nor does a later end: there is one more.
    job.wait_for(ev.FirstStep, lambda e: e.attempt == 2)
    status = job.status()
    assert [(d["index"], "cannot be killed" in d["why"]) for d in status["devices_left_out"]] == [(2, True)]
    assert job.wait() == 0, job.output()
    assert [e.world_size for e in job.of(ev.AttemptLaunched)] == [3, 2], job.story()
    assert [len(e.unkillable) for e in job.of(ev.AttemptEnded)] == [1, 0]
    assert processes.alive(known)
    stuck.close()
    job.wait_until(lambda: not processes.alive(known), "what was stuck ends as soon as it can")
