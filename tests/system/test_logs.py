"""A rank prints without end: the disk does not fill, and training goes on."""

from __future__ import annotations

import os

import pytest

from ckptd.core import events as ev

pytestmark = pytest.mark.system

LIMIT = 1 << 20


def assert_cut(directory):
    found = {name: os.stat(directory / name) for name in os.listdir(directory) if name.startswith("rank0.")}
    assert {"rank0.out", "rank0.out.1", "rank0.err", "rank0.err.1"} <= set(found)
    for name, stat in found.items():
        assert stat.st_size <= LIMIT * 9 // 8 + 200, f"{name} has {stat.st_size} bytes, {stat.st_blocks} blocks"


def test_a_quarter_of_a_gigabyte_without_a_newline_leaves_a_few_megabytes(make_job):
    """The error that comes after all that is still found and told; the logs of the attempt before it are forgotten."""
    job = make_job(
        "--steps", "30", "--fault", "raise:15:0:1", "--fault", "chatter:18", "--fault", "raise:25:0:2", devices=1,
        logs={"max_size": "1MiB", "keep": 2, "keep_attempts": 2},
    )  # fmt: skip
    assert job.run() == 0, job.output()
    assert sorted(os.listdir(job.run_dir / "attempts")) == ["0002", "0003"]
    assert_cut(job.attempt_dir(2))
    assert "planted at step 25" in job.of(ev.Interrupted)[1].detail
    assert any("grows too fast" in e.what for e in job.of(ev.Noted))
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1, 2, 3]


def test_the_logs_of_workers_that_elastic_starts_are_cut_too(make_job):
    job = make_job(
        "--steps", "8", "--fault", "chatter:5", devices=1, restart={"warm": False}, logs={"max_size": "1MiB", "keep": 2}
    )
    assert job.run() == 0, job.output()
    assert_cut(job.attempt_dir(1))
