"""Is this state fit to be committed?

A loss or a parameter that is NaN stays NaN, and a checkpoint of it is worse than none: it would be resumed from. So a
state is looked at before it is written, on the staged copy and in the saver's thread, where training does not wait for
it. Every rank looks at what it writes itself; `verdict` is what all of them make of it together.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim.background import at_once
from ckptd_shim.contract import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

WINDOW: Final = 64
"""How many losses count as recent; one is kept at each agreement, so they reach back a minute or so."""
LEAST: Final = 16
"""With fewer recent losses nothing is called a spike."""
_MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4)."""
LEAST_NORMS: Final = 8
"""Likewise of norms, of which there is one a commit."""
_STILL: Final = 1e-3
"""Norms hardly move from one commit to the next: one that is nearer than this part of the median is no spike."""
_RESOLUTION: Final = 1e-6
"""Of a float32 loss: one that does not move at all has a deviation of so much of its size."""
_CHUNK: Final = 1 << 18
_TOGETHER: Final = 16 << 20
"""Bytes of tensors whose norms are taken in one call."""
_NORMED: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Why a state is not committed; `rank`: whose part of it, None where that is no single one's."""

    why: str
    rank: int | None


class LossWatch:
    """This rank's recent losses, and whether one stands out."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def note(self, loss: float | None) -> None:
        """A loss that later ones are compared with; one that is not finite teaches nothing."""
        if loss is not None and math.isfinite(loss):
            self._recent.append(loss)

    def usual(self) -> tuple[float, float] | None:
        """(median, robust standard deviation) of the recent losses; None: there are too few."""
        if len(self._recent) < LEAST:
            return None
        median = statistics.median(self._recent)
        return median, _MAD_TO_SIGMA * statistics.median(abs(each - median) for each in self._recent)

    def problem(self, loss: float | None) -> str | None:
        """What is wrong with a loss, None: nothing, as far as is known.

        The distance from the median in robust standard deviations (1.4826 times the median absolute deviation): Iglewicz
        and Hoaglin, How to Detect and Handle Outliers, 1993. Both come from a window in which spikes may lie already.
        """
        if loss is None:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}" if self._guard.finite else None
        limit, usual = self._guard.loss_spike, self.usual()
        if limit is None or usual is None:
            return None
        median, deviation = usual
        score = (loss - median) / max(deviation, _RESOLUTION * abs(median), math.ulp(0.0))
        if score <= limit:
            return None
        return f"the loss {loss:.6g} is {score:.1f} standard deviations above its recent median {median:.6g} (loss_spike: {limit:g})"

    def gradient_problem(self, norm: float, *, scaled: bool) -> str | None:
        """What is wrong with the norm of the gradients; `scaled`: by a GradScaler, which leaves out a step that overflows."""
        if math.isfinite(norm) or scaled or not self._guard.finite:
            return None
        return f"the norm of the gradients is {norm}"


class NormWatch:
    """The norms of the parameters in the recent commits, and whether one stands out. The same on every rank."""

    def __init__(self, guard: Guard, recent: Iterable[float] = ()) -> None:
        self._guard = guard
        self._recent: deque[float] = deque(recent, maxlen=WINDOW)

    @property
    def recent(self) -> list[float]:
        """Oldest first."""
        return list(self._recent)

    def note(self, norm: float) -> None:
        """The norm of a state that is committed."""
        if self._guard.param_norm_spike is not None and math.isfinite(norm):
            self._recent.append(norm)

    def problem(self, norm: float) -> str | None:
        """Why a norm, to either side, is too far from the recent ones; in robust deviations as for the loss."""
        limit = self._guard.param_norm_spike
        if limit is None or len(self._recent) < LEAST_NORMS:
            return None
        median = statistics.median(self._recent)
        deviation = _MAD_TO_SIGMA * statistics.median(abs(each - median) for each in self._recent)
        score = abs(norm - median) / max(deviation, _STILL * median, math.ulp(0.0))
        if score <= limit:
            return None
        return (
            f"the norm of the parameters is {norm:.6g}, {score:.1f} standard deviations from its recent median "
            f"{median:.6g} (param_norm_spike: {limit:g})"
        )


def inspect(
    guard: Guard,
    *,
    loss_problem: str | None,
    tensors: Mapping[str, torch.Tensor],
    staged: Mapping[str, torch.Tensor],
    parameters: Mapping[str, str],
    gently: Callable[[Callable[[], Any]], Any] = at_once,
) -> dict[str, Any]:
    """What one rank has to say of its part of a state: `{"unfit": why or None, "squares": float}`, for `verdict`.

    Args:
        guard: what to look for.
        loss_problem: what `LossWatch` found.
        tensors: what this rank writes, by key; DTensors say how often it is held.
        staged: this rank's part of each, on the CPU.
        parameters: which keys are parameters, to the key that stands for all that are tied. Buffers are not looked at:
            an attention mask is full of infinities, and rightly.
        gently: who does the heavy pieces.
    """
    unfit, squares = loss_problem, 0.0
    counted: set[str] = set()
    suspects = tensors
    if not wants_norm(guard):
        keys = [key for key in tensors if key in parameters or key.startswith("optim.")]
        suspects = (
            {key: tensors[key] for key in _suspects(keys, staged, gently)} if guard.finite and unfit is None else {}
        )
    for key, tensor in suspects.items():
        first = parameters.get(key)
        if first is None and not key.startswith("optim."):
            continue
        counts = wants_norm(guard) and first is not None and first not in counted
        if not counts and not (guard.finite and unfit is None):
            continue
        total, bad = gently(functools.partial(_measure, staged[key]))
        if bad is not None and guard.finite and unfit is None:
            unfit = f"{key} holds {bad}"
        if counts and first is not None:
            counted.add(first)
            squares += total / _copies(tensor)
    return {"unfit": unfit, "squares": squares}


def wants_norm(guard: Guard) -> bool:
    """Whether the norm of the parameters is looked at."""
    return guard.param_norm is not None or guard.param_norm_spike is not None


def verdict(guard: Guard, told: Iterable[Mapping[str, Any]], norms: NormWatch | None = None) -> Rejection | None:
    """What the ranks' words, in the order of ranks, come to; None: the state may be committed, and `norms` has its norm."""
    squares = 0.0
    for rank, each in enumerate(told):
        if each["unfit"] is not None:
            return Rejection(why=each["unfit"], rank=rank)
        squares += each["squares"]
    limit = guard.param_norm
    norm = math.sqrt(squares)
    # Written so that a norm which is NaN is no smaller than anything.
    if limit is None or norm <= limit:
        spike = None if norms is None else norms.problem(norm)
        if spike is None and norms is not None:
            norms.note(norm)
        return None if spike is None else Rejection(why=spike, rank=None)
    return Rejection(why=f"the norm of the parameters is {norm:.6g} (param_norm: {limit:g})", rank=None)


def _suspects(
    keys: list[str], staged: Mapping[str, torch.Tensor], gently: Callable[[Callable[[], Any]], Any]
) -> list[str]:
    """Those of `keys` whose tensors need a closer look. One call for many tensors: it leaves Python to other threads."""
    groups: dict[torch.dtype, list[list[str]]] = {}
    sizes: dict[torch.dtype, int] = {}
    found: set[str] = set()
    for key in keys:
        tensor = staged[key]
        if tensor.dtype not in _NORMED or not tensor.numel():
            found.add(key)
            continue
        of_dtype = groups.setdefault(tensor.dtype, [[]])
        size = sizes.get(tensor.dtype, 0) + tensor.nbytes
        if size > _TOGETHER and of_dtype[-1]:
            of_dtype.append([])
            size = tensor.nbytes
        sizes[tensor.dtype] = size
        of_dtype[-1].append(key)
    for dtype, of_dtype in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for group in of_dtype:
            norms = gently(functools.partial(torch._foreach_norm, [staged[key] for key in group], dtype=wide))
            together = torch.stack(norms)
            if not bool(torch.isfinite(together.sum())):
                found.update(key for key, norm in zip(group, together.tolist(), strict=True) if not math.isfinite(norm))
    return [key for key in keys if key in found]


def _measure(tensor: torch.Tensor) -> tuple[float, str | None]:
    """(sum of squares, what is in it that is not finite or None), without a second copy in memory.

    A scalar product is several times faster than `isfinite`, and one that is finite leaves nothing to look for.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0, None
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    total, bad = 0.0, None
    for part in flat.split(_CHUNK) if flat.numel() else ():
        # Half precision would overflow at 65,504, and float8 has no products: a chunk at a time is widened.
        wide = part if part.dtype in (torch.float32, torch.float64) else part.to(torch.float32)
        square = float(torch.dot(wide, wide))
        if not math.isfinite(square):
            if not bool(torch.isfinite(wide).all()):
                bad = bad or ("NaN" if bool(torch.isnan(wide).any()) else "infinity")
            norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
            square = norm * norm
        total += square
    return total, bad


def _copies(tensor: torch.Tensor) -> int:
    """How many ranks hold the same part of a tensor: those along the dimensions of its mesh that replicate it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = tensor.device_mesh.shape
    return math.prod(size for size, placement in zip(sizes, tensor.placements, strict=True) if placement.is_replicate())
