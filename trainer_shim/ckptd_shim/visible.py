"""Are the files of all ranks where rank 0 sees them? If not, the tier is none that all nodes share, whatever job.yaml says."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ckptd_shim.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd_shim.contract import FileDigest

PATIENCE_S = 30.0
"""A network file system may show another node's new file late."""
LOOK_S = 0.2


def await_files(directory: str, files: Iterable[FileDigest], *, patience_s: float = PATIENCE_S) -> None:
    """Wait until every file is there, with the size that its rank wrote.

    Raises:
        CheckpointError: one is not, after `patience_s` seconds.
    """
    lacking = list(files)
    deadline = time.monotonic() + patience_s
    while lacking := [file for file in lacking if not _there(os.path.join(directory, file.name), file.size)]:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{directory}: {lacking[0].name} was written by its rank, and is not to be seen from rank 0"
                f"{f', as are {len(lacking) - 1} more' if len(lacking) > 1 else ''}. Every node must see the same files "
                "there; a tier that each node has for itself is one with `shared: false`"
            )
        time.sleep(LOOK_S)


def _there(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False
