"""A framework that writes its own checkpoints gets their timing, their commit and the exact position from the shim."""

import json
import os
import signal

import pytest
import torch
from gloo_ranks import run_ranks
from torch import nn

from ckptd_shim import CheckpointError, TrainerShim
from ckptd_shim.adopting import adopt
from ckptd_shim.contract import COMMITTED
from ckptd_shim.digest import committed_paths, read_marker, verify_checkpoint


def train(directory, until, world=1, rank=0, interval=3, stop_at=None, files=None):
    """A script that keeps its weights in a file of its own; draws come from torch's generator."""
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    shim = TrainerShim(directory=directory, interval={"steps": interval}, global_batch=8, seed=3)
    shim.resume()
    if shim.resumed_from is not None:
        state = torch.load(os.path.join(shim.resumed_from, "weights.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    started, losses, asked = shim.global_step, [], []
    while shim.global_step < until and not shim.stopping:
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if world > 1:
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
        if stop_at == shim.global_step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if shim.should_save(loss):
            asked.append(shim.global_step)
            path = shim.save_path if files is None else os.path.join(files, f"own-{shim.global_step}")
            if rank == 0:
                os.makedirs(path, exist_ok=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(path, "weights.pt"))
            if world > 1:
                torch.distributed.barrier()
            shim.committed(path)
    shim.close()
    return {"started": started, "losses": losses, "asked": asked, "stopping": shim.stopping}


def test_resumed_from_files_of_its_own_it_goes_on_bit_for_bit(tmp_path):
    whole = train(tmp_path / "a", 12)
    assert whole["asked"] == [3, 6, 9, 12]
    first = train(tmp_path / "b", 7)
    second = train(tmp_path / "b", 12)
    assert second["started"] == 6
    assert first["losses"][:6] + second["losses"] == whole["losses"]
    marker = verify_checkpoint(max(committed_paths(tmp_path / "b")))
    assert {file.name for file in marker.files} == {"weights.pt", "extras_rank0"}
    assert (marker.step, marker.samples_seen, marker.sequence) == (12, 96, 4)


def test_files_elsewhere_are_linked_so_the_framework_may_prune_its_own(tmp_path):
    files = tmp_path / "own"
    train(tmp_path / "run", 4, files=files)
    (path,) = committed_paths(tmp_path / "run")
    assert os.path.samefile(os.path.join(path, "weights.pt"), files / "own-3" / "weights.pt")
    assert sorted(os.listdir(files / "own-3")) == ["weights.pt"]
    os.unlink(files / "own-3" / "weights.pt")
    verify_checkpoint(path)
    assert train(tmp_path / "run", 4)["started"] == 3


def test_asked_to_stop_it_stops_when_that_save_is_committed(tmp_path):
    result = train(tmp_path, 10**6, interval=10**7, stop_at=5)  # it ends by being stopped
    assert result["stopping"]
    assert len(result["asked"]) == 1
    (path,) = committed_paths(tmp_path)
    assert read_marker(path).step == result["asked"][0] == len(result["losses"])


def test_what_cannot_be_committed_is_said(tmp_path):
    shim = TrainerShim(directory=tmp_path / "run", interval={"steps": 1000}, seed=3)
    shim.resume()
    shim.should_save()
    with pytest.raises(CheckpointError, match="No such file"):
        shim.committed(tmp_path / "nothing")
    (tmp_path / "own").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        shim.committed(tmp_path / "own")
    (tmp_path / "own" / "deep").mkdir()
    with pytest.raises(CheckpointError, match="deep is a directory"):
        shim.committed(tmp_path / "own")
    (tmp_path / "own" / "deep").rmdir()
    (tmp_path / "own" / COMMITTED).write_text("{}")
    with pytest.raises(CheckpointError, match="another name"):
        shim.committed(tmp_path / "own")
    shim.close()
    assert not committed_paths(tmp_path / "run")
    model = nn.Linear(1, 1)
    other = TrainerShim(model=model, directory=tmp_path / "x", interval=60)
    other.resume()
    with pytest.raises(RuntimeError, match="without model="):
        other.should_save()
    other.step()
    other.close()


def on_two_ranks(rank, world, directory, until):
    return train(directory, until, world=world, rank=rank)


def test_two_ranks_ask_at_the_same_steps_and_resume_each_with_its_own_random_numbers(tmp_path):
    whole = run_ranks(2, __file__, "on_two_ranks", directory=str(tmp_path / "a"), until=9)
    first = run_ranks(2, __file__, "on_two_ranks", directory=str(tmp_path / "b"), until=7)
    second = run_ranks(2, __file__, "on_two_ranks", directory=str(tmp_path / "b"), until=9)
    for rank in range(2):
        assert first[rank]["asked"] == [3, 6]
        assert second[rank]["started"] == 6
        assert first[rank]["losses"][:6] + second[rank]["losses"] == whole[rank]["losses"]
    assert whole[0]["losses"] != whole[1]["losses"]
    newest = max((read_marker(path) for path in committed_paths(tmp_path / "b")), key=lambda each: each.sequence)
    assert json.loads(newest.to_json())["world_size"] == 2
    assert {file.name for file in newest.files} == {"weights.pt", "extras_rank0", "extras_rank1"}


def test_what_another_rank_is_writing_into_the_same_directory_is_not_taken_for_the_frameworks(tmp_path):
    """Rank 0 digests the framework's files while the others write their extras beside them: half of one is no file."""
    (tmp_path / "weights.pt").write_bytes(b"weights")
    (tmp_path / "extras_rank1").write_bytes(b"")
    assert [file.name for file in adopt(str(tmp_path), str(tmp_path), durable=False)] == ["weights.pt"]
