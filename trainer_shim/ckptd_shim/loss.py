"""What was the loss of late, without making a GPU wait for the answer?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_WANTED = "step(loss=...) takes a number or a tensor of one element"


def read_norm(value: float | torch.Tensor) -> float:
    """A norm of the gradients as a number; waits for the GPU, and for the other ranks where it is a DTensor.

    Raises:
        TypeError: it is not a number, and not a tensor of one element.
    """
    try:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"step(grad_norm=...) takes a number or a tensor of one element, not {value!r:.100}") from None


class LastLoss:
    """The newest loss that is known: of a step not long ago, where it comes as a tensor on a GPU."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._copy: torch.Tensor | None = None
        self._ready: Any = None

    @property
    def finite(self) -> float | None:
        """The value, unless it is NaN or infinite."""
        return self.value if self.value is not None and math.isfinite(self.value) else None

    def look(self, loss: float | torch.Tensor | None) -> None:
        """Take the loss out of a tensor; one on a GPU is copied, and the copy is read at a later look.

        Raises:
            TypeError: it is no loss: not a number, and not a tensor of one element.
        """
        if self._copy is not None and self._ready.query():
            self.value, self._copy = float(self._copy), None
        if loss is None:
            return
        if not isinstance(loss, torch.Tensor):
            try:
                self.value = float(loss)
            except (TypeError, ValueError):
                raise TypeError(f"{_WANTED}, not {loss!r:.100}") from None
        elif loss.numel() != 1:
            raise TypeError(f"{_WANTED}, not one of shape {list(loss.shape)}; pass loss.mean()")
        elif not loss.is_cuda:
            self.value = float(loss.detach())
        elif self._copy is None:
            self._copy = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._copy.copy_(loss.detach().double().reshape(()), non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(loss.device))
