"""ckptd's side in the training script: exact saving and resuming at a stall that is hardly felt.

Names are loaded on first use, so that `ckptd_shim.contract` can be read without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptd_shim.errors import CheckpointError, CheckpointMismatch, StateRejected
    from ckptd_shim.sampler import GlobalSampler
    from ckptd_shim.shim import TrainerShim

__all__ = ["CheckpointError", "CheckpointMismatch", "GlobalSampler", "StateRejected", "TrainerShim"]

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointMismatch": "errors",
    "GlobalSampler": "sampler",
    "StateRejected": "errors",
    "TrainerShim": "shim",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
