"""Where each node has a directory of its own, its ranks' files lie there alone, and every node knows what the whole is."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from saving import begin_save, digest, load, position
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptd_shim.checkpoint import Saver, Target
from ckptd_shim.contract import COMMITTED, OWNER, Marker
from ckptd_shim.digest import crc32c_file
from ckptd_shim.errors import CheckpointError
from ckptd_shim.pulse import ReportWriter
from ckptd_shim.ranks import Ranks
from ckptd_shim.state import TrainState

NODES = ("a", "a", "b", "b")


def build(world, sharded):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    data = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=data)).pow(2).mean().backward()
        optimizer.step()


def saver_of(rank, directory, nodes):
    leads = nodes.index(nodes[rank]) == rank
    target = Target(
        save_dir=os.path.join(directory, nodes[rank]), run_id="run", attempt=1, tier="memory", node=nodes[rank],
        leads=leads,
    )  # fmt: skip
    os.makedirs(target.save_dir, exist_ok=True)
    report = ReportWriter(os.path.join(directory, "report.jsonl") if rank == 0 else None)
    return Saver(target=target, ranks=Ranks(dist.new_group(backend="gloo")), sequence=0, report=report)


def save_twice(rank, world, directory, sharded, nodes=NODES, ruin=False):
    model, optimizer = build(world, sharded)
    state = TrainState(model=model, optimizer=optimizer, rank=rank)
    saver = saver_of(rank, directory, nodes)
    outcomes = []
    for step in (1, 2):
        train(model, optimizer, 1)
        if ruin and step == 2 and rank == 2:
            # Node b's directory takes nothing: a file is where the checkpoint is to be.
            open(os.path.join(saver.target.save_dir, "step_000000002.a0001"), "w").close()
        begin_save(saver, state, step, saver._ranks)
        saver.wait()
        outcomes.append(saver.outcome.committed)
        error = saver.outcome.error
    saver.close()
    return {"digest": digest(model, optimizer), "committed": outcomes, "error": error}


def restore(rank, world, path, sharded, partial=True):
    model, optimizer = build(world, sharded)
    state = TrainState(model=model, optimizer=optimizer, rank=rank)
    group = Ranks(dist.new_group(backend="gloo") if world > 1 else None)
    path = path[rank] if isinstance(path, list) else path
    try:
        load(path, state, group, partial=partial)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"digest": digest(model, optimizer)}


def directory_of(tmp_path, node, step=2):
    return tmp_path / node / f"step_{step:09d}.a0001"


@pytest.mark.parametrize("sharded", [True, False])
def test_each_node_holds_its_own_ranks_files_and_the_same_marker(tmp_path, sharded):
    saved = run_ranks(4, __file__, "save_twice", directory=str(tmp_path), sharded=sharded)
    assert all(each["committed"] == [True, True] for each in saved), saved
    for step in (1, 2):
        a, b = (directory_of(tmp_path, node, step) for node in "ab")
        assert (a / COMMITTED).read_bytes() == (b / COMMITTED).read_bytes()
        marker = Marker.read(a / COMMITTED)
        listed = {file.name: file for file in marker.files}
        own = {node: {marker.files[i].name for i in places} for node, places in marker.nodes.items()}
        assert own["a"] | own["b"] == set(listed)
        extras = {"a": {"extras_rank0", "extras_rank1"}, "b": {"extras_rank2", "extras_rank3"}}
        assert extras["a"] <= own["a"]
        assert extras["b"] <= own["b"]
        for node, path in (("a", a), ("b", b)):
            there = set(os.listdir(path)) - {COMMITTED, OWNER}
            assert there == own[node] | {".metadata"}
            for name in there:
                assert crc32c_file(path / name) == (listed[name].size, listed[name].crc32c)
        for k, needed in enumerate(marker.needs):
            # What is not sharded, such as the optimizer's step counts, rank 0 alone has written.
            mine = {f"__{k}_0.distcp"} if sharded else set()
            assert {marker.files[i].name for i in needed} == mine | {"__0_0.distcp"}

    # Every rank restores from its own node, with no more than the marker says that it needs.
    a, b = (directory_of(tmp_path, node) for node in "ab")
    marker = Marker.read(a / COMMITTED)
    for rank in (2, 3):
        for place in (*marker.needs[rank], *(i for i, f in enumerate(marker.files) if f.name == "extras_rank0")):
            if not (b / marker.files[place].name).exists():
                shutil.copy(a / marker.files[place].name, b)
    paths = [str(a), str(a), str(b), str(b)]
    found = run_ranks(4, __file__, "restore", path=paths, sharded=sharded)
    assert [each.get("digest") for each in found] == [each["digest"] for each in saved], found


def test_a_file_that_is_needed_and_missing_is_an_error_on_every_rank(tmp_path):
    run_ranks(4, __file__, "save_twice", directory=str(tmp_path), sharded=True)
    a = directory_of(tmp_path, "a")
    found = run_ranks(4, __file__, "restore", path=str(a), sharded=True)
    assert all("error" in each for each in found)
    assert "extras_rank2" in found[2]["error"]


def test_what_fails_on_one_node_is_committed_on_none(tmp_path):
    saved = run_ranks(4, __file__, "save_twice", directory=str(tmp_path), sharded=True, ruin=True)
    assert all(each["committed"] == [True, False] for each in saved)
    assert all("File exists" in each["error"] for each in saved)
    for node in "ab":
        assert not (directory_of(tmp_path, node) / COMMITTED).exists()
        assert (directory_of(tmp_path, node, 1) / COMMITTED).exists()
    told = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in told if line["kind"].startswith("save_c") or line["kind"] == "save_failed"] == [
        "save_committed", "save_failed",
    ]  # fmt: skip
    assert position(2).step == 2
