"""What Slurm's commands print: made with Slurm 22.05 on three nodes, of which one was drained, one was killed."""

from __future__ import annotations

import pytest

from ckptd.slurmtext import node_addresses, node_states, time_left

DRAINING = """n1|mixed|none
n2|draining|bad host|fan 3 | tray 1
n3|idle|none
"""
DOWN = """n1|mixed|none
n2|down*|Not responding
n3|mixed*|none
n3|mixed*|none
"""
NODES = """NodeName=n1 Arch=x86_64 CoresPerSocket=1 
   CPUAlloc=1 CPUEfctv=2 CPUTot=2 CPULoad=0.66
   Gres=(null)
   NodeAddr=10.1.0.1 NodeHostName=vm Port=17001 Version=22.05.8
   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

NodeName=n2 Arch=x86_64 CoresPerSocket=1 
   NodeAddr=node2.cluster NodeHostName=vm Port=17002 Version=22.05.8
   State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=bad host [root@2026-11-29T16:33:13]

NodeName=n3 State=DOWN+NOT_RESPONDING
   Comment=NodeName=x

"""  # fmt: skip # noqa: W291


def test_a_node_that_is_drained_is_leaving_and_its_reason_may_hold_anything():
    states = node_states(DRAINING)
    assert {name: state.leaving for name, state in states.items()} == {"n1": False, "n2": True, "n3": False}
    assert not any(state.down for state in states.values())
    assert str(states["n2"]) == "draining in Slurm (bad host|fan 3 | tray 1)"
    assert str(states["n3"]) == "idle in Slurm"


def test_a_node_that_is_down_is_not_leaving_and_one_that_only_does_not_answer_is_neither():
    states = node_states(DOWN)
    assert {name: (state.leaving, state.down) for name, state in states.items()} == {
        "n1": (False, False), "n2": (False, True), "n3": (False, False),
    }  # fmt: skip


@pytest.mark.parametrize("word", ["drained*", "draining@", "fail", "failing*", "DRAINED"])
def test_words_for_leaving(word):
    assert node_states(f"n1|{word}|why")["n1"].leaving


def test_what_is_no_line_of_sinfo_is_passed_over():
    assert node_states("slurm_load_partitions: Unable to contact slurm controller\n\n|x|y\nn1|\n") == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:06\n", 6), ("9:56", 596), ("1:00:00", 3600), ("2-03:04:05", 183_845), ("0:00", 0),
     ("UNLIMITED", None), ("INVALID", None), ("NOT_SET", None), ("", None), ("-5:00", None)],
)  # fmt: skip
def test_time_left(text, seconds):
    assert time_left(text) == seconds


def test_addresses_are_those_that_slurm_uses():
    assert node_addresses(NODES) == {"n1": "10.1.0.1", "n2": "node2.cluster"}
    assert node_addresses("") == {}
