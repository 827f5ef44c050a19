"""Whatever is killed, cut or slowed down between hosts, there is one attempt, on the right world, from the right step.

That no two attempts are ever alive at once is watched all the time (see `conftest`), on all hosts, from outside of them.
"""

from __future__ import annotations

import time

import pytest

from ckptd.core import events as ev
from system.checks import assert_same_losses, assert_told_once
from system.hosts.checks import (
    STEPS,
    TRAINING,
    assert_losses_so_far,
    assert_resumed_right,
    assert_told_truly,
    steps_pass,
    stop,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_a_worker_an_agent_and_a_link(make_run, cluster, reference):
    """A dead worker or agent costs one restart of all; a link that is cut for a while, lossy or slow, costs none."""
    both = {"h1", "h2"}
    job = make_run(
        *TRAINING, hosts=("h1", "h2"),
        cluster={"heartbeat_timeout": "40s", "fence_timeout": "30s"},
    )  # fmt: skip
    job.start()
    job.training(1, on=both)
    job.kill_worker(cluster["h2"])
    job.training(2, on=both)
    job.kill_agent(cluster["h2"])
    job.training(3, on=both)

    cluster["h2"].cut()
    job.kill_daemon()
    time.sleep(5.0)  # how long the link is cut
    cluster["h2"].heal()
    job.start()
    job.wait_for(ev.AgentConnected, lambda e: e.node == "h2" and e.running == 3)
    steps_pass(job, 10)
    cluster["h2"].lose_packets(20)
    steps_pass(job, 20)
    cluster["h2"].lose_packets(0)
    cluster["h2"].slow_down("256kbit")
    steps_pass(job, 20)
    cluster["h2"].slow_down(None)
    assert_told_truly(job, attempt=3, world=2)
    assert job.wait() == 0, job.output() + job.story()

    causes = [(e.cause, e.node) for e in job.of(ev.Interrupted)]
    assert causes == [("signal", "h2"), ("agent_lost", "h2")], job.story()
    assert_resumed_right(job)
    assert_told_once(job)
    assert_same_losses(job, reference(STEPS))


def test_spares_take_over_from_a_host_without_power_and_from_one_whose_processes_die(make_run, cluster, reference):
    """The daemon is killed with the first of them; the host that comes back is the spare of the second."""
    job = make_run(*TRAINING, hosts=("h1", "h2", "h3"), cluster={"spares": 1})
    job.start()
    job.training(1, on={"h1", "h2"})
    cluster["h2"].power_off()
    job.kill_daemon()
    job.start()
    job.training(2, on={"h1", "h3"})
    (lost,) = job.of(ev.NodeLost)
    assert lost.node == "h2"
    assert_told_truly(job, attempt=2, world=2, away={"h2"})

    cluster["h2"].power_on()
    job.wait_for(ev.AgentConnected, lambda e: e.node == "h2" and e.t > lost.t)
    cluster["h3"].processes_die()
    job.training(3, on={"h1", "h2"})
    assert_told_truly(job, attempt=3, world=2, away={"h3"})
    stop(job)

    assert [(e.cause, e.node) for e in job.of(ev.Interrupted)] == [("node_lost", "h2"), ("node_lost", "h3")], (
        job.story()
    )
    assert_resumed_right(job)
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))


def test_a_host_that_is_cut_off_and_comes_back_with_a_clock_that_is_an_hour_ahead(make_run, cluster, reference):
    """Without a spare the world shrinks; the host ends what it carries by itself, and is used again when it is back."""
    cluster["h2"].processes_die()
    cluster["h2"].set_clock(3600.0)
    cluster["h2"].power_on()
    job = make_run(*TRAINING, hosts=("h1", "h2"))
    job.start()
    job.training(1, on={"h1", "h2"})
    cluster["h2"].cut()
    shrunk = job.training(2, on={"h1"})
    assert not [host for host, _ in job.watcher.workers().get(1, [])], "h2 goes on"
    assert_told_truly(job, attempt=2, world=1, away={"h2"})

    cluster["h2"].heal()
    job.training(3, on={"h1", "h2"})
    grown = job.launched(3)
    assert grown.resume["step"] >= shrunk.step
    assert_told_truly(job, attempt=3, world=2)
    job.kill_daemon()
    job.kill_worker(cluster["h2"])
    job.start()
    job.training(4, on={"h1", "h2"})
    stop(job)

    interrupted = job.of(ev.Interrupted)
    assert [(e.cause, e.node) for e in interrupted if not e.planned] == [("node_lost", "h2"), ("signal", "h2")]
    assert all(0 <= e.lost_seconds < 60 for e in interrupted), job.story()
    assert_resumed_right(job)
    assert_told_once(job)
    expected = reference(STEPS)
    until = job.launched(2).resume["step"]  # from there on another world trained
    assert {s: loss for s, loss in job.losses().items() if s <= until} == {s: expected[s] for s in range(1, until + 1)}


def test_an_attempt_on_a_single_host_that_cannot_be_reached_ends_itself_before_another_begins(
    make_run, cluster, reference
):
    """The host of all ranks is cut off, and another takes over; then the head node is cut off from all of them."""
    job = make_run(*TRAINING, hosts=("h2", "h3"), cluster={"spares": 1, "devices_per_node": 2})
    job.start()
    job.training(1, on={"h2"})
    cluster["h2"].cut()
    job.training(2, on={"h3"})
    assert_told_truly(job, attempt=2, world=2, away={"h2"})
    cluster["h2"].heal()
    fenced = job.wait_for(ev.FailureDetected, lambda e: e.attempt == 1 and "could not reach the daemon" in e.detail)
    (lost,) = job.of(ev.NodeLost)
    assert fenced.node == lost.node == "h2"
    assert fenced.t < lost.t < job.launched(2).t, job.story()
    job.wait_for(ev.AgentConnected, lambda e: e.node == "h2" and e.t > lost.t)

    cluster["h1"].cut()
    job.wait_until(lambda: not job.watcher.workers(), "h3 ends its workers")
    job.wait_until(lambda: len(job.of(ev.NodeLost)) == 3, "both hosts are lost")
    cluster["h1"].heal()
    # Either may be back first, and is enough.
    job.training(3, on=set(job.launched(3).placement))
    stop(job)

    assert [e.cause for e in job.of(ev.Interrupted)] == ["node_lost", "node_lost"], job.story()
    assert_resumed_right(job)
    assert_told_once(job)
    assert_losses_so_far(job, reference(STEPS))
