"""Where do random numbers stand on this rank, and where do they begin on another number of ranks?

Python's generator, NumPy's global one where the script has NumPy loaded, torch's on the CPU and on the rank's GPUs.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def cuda_devices(params: Iterable[torch.Tensor]) -> list[torch.device]:
    """The CUDA devices of this rank, its current one first: states are kept in this order, not by number."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    used = {param.device.index for param in params if param.device.type == "cuda"}
    current = torch.cuda.current_device()
    return [torch.device("cuda", index) for index in (current, *sorted(used - {current}))]


def capture(devices: list[torch.device]) -> dict[str, Any]:
    """The states of all generators. Draws nothing."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
    }


def restore(saved: Mapping[str, Any], devices: list[torch.device]) -> None:
    """Put back what `capture` gave."""
    random.setstate(saved["python"])
    if saved["numpy"] is not None:
        import numpy  # noqa: ICN001  only where the saving script had it loaded

        numpy.random.set_state(saved["numpy"])  # noqa: NPY002  the global generator is what scripts draw from
    torch.set_rng_state(saved["torch"])
    for device, state in zip(devices, saved["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits from `parts`, the same in every process and version of Python."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reseed(devices: list[torch.device], seed: int, step: int, rank: int) -> None:
    """Begin all random generators anew, differently for each step and rank."""
    random.seed(derive_seed("python", seed, step, rank))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(derive_seed("numpy", seed, step, rank) % 2**32)
    torch.default_generator.manual_seed(derive_seed("torch", seed, step, rank))
    for i, device in enumerate(devices):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(derive_seed("cuda", i, seed, step, rank))
