"""A commit is none before rank 0 has seen the files of all ranks where it will say that they are."""

import functools
import os
import threading

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from saving import begin_save
from torch import nn

from ckptd_shim import checkpoint
from ckptd_shim.checkpoint import Saver, Target
from ckptd_shim.contract import FileDigest
from ckptd_shim.digest import committed_paths
from ckptd_shim.errors import CheckpointError
from ckptd_shim.pulse import ReportWriter
from ckptd_shim.ranks import Ranks
from ckptd_shim.state import TrainState
from ckptd_shim.visible import await_files


def test_a_file_that_comes_late_is_waited_for(tmp_path):
    files = [FileDigest(name="a", size=3, crc32c="0"), FileDigest(name="b", size=3, crc32c="0")]
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"a")
    timer = threading.Timer(0.5, (tmp_path / "b").write_bytes, [b"abc"])
    timer.start()
    await_files(str(tmp_path), files, patience_s=30.0)
    timer.join()
    assert (tmp_path / "b").stat().st_size == 3


def test_one_that_does_not_come_is_named(tmp_path):
    files = [FileDigest(name=name, size=3, crc32c="0") for name in "ab"]
    with pytest.raises(CheckpointError, match=r"a was written by its rank, .* as are 1 more\. .*`shared: false`"):
        await_files(str(tmp_path), files, patience_s=0.1)


def save_as_if_it_were_shared(rank, world, directory):
    """Each rank's directory is another one, as on nodes that have nothing in common."""
    checkpoint.await_files = functools.partial(await_files, patience_s=0.5)
    own = os.path.join(directory, f"node{rank}")
    os.makedirs(own)
    target = Target(save_dir=own, run_id="run", attempt=1, tier="memory", leads=True)
    saver = Saver(target=target, ranks=Ranks(dist.new_group(backend="gloo")), sequence=0, report=ReportWriter(None))
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), rank=rank)
    begin_save(saver, state, 1, saver._ranks)
    saver.wait()
    saver.close()
    return saver.outcome.committed, saver.outcome.error


def test_nodes_that_see_different_files_where_all_should_see_the_same_commit_nothing(tmp_path):
    for committed, error in run_ranks(2, __file__, "save_as_if_it_were_shared", directory=str(tmp_path)):
        assert not committed
        assert "Every node must see the same files there" in error
    assert not [path for node in ("node0", "node1") for path in committed_paths(tmp_path / node)]
