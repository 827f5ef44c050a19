"""What an agent is told: the settings of the job, and a launch that the shim can read."""

from __future__ import annotations

import json

import pytest
from daemons import RUN_ID, specification

from ckptd import orders
from ckptd.core import events as ev
from ckptd.core import picture
from ckptd.core.estimates import estimate, initial
from ckptd.core.state import RunState
from ckptd.node import warm
from ckptd.node.agent import Settings
from ckptd.rundir import RunDir
from ckptd_shim.contract import Guard, LaunchContext


def launched(spec, placement, resume=None):
    world = sum(map(len, placement.values()))
    history = [ev.DaemonStarted(t=0.0, policy=spec.policy(RUN_ID).to_dict())]
    history += [
        ev.AgentConnected(t=0.1, node=name, devices=[{"index": i} for i in range(8)], running=None)
        for name in placement
    ]
    history.append(ev.AttemptLaunched(t=1.0, attempt=3, world_size=world, placement=placement, resume=resume))
    now = picture.replay(history)
    return picture.apply(now, picture.decide(now, 1.0)[0].event)  # the interval


def test_settings_are_what_an_agent_reads(tmp_path):
    spec = specification(
        tmp_path, health={"command": ["true"], "interval": "7s"}, restart={"stop_grace": "2s"},
        checkpoint={"tiers": [{"name": "disk", "path": "ckpt", "keep_last": 4, "keep_every": {"steps": 50}}]},
    )  # fmt: skip
    settings = Settings.from_message(json.loads(json.dumps(orders.settings(spec))))
    assert (settings.health_command, settings.health_interval_s, settings.stop_grace_s) == (["true"], 7.0, 2.0)
    (tier,) = settings.tiers
    assert (tier.name, tier.keep_last, tier.keep_every_steps) == ("disk", 4, 50)
    assert tier.directory == str(tmp_path / "ckpt" / "job")


def test_a_launch_is_a_document_of_the_contract(tmp_path):
    resume = {"step": 40, "tier": "disk", "path": "/ckpt/s", "marker_crc32c": "0" * 8, "sequence": 4, "attempt": 2}
    spec = specification(tmp_path, batch={"global": 12, "micro": 4}, env={"HOME": "/elsewhere"})
    now = launched(spec, {"local": [0, 1]}, resume)
    order = orders.Launching(spec, RunDir(spec.run_dir_path), RUN_ID, now).order("local")
    context = LaunchContext.from_json(json.dumps(order["context"]), where="order")
    assert (context.run_id, context.attempt, context.global_batch, context.micro_batch) == (RUN_ID, 3, 12, 4)
    assert (context.resume.step, context.resume.marker_crc32c) == (40, "0" * 8)
    assert context.interval_steps == 10
    assert context.guard == Guard()
    assert order["argv"][1:5] == ["-u", "-m", "ckptd_shim.launch", "--"]
    assert order["env"]["HOME"] == "/elsewhere"


def test_what_the_guard_looks_for_reaches_the_workers_and_what_follows_the_core(tmp_path):
    guard = {"finite": False, "loss_spike": 8, "param_norm": 1e4, "on_reject": "rollback", "rollback_after": 2}
    spec = specification(tmp_path, guard=guard)
    order = orders.Launching(spec, RunDir(spec.run_dir_path), RUN_ID, launched(spec, {"local": [0]})).order("local")
    context = LaunchContext.from_json(json.dumps(order["context"]), where="order")
    assert context.guard == Guard(finite=False, loss_spike=8.0, param_norm=1e4)
    policy = spec.policy(RUN_ID)
    assert (policy.on_reject, policy.rollback_after) == ("rollback", 2)


def test_ranks_go_on_from_node_to_node(tmp_path):
    spec = specification(tmp_path)
    now = launched(spec, {"a": [0, 1, 2], "b": [5]})
    first, second = map(orders.Launching(spec, RunDir(spec.run_dir_path), RUN_ID, now).order, ("a", "b"))
    assert (first["ranks"], first["devices"], first["node_rank"], first["nodes"]) == ([0, 1, 2], [0, 1, 2], 0, 2)
    assert (second["ranks"], second["devices"], second["node_rank"], second["nodes"]) == ([3], [5], 1, 2)
    assert orders.node_of_rank_zero(now.run) == "a"


def test_nobody_carries_rank_zero_before_a_launch():
    assert orders.node_of_rank_zero(RunState()) is None


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"])
def test_what_the_user_set_stands(tmp_path, monkeypatch, name):
    spec = specification(tmp_path)
    now = launched(spec, {"local": [0, 1]})
    monkeypatch.delenv(name, raising=False)
    order = orders.Launching(spec, RunDir(spec.run_dir_path), RUN_ID, now).order("local")
    assert name in warm.environment(order["defaults"], order["env"])
    monkeypatch.setenv(name, "mine")
    assert name not in warm.environment(order["defaults"], order["env"]), "inherited from the agent"
    assert warm.environment(order["defaults"], {name: "the job's"})[name] == "the job's"


def test_a_save_before_a_stop_gets_the_time_that_saves_take():
    quick = estimate(initial(), t=0.0, world_size=1)
    assert orders.drain_timeout(quick) == orders.MIN_DRAIN_S
    slow = ev.SaveCommitted(t=10.0, attempt=1, step=1, stall_s=10.0, upload_s=600.0)
    history = [
        ev.DaemonStarted(t=0.0), ev.AttemptLaunched(t=0.0, attempt=1, world_size=1, placement={"local": [0]}), slow,
    ]  # fmt: skip
    assert orders.drain_timeout(picture.replay(history).estimate) == pytest.approx(5 * 610.0)
