"""What follows from what Slurm says: its commands are scripts that print a file, the states are folded from events."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ckptd.allocation import AllocationWatch
from ckptd.core import decisions, picture, run
from ckptd.core import events as ev
from ckptd.core.commands import Record
from ckptd.core.devices import node_identity
from ckptd.core.policy import Policy
from ckptd.core.state import Status
from ckptd.launchers.slurm import Allocation

NODES = ("n1", "n2")
IDLE = "n1|mixed|none\nn2|mixed|none\n"


class Slurm:
    """Its commands, and a clock."""

    def __init__(self, directory):
        self.directory = directory
        self.time = 1000.0
        for name in ("squeue", "sinfo"):
            (directory / name).write_text(
                f'#!/bin/sh\n[ ! -e {directory}/away ] || {{ echo "Unable to contact slurm controller" >&2; exit 1; }}\n'
                f"cat {directory}/{name}.txt\n"
            )
            (directory / name).chmod(0o755)
        self.say(left="1:00:00", nodes=IDLE)

    def say(self, *, left=None, nodes=None):
        for name, text in (("squeue", left), ("sinfo", nodes)):
            if text is not None:
                (self.directory / f"{name}.txt").write_text(text)

    def watch(self, *, nodes=NODES, **environ):
        allocation = Allocation(job_id="7", nodelist="n[1-2]", nodes=list(nodes), addresses={})
        return AllocationWatch(allocation, environ=environ, stop_grace_s=3.0, now=lambda: self.time)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Slurm(tmp_path)


def training(*, allocation="7.0", min_devices=1):
    """The picture of a run that trains on both nodes, one device each."""
    policy = Policy(run_id="r", name="n", interval_steps=10, nodes=NODES, min_devices=min_devices)
    history = [ev.DaemonStarted(t=0.0, policy=policy.to_dict(), allocation=allocation)]
    for node in NODES:
        history.append(ev.AgentConnected(t=1.0, node=node, pid=5, devices=[{"index": 0}], address=f"10.0.0.{node[1]}"))
        history.append(ev.HealthReported(t=1.0, node=node))
    history.append(ev.InventoryReported(t=1.0, node="n1"))
    history.append(ev.AttemptLaunched(t=2.0, attempt=1, world_size=2, placement={"n1": [0], "n2": [0]}))
    history.append(ev.StoreOpened(t=2.0, attempt=1, node="n1", host="10.0.0.1", port=1))
    history += [ev.WorkersStarted(t=3.0, attempt=1, node=node) for node in NODES]
    history.append(ev.WorkersInitialised(t=4.0, attempt=1, node="n1", world_size=2))
    history.append(ev.StateRestored(t=4.0, attempt=1, node="n1"))
    history.append(ev.FirstStep(t=5.0, attempt=1, node="n1", step=1))
    found = picture.Picture()
    for event in history:
        found = picture.apply(found, event)
    assert found.run.status is Status.TRAINING
    return found


def after(watch, found, events):
    for event in events:
        watch.saw(event)
        found = picture.apply(found, event)
    return found


def test_a_drained_node_is_left_out_and_used_again_when_it_is_given_back(slurm):
    watch, found = slurm.watch(), training()
    watch.poll()
    assert watch.changed(found.run, 9.0) == []
    slurm.say(nodes="n1|mixed|none\nn2|draining|fan tray\n")
    watch.poll()
    (drained,) = events = watch.changed(found.run, 10.0)
    assert (drained.device, drained.drained) == (node_identity("n2"), True)
    assert drained.source == "Slurm: draining in Slurm (fan tray)"
    found = after(watch, found, events)
    assert watch.changed(found.run, 11.0) == []  # said once
    (command,) = decisions.decide(found.run, 11.0)
    assert isinstance(command, Record) and command.event.request == "relaunch"

    slurm.say(nodes="n1|mixed|none\nn2|down*|Not responding\n")  # not given back
    watch.poll()
    assert watch.changed(found.run, 12.0) == []
    slurm.say(nodes=IDLE)
    watch.poll()
    (back,) = watch.changed(found.run, 13.0)
    assert (back.device, back.drained) == (node_identity("n2"), False)


def test_a_daemon_that_comes_after_knows_whose_drain_it_was(slurm):
    found = training()
    by_slurm = ev.DeviceDrained(t=6.0, device=node_identity("n2"), drained=True, source="Slurm: draining")
    by_hand = ev.DeviceDrained(t=6.0, device=node_identity("n2"), drained=True, source="ckptd drain")
    for history, given_back in (([by_slurm], 1), ([by_hand], 0), ([by_slurm, by_hand], 0)):
        watch = slurm.watch()
        state = after(watch, found, history).run
        watch.poll()
        assert len(watch.changed(state, 9.0)) == given_back, history


def test_what_a_person_drained_is_not_drained_again_by_slurm(slurm):
    watch = slurm.watch()
    by_hand = ev.DeviceDrained(t=6.0, device=node_identity("n2"), drained=True, source="ckptd drain")
    found = after(watch, training(), [by_hand])
    slurm.say(nodes="n1|mixed|none\nn2|drained|\n")
    watch.poll()
    assert watch.changed(found.run, 9.0) == []


@pytest.mark.parametrize(
    ("nodes", "min_devices"), [("n1|drng|x\nn2|drng|x\n", 1), ("n1|mixed|none\nn2|failing|x\n", 2)]
)
def test_training_stays_where_it_cannot_do_without(slurm, nodes, min_devices):
    watch, found = slurm.watch(), training(min_devices=min_devices)
    slurm.say(nodes=nodes)
    watch.poll()
    events = watch.changed(found.run, 9.0)
    assert events and all(isinstance(e, ev.Noted) and "training goes on there" in e.what for e in events)
    assert watch.changed(found.run, 10.0) == []  # said once


def test_a_node_that_is_down_is_no_drain_but_takes_no_agent(slurm):
    watch, found = slurm.watch(), training()
    slurm.say(nodes="n1|mixed*|none\nn2|down*|Not responding\n")
    watch.poll()
    assert watch.changed(found.run, 9.0) == []
    assert watch.down("n2") == "down in Slurm (Not responding)"
    assert watch.down("n1") is None


def test_before_the_time_is_over_the_run_is_asked_to_save_and_to_be_queued_again(slurm):
    watch, found = slurm.watch(), training()
    watch.poll()
    assert watch.left_s() == 3600.0
    slurm.time += 3500.0  # no save was seen yet: three guesses of 20 s, 3 s of grace, and 30 s
    assert watch.stop(found, 9.0) is None
    slurm.time += 8.0
    stop = watch.stop(found, 9.0)
    assert (stop.request, stop.exit_status, stop.source) == ("stop", 75, "the time limit of Slurm's job 7")
    assert stop.timeout_s == 92.0 - 3.0 - 5.0  # no save is waited for beyond the end
    assert watch.stop(picture.apply(found, stop), 9.0) is None


def test_a_limit_that_is_changed_holds_and_one_that_is_taken_away_is_none(slurm):
    watch, found = slurm.watch(), training()
    slurm.say(left="0:30")
    watch.poll()
    slurm.say(left="2:00:00")
    watch.poll()
    assert watch.stop(found, 9.0) is None and watch.left_s() == 7200.0
    slurm.say(left="UNLIMITED")
    watch.poll()
    slurm.time += 1e6
    assert watch.left_s() is None and watch.stop(found, 9.0) is None


def test_a_controller_that_is_away_stops_nothing_but_the_end_still_comes(slurm, caplog):
    watch, found = slurm.watch(), training()
    watch.poll()
    (slurm.directory / "away").touch()
    for _ in range(3):
        watch.poll()
    assert len(caplog.records) == 1 and "training goes on" in caplog.text
    assert watch.changed(found.run, 9.0) == [] and watch.left_s() == 3600.0
    slurm.time += 3590.0
    assert watch.stop(found, 9.0) is not None


def test_what_the_batch_script_was_told_of_the_end_holds_until_slurm_says_better(slurm):
    watch = slurm.watch(SLURM_JOB_END_TIME=str(int(time.time()) + 600))
    assert 590 < watch.left_s() <= 600
    watch.poll()
    assert watch.left_s() == 3600.0


def test_a_run_that_is_queued_again_waits_for_no_node_that_it_has_not_any_more(slurm):
    watch = slurm.watch(nodes=("n1", "n3"), SLURM_RESTART_COUNT="1")
    assert watch.identity == "7.1"
    state = training().run
    policy = Policy(run_id="r", name="n", interval_steps=10, nodes=("n1", "n3"))
    # The old daemon had been told to stop when the job was cut down, and did not live to see it done.
    state = run.apply(state, ev.Requested(t=50.0, request="stop", source="SIGTERM", exit_status=75))
    state = run.apply(state, ev.DaemonStarted(t=60.0, policy=policy.to_dict(), allocation=watch.identity))
    assert state.request is None
    lost, ended = watch.departed(state, 60.0)
    state = run.apply(state, lost)
    (failed,) = decisions.decide(state, 60.0)
    assert (failed.event.lost, failed.event.node) == ("node", "n2")
    state = run.apply(run.apply(state, failed.event), ended)
    assert not any(isinstance(c, Record) for c in decisions.decide(state, 60.0))  # n1 has to be asked
    state = run.apply(state, ev.AgentConnected(t=61.0, node="n1", pid=6, devices=[{"index": 0}]))
    state = run.apply(state, ev.AttemptEnded(t=62.0, node="n1", attempt=1))
    (over,) = decisions.decide(state, 62.0)
    assert isinstance(over.event, ev.Interrupted) and (over.event.cause, over.event.node) == ("node_lost", "n2")


def test_a_stop_that_the_same_allocation_was_asked_for_is_still_to_be_served():
    state = training().run
    state = run.apply(state, ev.Requested(t=50.0, request="stop", source="SIGUSR1", exit_status=75))
    again = ev.DaemonStarted(t=60.0, policy=state.policy.to_dict(), allocation="7.0")
    assert run.apply(state, again).request is not None


def test_outside_an_allocation_the_command_says_so_and_ends_with_64(tmp_path):
    (tmp_path / "train.py").write_text("")
    job = tmp_path / "job.yaml"
    job.write_text(
        "version: 1\nname: j\ncommand: [train.py]\nrun_dir: run\ncluster: {launcher: slurm}\n"
        "checkpoint: {tiers: [{name: disk, path: ck, shared: true}]}\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    command = [sys.executable, "-m", "ckptd"]
    done = subprocess.run([*command, "run", job], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 64 and "no allocation of Slurm" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    done = subprocess.run(
        [*command, "validate", job], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
