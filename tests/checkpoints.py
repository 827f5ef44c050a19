"""Small committed checkpoints, made without training."""

from __future__ import annotations

import os
import random

from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, FileDigest, Marker
from ckptd_shim.digest import crc32c_file


def commit(directory, step, sequence, *, attempt=1, run_id="r", name=None, size=700, files=1):
    """A committed checkpoint of `files` shards of `size` bytes in a tier, or in a directory; returns its path."""
    directory = getattr(directory, "directory", directory)
    path = os.path.join(directory, name or contract.checkpoint_dirname(step, attempt))
    os.makedirs(path)
    with open(os.path.join(path, contract.OWNER), "w", encoding="ascii") as file:
        file.write(run_id)
    listed = []
    for k in range(files):
        shard = os.path.join(path, f"__{k}_0.distcp")
        with open(shard, "wb") as file:
            file.write(random.Random(1000 * step + k).randbytes(size))
        length, crc = crc32c_file(shard)
        listed.append(FileDigest(name=os.path.basename(shard), size=length, crc32c=crc))
    marker = Marker(
        format=contract.FORMAT, run_id=run_id, sequence=sequence, step=step, samples_seen=12 * step, epoch=0,
        attempt=attempt, world_size=2, global_batch=12, loss=None, created=float(sequence), comparable=True,
        files=listed,
    )  # fmt: skip
    marker.write(os.path.join(path, COMMITTED))
    return path
