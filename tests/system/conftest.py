"""Jobs for the system tests, and the promise that none leaves a process behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from system.harness import Job, reference_losses


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Builds jobs; at the end of the test all of them are over, and nothing of theirs is alive."""
    jobs: list[Job] = []

    def make(*args: str, **options: Any) -> Job:
        job = Job(tmp_path / f"job{len(jobs)}", *args, **options)
        jobs.append(job)
        return job

    yield make
    left = [line for job in jobs if job.process is None or job.process.poll() is not None for line in job.left_over()]
    for job in jobs:
        job.close()
    assert not left, f"left over: {left}"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, str]]:
    """Loss by step of the uninterrupted run of that many steps and workers; made once in a session."""
    known: dict[tuple[int, int], dict[int, str]] = {}

    def losses(steps: int, world: int = 2) -> dict[int, str]:
        if (steps, world) not in known:
            directory = tmp_path_factory.mktemp("reference")
            known[steps, world] = reference_losses(directory, "--steps", str(steps), "--pause", "0", world=world)
        return known[steps, world]

    return losses
