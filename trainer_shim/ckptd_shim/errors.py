"""Which errors does the shim raise about checkpoints?

CheckpointError            a checkpoint cannot be written, read or trusted
├── CheckpointMismatch     it is whole, but it was saved by a script that differs from this one
└── StateRejected          the guard found the last state unfit to be committed

SetupError                 a ValueError: dataset, batch, loader and workers cannot work together; no restart cures that

Other wrong arguments are ValueError and TypeError, as anywhere in Python.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """What is wrong with which file of which checkpoint."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint does not fit this model, optimizer or script. Nothing has been loaded.

    `differences` holds one line for each difference: the key, what was saved, and what is there now.
    """

    def __init__(self, path: str, differences: list[str]) -> None:
        self.path = path
        self.differences = differences
        shown = differences[:50]
        lines = [
            f"{path} was saved by a script that differs from this one; nothing was loaded:",
            *(f"  - {line}" for line in shown),
        ]
        if len(differences) > len(shown):
            lines.append(f"  - and {len(differences) - len(shown)} more")
        lines.append("Build what the saving script built, or start a new run in another directory.")
        super().__init__("\n".join(lines))


class StateRejected(CheckpointError):
    """The state at the end of training is not fit to be committed: what was trained since the last commit is lost."""


class SetupError(ValueError):
    """Dataset, batch, loader and number of workers do not fit each other: it would be the same after a restart."""
