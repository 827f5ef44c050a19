"""A checkpoint is committed whole or not at all, on any number of ranks, and what is damaged is refused."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from saving import begin_save, digest, load, make_saver, save
from torch import nn
from torch.distributed.checkpoint import metadata

from ckptd_shim import loading
from ckptd_shim.contract import COMMITTED, OWNER, Marker, checkpoint_dirname
from ckptd_shim.digest import crc32c_bytes, crc32c_file, verify_checkpoint
from ckptd_shim.errors import CheckpointError
from ckptd_shim.ranks import Ranks
from ckptd_shim.state import TrainState


def make(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, seed=7):
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=data)).pow(2).mean().backward()
        optimizer.step()


def marker_crc(path):
    with open(os.path.join(path, COMMITTED), "rb") as file:
        return crc32c_bytes(file.read())


def reports(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


# --- one rank: damage -------------------------------------------------------------------------------------------------


def test_crc32c_is_castagnoli(tmp_path):
    assert crc32c_bytes(b"123456789") == "e3069283"  # the check value of RFC 3720 and of the CRC catalogue
    (tmp_path / "x").write_bytes(b"123456789" * 1_000_000)
    size, crc = crc32c_file(tmp_path / "x")
    assert (size, crc) == (9_000_000, crc32c_bytes(b"123456789" * 1_000_000))


def test_a_commit_lists_every_file_with_its_size_and_digest(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    marker = verify_checkpoint(path, marker_crc(path))
    assert sorted(os.listdir(path)) == sorted([COMMITTED, OWNER, *(f.name for f in marker.files)])
    assert (Path(path) / OWNER).read_text() == marker.run_id
    assert {f.name for f in marker.files} == {".metadata", "__0_0.distcp", "extras_rank0"}
    assert (marker.step, marker.samples_seen, marker.world_size, marker.sequence, marker.comparable) == (
        3,
        24,
        1,
        1,
        True,
    )


def flip(name):
    with open(name, "r+b") as file:
        file.seek(os.path.getsize(name) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def truncate(name):
    os.truncate(name, os.path.getsize(name) - 1)


def directory(name):
    os.unlink(name)
    os.mkdir(name)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extras_rank0", COMMITTED])
@pytest.mark.parametrize("damage", [flip, truncate, os.unlink, directory])
def test_damage_to_any_file_is_found_and_named(tmp_path, name, damage):
    model, optimizer = make()
    train(model, optimizer, 1)
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    crc = marker_crc(path)
    damage(os.path.join(path, name))
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(path, crc)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extras_rank0", COMMITTED])
@pytest.mark.parametrize("damage", [truncate, os.unlink])
def test_load_refuses_missing_and_short_files_and_touches_nothing(tmp_path, name, damage):
    model, optimizer = make()
    train(model, optimizer, 1)
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    crc = marker_crc(path)
    damage(os.path.join(path, name))
    other, second = make(seed=1)
    before = digest(other, second)
    with pytest.raises(CheckpointError, match=name):
        load(path, TrainState(model=other, optimizer=second), marker_crc32c=crc)
    assert digest(other, second) == before


def test_load_refuses_a_marker_other_than_the_chosen_one(tmp_path):
    model, optimizer = make()
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    with pytest.raises(CheckpointError, match="not the checkpoint that was chosen"):
        load(path, TrainState(model=model, optimizer=optimizer), marker_crc32c="00000000")


def rewrite_marker(path, **changes):
    with open(os.path.join(path, COMMITTED)) as file:
        document = json.load(file)
    with open(os.path.join(path, COMMITTED), "w") as file:
        json.dump(document | changes, file)


def test_a_marker_of_another_format_or_with_paths_is_refused(tmp_path):
    path = save(tmp_path, TrainState(model=nn.Linear(1, 1)))
    rewrite_marker(path, format=99)
    with pytest.raises(CheckpointError, match="format 99"):
        verify_checkpoint(path)
    rewrite_marker(path, format=1, files=[{"name": "../secret", "size": 1, "crc32c": "00000000"}])
    with pytest.raises(CheckpointError, match=r"'\.\./secret'"):
        verify_checkpoint(path)


def replace_metadata(path, value):
    """Another `.metadata`, as if the job had written and committed it; returns the marker."""
    data = pickle.dumps(value)
    with open(os.path.join(path, ".metadata"), "wb") as file:
        file.write(data)
    marker = Marker.read(os.path.join(path, COMMITTED))
    files = [dataclasses.asdict(each) for each in marker.files if each.name != ".metadata"]
    files.append({"name": ".metadata", "size": len(data), "crc32c": crc32c_bytes(data)})
    rewrite_marker(path, files=files)
    return Marker.read(os.path.join(path, COMMITTED))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/ckptd-test-unpickled",)


def test_metadata_is_not_unpickled_into_anything_but_descriptions(tmp_path):
    model, _ = make()
    path = save(tmp_path, TrainState(model=model))
    marker = Marker.read(os.path.join(path, COMMITTED))
    committed = replace_metadata(path, Evil())
    with pytest.raises(CheckpointError, match="mkdir"):
        loading.read_metadata(path, committed)
    with pytest.raises(CheckpointError, match="its bytes have changed"):
        loading.read_metadata(path, marker)  # of other bytes than were committed not even that much is looked at
    assert not os.path.exists("/tmp/ckptd-test-unpickled")


class ByName:
    """Pickled as an enum's member is by Python before 3.11.4."""

    def __init__(self, owner, name):
        self.call = getattr, (owner, name)

    def __reduce__(self):
        return self.call


def test_members_of_enums_may_be_named_and_nothing_else_be_got(tmp_path):
    model, _ = make()
    path = save(tmp_path, TrainState(model=model))
    encoding = metadata._MEM_FORMAT_ENCODING
    for owner, name in ((encoding, "__init__"), (encoding, "_member_map_"), (metadata.TensorProperties, "__init__")):
        with pytest.raises(CheckpointError, match=r"no place in a description|no enum"):
            loading.read_metadata(path, replace_metadata(path, ByName(owner, name)))
    with pytest.raises(
        CheckpointError, match="no description of a checkpoint"
    ):  # read, and then found to be something else
        loading.read_metadata(path, replace_metadata(path, ByName(encoding, "TORCH_CONTIGUOUS_FORMAT")))


def test_metadata_may_not_point_outside_the_committed_files(tmp_path):
    model, _ = make()
    path = save(tmp_path, TrainState(model=model))
    marker = Marker.read(os.path.join(path, COMMITTED))
    metadata = loading.read_metadata(path, marker)
    next(iter(metadata.storage_data.values())).relative_path = "../../elsewhere"
    with pytest.raises(CheckpointError, match="elsewhere"):
        loading.read_metadata(path, replace_metadata(path, metadata))


# --- one rank: which one ----------------------------------------------------------------------------------------------


def test_the_newest_is_chosen_by_sequence_and_a_damaged_one_is_passed_over(tmp_path, capsys):
    assert loading.newest(os.fspath(tmp_path / "absent")) is None
    assert loading.newest(os.fspath(tmp_path)) is None
    state = TrainState(model=nn.Linear(2, 2))
    saver = make_saver(tmp_path)
    paths = []
    try:
        for step in (900, 1000, 20):  # a run that was rolled back commits smaller steps later
            begin_save(saver, state, step)
            saver.wait()
            paths.append(saver.outcome.path)
    finally:
        saver.close()
    os.mkdir(tmp_path / "step_000009999.a0001")  # never committed
    path, marker = loading.newest(os.fspath(tmp_path))
    assert (path, marker.step, marker.sequence) == (paths[2], 20, 3)
    flip(os.path.join(paths[2], "__0_0.distcp"))
    assert loading.newest(os.fspath(tmp_path))[0] == paths[1]
    assert "its bytes have changed" in capsys.readouterr().err
    os.unlink(os.path.join(paths[1], "extras_rank0"))
    truncate(os.path.join(paths[0], COMMITTED))
    os.truncate(os.path.join(paths[0], COMMITTED), 5)
    with pytest.raises(CheckpointError, match="none of them can be read"):
        loading.newest(os.fspath(tmp_path))


def test_checkpoints_of_two_runs_in_one_directory_are_not_mixed(tmp_path):
    path = save(tmp_path, TrainState(model=nn.Linear(2, 2)))
    other = tmp_path / "step_000000009.a0007"
    shutil.copytree(path, other)
    rewrite_marker(other, run_id="another")
    with pytest.raises(CheckpointError, match="2 runs"):
        loading.newest(os.fspath(tmp_path))


# --- one rank: saving -------------------------------------------------------------------------------------------------


def test_a_second_save_waits_for_the_first_and_both_commit(tmp_path):
    model = nn.Linear(1500, 1500)
    state = TrainState(model=model)
    saver = make_saver(tmp_path, report=os.fspath(tmp_path / "report"))
    gate = threading.Event()
    saver._submit(gate.wait)  # the thread is busy until the gate opens
    try:
        with torch.no_grad():
            model.weight.fill_(1.0)
        opener = threading.Timer(0.3, gate.set)
        opener.start()
        stall = begin_save(saver, state, 1)
        assert stall >= 0.25  # the wait is part of the stall
        with torch.no_grad():
            model.weight.fill_(2.0)
        begin_save(saver, state, 2)
        saver.wait()
        opener.join()
    finally:
        gate.set()
        saver.close()
    for step in (1, 2):
        load(tmp_path / f"step_{step:09d}.a0001", state)
        assert model.weight.unique().tolist() == [float(step)]
    committed = [line for line in reports(tmp_path / "report") if line["kind"] == "save_committed"]
    assert [line["sequence"] for line in committed] == [1, 2]
    assert committed[0]["stall_s"] >= 0.25
    assert all(line["upload_s"] >= line["stall_s"] for line in committed)
    assert all(line["marker_crc32c"] == marker_crc(line["path"]) for line in committed)


def test_buffers_are_kept_between_saves_and_follow_the_shapes(tmp_path):
    model = nn.Linear(10, 10)
    saver = make_saver(tmp_path)
    try:
        begin_save(saver, TrainState(model=model), 1)
        saver.wait()
        first = {key: buffer.data_ptr() for key, buffer in saver._stager._buffers.items()}
        begin_save(saver, TrainState(model=model), 2)
        saver.wait()
        assert {key: buffer.data_ptr() for key, buffer in saver._stager._buffers.items()} == first
        begin_save(saver, TrainState(model=nn.Linear(3, 3)), 3)
        saver.wait()
        assert saver._stager._buffers["model.weight"].shape == (3, 3)
    finally:
        saver.close()


@contextlib.contextmanager
def small_disk(path, size="4m"):
    """A real file system of `size` that can be full."""
    os.makedirs(path, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path, leave):
    """Fill the disk at `path` until only `leave` bytes are free."""
    free = os.statvfs(path)
    with open(os.path.join(path, "ballast"), "wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize - leave))


@pytest.mark.parametrize("leave", [0, 8192, 300_000])
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path, leave):
    disk = tmp_path / "disk"
    model = nn.Linear(400, 400)  # 640 kB
    state = TrainState(model=model)
    with small_disk(disk):
        saver = make_saver(disk, report=os.fspath(tmp_path / "report"))
        try:
            begin_save(saver, state, 1)
            saver.wait()
            fill(disk, leave)
            begin_save(saver, state, 2)
            saver.wait()
            assert not saver.outcome.committed
            assert saver.outcome.errno == errno.ENOSPC
            assert sorted(os.listdir(disk)) == ["ballast", "step_000000001.a0001"]
            os.unlink(disk / "ballast")
            begin_save(saver, state, 3)
            saver.wait()
            assert saver.outcome.committed
            verify_checkpoint(saver.outcome.path)
        finally:
            saver.close()
    lines = [line for line in reports(tmp_path / "report") if line["kind"] != "save_staged"]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("save_committed", 1),
        ("save_failed", 2),
        ("save_committed", 3),
    ]
    assert lines[1]["errno"] == errno.ENOSPC
    assert "No space left" in lines[1]["error"]
    assert lines[1]["left"] is False
    assert lines[2]["sequence"] == 2


# --- two ranks --------------------------------------------------------------------------------------------------------


def on_ranks(world, function, **arguments):
    return run_ranks(world, __file__, function, **arguments)


def full_disk(rank, world, disk, report):
    ranks = Ranks(dist.new_group(backend="gloo"))
    model = nn.Linear(400, 400)
    saver = make_saver(disk, ranks, report=report if rank == 0 else None)
    outcomes = []
    for step in (1, 2, 3):
        if rank == 0 and step == 2:
            fill(disk, 8192)
        if rank == 0 and step == 3:
            os.unlink(os.path.join(disk, "ballast"))
        dist.barrier()
        begin_save(saver, TrainState(model=model), step, ranks)
        saver.wait()
        outcomes.append([saver.outcome.committed, saver.outcome.errno])
        dist.barrier()
    saver.close()
    return outcomes


def test_a_full_disk_with_two_ranks(tmp_path):
    disk = os.fspath(tmp_path / "disk")
    with small_disk(disk):
        results = on_ranks(2, "full_disk", disk=disk, report=os.fspath(tmp_path / "report"))
        assert results == [[[True, None], [False, errno.ENOSPC], [True, None]]] * 2
        assert sorted(os.listdir(disk)) == ["step_000000001.a0001", "step_000000003.a0001"]
        marker = verify_checkpoint(os.path.join(disk, "step_000000003.a0001"))
        assert (marker.sequence, marker.world_size) == (2, 2)
        names = {file.name for file in marker.files}
        assert {".metadata", "__0_0.distcp", "extras_rank0", "extras_rank1"} <= names


def one_rank_fails(rank, world, where):
    ranks = Ranks(dist.new_group(backend="gloo"))
    model = nn.Linear(4, 4)
    saver = make_saver(where, ranks)
    if rank == 1:
        # Its file of extras cannot be made: something takes that name as soon as the tensors are written.
        rest = saver._write_extras

        def blocked(job, **how):
            os.mkdir(os.path.join(job.path, "extras_rank1"))
            return rest(job, **how)

        saver._write_extras = blocked
    begin_save(saver, TrainState(model=model), 1, ranks)
    saver.wait()
    failed = [saver.outcome.committed, saver.outcome.errno, saver.outcome.error]
    if rank == 1:
        del saver._write_extras
    begin_save(saver, TrainState(model=model), 2, ranks)
    saver.wait()
    saver.close()
    return [*failed, saver.outcome.committed]


def test_the_failure_of_one_rank_is_everybody_s_and_the_next_save_works(tmp_path):
    results = on_ranks(2, "one_rank_fails", where=os.fspath(tmp_path))
    for committed, number, error, after in results:
        assert not committed
        assert number == errno.EEXIST
        assert error.startswith("rank 1: ")
        assert after
    assert os.listdir(tmp_path) == ["step_000000002.a0001"]


def last_word_is_lost(rank, world, where, report):
    model, optimizer = make()
    ranks = Ranks(dist.new_group(backend="gloo"))
    saver = make_saver(where, ranks, report if rank == 0 else None, sequence=4)
    if rank == 1:
        # This rank dies when it has said what it wrote and waits for the verdict: rank 0 is about to commit.
        exchange = ranks.exchange

        def until_the_last(mine):
            if list(mine) == ["problem"]:
                os._exit(0)
            return exchange(mine)

        ranks.exchange = until_the_last
    begin_save(saver, TrainState(model=model, optimizer=optimizer, rank=rank), 7, ranks)
    saver.wait()
    os._exit(0 if saver.outcome.committed and (saver.sequence, saver.committed_step) == (5, 7) else 3)


def test_a_commit_stays_one_when_a_rank_dies_before_it_hears_of_it(tmp_path):
    report = tmp_path / "report.jsonl"
    with pytest.raises(FileNotFoundError):  # ranks that end by themselves, well, return nothing
        on_ranks(2, "last_word_is_lost", where=str(tmp_path / "ckpt"), report=str(report))
    assert [line["kind"] for line in reports(report)] == ["save_staged", "save_committed"]
    verify_checkpoint(str(tmp_path / "ckpt" / checkpoint_dirname(7, 1)))


def unalike(rank, world, where):
    ranks = Ranks(dist.new_group(backend="gloo"))
    saver = make_saver(where, ranks)
    begin_save(saver, TrainState(model=nn.Linear(2, 2 + rank)), 1, ranks)
    saver.wait()
    saver.close()
    return saver.outcome.error


def test_ranks_that_hold_different_unsharded_tensors_are_refused(tmp_path):
    first, second = on_ranks(2, "unalike", where=os.fspath(tmp_path))
    assert first == second
    assert "rank 1 holds other unsharded tensors" in first
    assert os.listdir(tmp_path) == []


def sharded_model(world, seed=0):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = make(seed)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[2], mesh=mesh)  # 5 rows: uneven on two ranks
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(rank, world, where):
    ranks = Ranks(dist.new_group(backend="gloo"))
    model, optimizer = sharded_model(world)
    train(model, optimizer, 3, seed=rank)
    before = digest(model, optimizer)
    path = save(where, TrainState(model=model, optimizer=optimizer, rank=rank), ranks=ranks)
    assert digest(model, optimizer) == before
    full = {
        name: [p.full_tensor().tolist(), optimizer.state[p]["exp_avg"].full_tensor().tolist()]
        for name, p in model.named_parameters()
    }
    train(model, optimizer, 2, seed=10 + rank)
    after = digest(model, optimizer)

    other, second = sharded_model(world, seed=5)
    load(path, TrainState(model=other, optimizer=second, rank=rank), ranks=ranks)
    assert digest(other, second) == before
    train(other, second, 2, seed=10 + rank)
    assert digest(other, second) == after
    return {"path": path, "full": full}


def unsharded(path, full=None):
    """The digest of the two ranks' checkpoint in a world of one that does not shard at all."""
    model, optimizer = make(seed=8)
    load(path, TrainState(model=model, optimizer=optimizer))
    if full is not None:
        assert {
            name: [p.tolist(), optimizer.state[p]["exp_avg"].tolist()] for name, p in model.named_parameters()
        } == full
    return digest(model, optimizer)


def sharded_back(rank, world, where, path):
    """And into two ranks again: the same bits."""
    ranks = Ranks(dist.new_group(backend="gloo"))
    model, optimizer = sharded_model(world, seed=9)
    load(path, TrainState(model=model, optimizer=optimizer), ranks=ranks)
    return save(where, TrainState(model=model, optimizer=optimizer), step=4, ranks=ranks)


def test_fsdp2_on_the_same_and_on_another_number_of_ranks(tmp_path):
    first, second = on_ranks(2, "sharded", where=os.fspath(tmp_path))
    assert first == second
    one = unsharded(first["path"], first["full"])
    again, _ = on_ranks(2, "sharded_back", where=os.fspath(tmp_path), path=first["path"])
    assert unsharded(again) == one


def mismatch_on_one_rank(rank, world, path):
    ranks = Ranks(dist.new_group(backend="gloo"))
    model, _ = make(seed=2, width=8 if rank == 0 else 6)
    before = digest(model)
    try:
        load(path, TrainState(model=model), ranks=ranks)
    except CheckpointError as error:
        return [type(error).__name__, digest(model) == before, str(error)]
    return ["loaded"]


def test_a_mismatch_on_one_rank_stops_every_rank_before_anything_is_touched(tmp_path):
    path = save(tmp_path, TrainState(model=make()[0]))
    first, second = on_ranks(2, "mismatch_on_one_rank", path=path)
    assert first[:2] == ["CheckpointError", True]
    assert "rank 1 cannot resume" in first[2]
    assert second[:2] == ["CheckpointMismatch", True]


class Average:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def replicated(rank, world, where, alike):
    ranks = Ranks(dist.new_group(backend="gloo"))
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    dist.broadcast(model.weight.data, 0)
    mine = torch.full((50_000,), 0.5 if alike else float(rank))
    path = save(where, TrainState(model=model, extra={"ema": Average(mine)}, rank=rank), ranks=ranks)
    other = Average(torch.zeros(50_000))
    load(path, TrainState(model=model, extra={"ema": other}, rank=rank), ranks=ranks)
    wanted = torch.full((50_000,), 0.5 if alike else float(rank))
    return {"path": path, "kept": torch.equal(other.value, wanted)}


@pytest.mark.parametrize("alike", [True, False])
def test_what_all_ranks_have_alike_is_written_once_and_what_they_have_not_by_each(tmp_path, alike):
    results = on_ranks(2, "replicated", where=os.fspath(tmp_path), alike=alike)
    assert [each["kept"] for each in results] == [True, True]
    sizes = [os.path.getsize(os.path.join(results[0]["path"], f"extras_rank{rank}")) for rank in range(2)]
    assert sizes[0] > 200_000
    assert (sizes[1] < 100_000) == alike
    verify_checkpoint(results[0]["path"])
