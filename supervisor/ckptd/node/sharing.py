"""Which other nodes' files does this one see in a directory? Each leaves one, and looks for the others' for a while.

A network file system may show a new file late. What a node has not seen after `PATIENCE_S` counts as not there; the daemon
puts together what all of them say.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Final

from ckptd.jobspec import node_in_path
from ckptd_shim import contract

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
LOOK_S: Final = 0.25
PREFIX: Final = ".seen-"


def look(directory: str, run_id: str, node: str, nodes: Sequence[str], *, patience_s: float = PATIENCE_S) -> list[str]:
    """Leave this node's file, and return those of `nodes` whose files are there, as soon as all are. Blocks."""
    try:
        os.makedirs(directory, exist_ok=True)
        contract.write_atomically(_path(directory, run_id, node), node.encode())
    except OSError as error:
        log.warning("%s: nothing can be written there: %s", directory, error)
        return []
    deadline = time.monotonic() + patience_s
    while True:
        # A look at the whole directory is what makes a network file system ask its server again.
        try:
            there = set(os.listdir(directory))
        except OSError:
            there = set()
        seen = [other for other in nodes if os.path.basename(_path(directory, run_id, other)) in there]
        if len(seen) == len(nodes) or time.monotonic() >= deadline:
            return seen
        time.sleep(LOOK_S)


def clear(directory: str, run_id: str, node: str) -> None:
    """Remove this node's file."""
    contract.unlink_quietly(_path(directory, run_id, node))


def _path(directory: str, run_id: str, node: str) -> str:
    return os.path.join(directory, f"{PREFIX}{run_id}-{node_in_path(node)}")
