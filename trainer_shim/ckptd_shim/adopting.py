"""How do files that a framework wrote become a checkpoint of the run?

They are linked into the checkpoint's directory, so that the framework may prune its own as it likes; on another file
system they are copied. They are digested there, so a file that is changed in place afterwards is found out.
"""

from __future__ import annotations

import contextlib
import os
import shutil

from ckptd_shim import contract
from ckptd_shim.contract import FileDigest
from ckptd_shim.digest import crc32c_file
from ckptd_shim.errors import CheckpointError


def check_source(source: str) -> None:
    """Raise CheckpointError unless `source` is a directory of plain files that can become a checkpoint."""
    try:
        entries = sorted(os.scandir(source), key=lambda each: each.name)
    except OSError as error:
        raise CheckpointError(
            f"committed({source!r}): {error.strerror}; pass the directory that the files were written into"
        ) from error
    if not entries:
        raise CheckpointError(f"committed({source!r}): the directory is empty: write the files first")
    for entry in entries:
        if not entry.is_file(follow_symlinks=False):
            kind = "directory" if entry.is_dir(follow_symlinks=False) else "link or special file"
            raise CheckpointError(f"committed({source!r}): {entry.name} is a {kind}: only plain files can be committed")
        if entry.name in (contract.COMMITTED, contract.OWNER) or entry.name.startswith("extras_rank"):
            raise CheckpointError(
                f"committed({source!r}): ckptd writes {entry.name} itself: give that file another name"
            )


def adopt(source: str, path: str, *, durable: bool) -> list[FileDigest]:
    """Bring the files of `source` into the checkpoint directory `path`, which exists, and digest them. Raises OSError."""
    files = []
    for name in sorted(os.listdir(source)):
        # Where the framework wrote into the checkpoint's own directory, other ranks may be at their extras there just now.
        if name == contract.OWNER or name.startswith("extras_rank"):
            continue
        target = os.path.join(path, name)
        if not os.path.samefile(source, path):
            _link_or_copy(os.path.join(source, name), target)
        if durable:
            with open(target, "rb") as file:
                os.fsync(file.fileno())
        size, crc = crc32c_file(target)
        files.append(FileDigest(name=name, size=size, crc32c=crc))
    return files


def _link_or_copy(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
