"""The Slurm launcher: srun is a script that starts real agents here, each told another node's name, and ends with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest

from ckptd.errors import UsageError
from ckptd.launchers import slurm
from ckptd.launchers.base import Job
from ckptd.launchers.slurm import Allocation, SlurmLauncher, find_allocation
from ckptd.node import processes
from ckptd.node.processes import Process

SECRET = b"\xab" * 32
PATIENCE_S = 60.0

SRUN = """#!/bin/sh
# What srun does, in short: standard input goes to every task, and with srun its tasks end.
here=$(dirname "$0")
echo "$*" >> "$here/calls"
env | grep '^SLURM_' > "$here/environ"
nodes="n1 n2"
while [ "${1#--}" != "$1" ]; do
  case $1 in --nodelist=*) nodes=$(echo "${1#--nodelist=}" | tr , ' ');; esac
  shift
done
order=$(cat)
for node in $nodes; do
  [ ! -e "$here/busy-$node" ] || { echo "srun: error: $node is not available" >&2; exit 1; }
done
trap 'kill -9 $tasks' TERM
for node in $nodes; do
  echo "$order" | SLURMD_NODENAME=$node "$@" &
  tasks="$tasks $!"
done
wait
wait
"""


def program(directory, name, text):
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The directory with the programs of a cluster: nodes n1 and n2, with what sbatch leaves in the environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs, "srun", SRUN)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "9",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_CPUS_PER_TASK": "4",
    }.items():
        monkeypatch.setenv(name, value)
    return programs


@pytest.fixture
def make(cluster, tmp_path):
    made = []

    def launcher(**job):
        job = Job(
            **{
                "run_dir": str(tmp_path / "run"), "run_id": "mine", "workdir": str(tmp_path), "python": os.sys.executable,
                "devices": 1, "secret": SECRET, "port": 9, "epoch": 0, **job,
            }
        )  # fmt: skip
        allocation = Allocation(job_id="7", nodelist="n[1-2]", nodes=["n1", "n2"], addresses={})
        made.append(
            SlurmLauncher(
                job=job, allocation=allocation, addresses={"n1": "127.0.0.1", "n2": "127.0.0.2"},
                down=lambda node: "down in Slurm (fan)" if (cluster / f"down-{node}").exists() else None,
            )
        )  # fmt: skip
        return made[-1]

    yield launcher
    for record in (tmp_path / "run").glob("agent-*.json"):
        with contextlib.suppress(OSError):
            processes.send(agent(tmp_path, record.stem.removeprefix("agent-")), signal.SIGKILL)
    for each in made:
        each.close(over=True)


def arrivals(launcher, *nodes, replace=False):
    """Start agents, and wait for what comes of it."""
    for node in nodes:
        launcher.start(node, replace=replace)
    found, deadline = {}, time.monotonic() + PATIENCE_S
    while set(found) != set(nodes):
        assert time.monotonic() < deadline, f"only {found}"
        for node in nodes:
            arrival = launcher.arrival(node)
            if arrival is not None:
                found[node] = arrival
        time.sleep(0.01)
    assert not any(map(launcher.busy, nodes))
    return found


def agent(tmp_path, node):
    record = json.loads((tmp_path / "run" / f"agent-{node}.json").read_text())
    return Process(record["pid"], record["start_time"])


def calls(cluster):
    return (cluster / "calls").read_text().splitlines()


def gone(agent):
    deadline = time.monotonic() + PATIENCE_S
    while processes.alive(agent) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not processes.alive(agent)


def test_one_srun_brings_an_agent_to_every_node_and_lasts_as_long_as_they_do(make, cluster, tmp_path, monkeypatch):
    launcher = make()
    found = arrivals(launcher, "n1", "n2")
    assert all(arrival.ok and arrival.before == "none" for arrival in found.values())
    (call,) = calls(cluster)
    wanted = ["--jobid=7", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0",
              "--wait=0", "--overlap", "--mem=0"]  # fmt: skip
    assert set(wanted) <= set(call.split())
    assert "--nodelist" not in call and SECRET.hex() not in call
    assert {line.partition("=")[0] for line in (cluster / "environ").read_text().splitlines()} == {"SLURM_JOB_ID"}
    agents = {node: agent(tmp_path, node) for node in ("n1", "n2")}
    for node, process in agents.items():
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            command = file.read()
        assert f'"{node}"'.encode() in command and SECRET.hex().encode() not in command
        dial = json.loads((tmp_path / "run" / f"dial-{node}.json").read_text())
        assert dial["host"] == {"n1": "127.0.0.1", "n2": "127.0.0.2"}[node]

    # Given up, but not over: the agents are wanted. A launcher that comes after finds them.
    launcher.close(over=False)
    assert all(map(processes.alive, agents.values()))
    after = make()
    assert arrivals(after, "n1")["n1"].before == "alive"
    assert calls(cluster)[-1].split().count("--nodelist=n1") == 1
    assert agent(tmp_path, "n1") == agents["n1"]
    assert arrivals(after, "n1", replace=True)["n1"].before == "killed"
    assert gone(agents["n1"]) and processes.alive(agent(tmp_path, "n1"))

    # Over, and they do not leave when they should: nothing of it is left.
    monkeypatch.setattr(slurm, "FAREWELL_S", 1.0)
    after.close(over=True)
    launcher.close(over=True)
    assert gone(agents["n2"]) and gone(agent(tmp_path, "n1"))
    assert list((tmp_path / "run" / "srun").iterdir()) == []


def test_a_node_that_takes_no_step_does_not_keep_the_others_from_theirs(make, cluster):
    launcher = make()
    (cluster / "busy-n2").touch()
    found = arrivals(launcher, "n1", "n2")
    assert not any(arrival.ok for arrival in found.values())
    assert "srun: error: n2 is not available" in found["n1"].why
    found = arrivals(launcher, "n1", "n2")  # each on its own now
    assert found["n1"].ok and not found["n2"].ok
    assert "node n2: srun ended with status 1" in found["n2"].why
    assert len(calls(cluster)) == 3


def test_a_node_that_is_down_is_not_asked(make, cluster):
    (cluster / "down-n2").touch()
    found = arrivals(make(), "n1", "n2")
    assert found["n1"].ok
    assert found["n2"].why == "node n2 is down in Slurm (fan)"
    assert len(calls(cluster)) == 1


def test_what_keeps_an_agent_from_being_there_is_told(make, tmp_path):
    found = arrivals(make(workdir=str(tmp_path / "nowhere")), "n1")
    assert found["n1"].why.startswith(f"node n1: there is no directory {tmp_path / 'nowhere'}")
    found = arrivals(make(python="no-such-python"), "n2")
    assert not found["n2"].ok and "no-such-python" in found["n2"].why


def test_an_agent_can_be_ended(make, tmp_path):
    launcher = make()
    arrivals(launcher, "n1")
    launcher.end("n1")
    assert gone(agent(tmp_path, "n1"))


SCONTROL = """#!/bin/sh
if [ "$2" = hostnames ]; then printf 'n1\\nn2\\n'; exit; fi
[ -z "$AWAY" ] || { echo "slurm_load_node error: Unable to contact slurm controller (connect failure)" >&2; exit 1; }
printf 'NodeName=n1 Arch=x86_64\\n   NodeAddr=10.0.0.1 Port=1\\n\\nNodeName=n2 Arch=x86_64\\n   NodeAddr=10.0.0.2 Port=1\\n'
"""


def test_an_allocation_is_found_though_the_controller_is_away(cluster, monkeypatch):
    program(cluster, "scontrol", SCONTROL)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    found = find_allocation(environ)
    assert (found.job_id, found.nodes) == ("7", ["n1", "n2"])
    assert found.addresses == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    monkeypatch.setenv("AWAY", "1")
    assert find_allocation(environ).nodes == ["n1", "n2"]
    assert find_allocation(environ).addresses == {}


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_NODELIST": "n1"}])
def test_without_an_allocation_it_is_said_how_to_get_one(environ):
    with pytest.raises(UsageError, match="sbatch"):
        find_allocation(environ)


def test_tools_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="scontrol cannot be started"):
        find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
