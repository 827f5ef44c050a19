"""Two nodes, one job: whatever is killed, silenced or cut off, there is one attempt, from the newest commit."""

from __future__ import annotations

import time

import pytest

from ckptd.core import events as ev
from system.checks import assert_same_losses
from system.nodes import HOSTS, Nodes

pytestmark = pytest.mark.system


@pytest.fixture
def make_nodes(tmp_path):
    made = []

    def make(*args, **options):
        made.append(Nodes(tmp_path / f"nodes{len(made)}", *args, **options))
        return made[-1]

    yield make
    over = [job for job in made if job.process is None or job.process.poll() is not None]
    deadline = time.monotonic() + 20
    # An agent that was told to leave does so a moment after the daemon.
    while (left := [line for job in over for line in job.left_over()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for job in made:
        job.close()
    assert not left, f"left over: {left}"


def test_two_nodes_train_as_two_workers_of_one_machine_do(make_nodes, reference):
    job = make_nodes("--steps", "60")
    assert job.run() == 0, job.output() + job.story()
    (launched,) = job.of(ev.AttemptLaunched)
    assert launched.placement == {HOSTS[0]: [0], HOSTS[1]: [0]}
    assert_same_losses(job, reference(60))
