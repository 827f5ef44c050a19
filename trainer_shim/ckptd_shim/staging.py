"""How is the live state copied so that training may go on while it is written?

One buffer in host memory for each tensor, kept from save to save: touching new pages costs several times the copy. There
is one set of them, and a save waits for the one before: a second set would hold a whole copy of the state for the rare
case, since no interval is derived that is shorter than an upload. What may be copied later, while training goes on, is
`copying.py`'s; the rest is copied at once by a plain `copy_`, from a GPU through pinned memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim.background import at_once
from ckptd_shim.copying import Copying
from ckptd_shim.state import LASTING
from ckptd_shim.trees import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd_shim.state import Snapshot

Shape = tuple[torch.Size, torch.dtype, bool]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


class Stager:
    """Buffers for everything that this rank writes. `stage` may begin only when the save before it is written."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._buffers: dict[str, torch.Tensor] = {}

    def wanted(self, snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """The tensors that this rank writes: its shards, and on rank 0 what all ranks hold alike."""
        mine: dict[str, torch.Tensor] = {}
        for key, tensor in snapshot.tensors.items():
            if isinstance(tensor, DTensor):
                if tensor.device_mesh.get_coordinate() is not None:
                    mine[key] = tensor
            elif self._rank == 0:
                mine[key] = tensor
        return mine

    def shapes(self, snapshot: Snapshot) -> dict[str, Shape]:
        """The buffers that staging `snapshot` would need, by name, for `warm`."""
        found = {key: _shape(local(tensor)) for key, tensor in self.wanted(snapshot).items()}

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            found[path] = _shape(tensor)
            return tensor

        map_tensors(snapshot.tree, note)
        return found

    def warm(
        self, shapes: Mapping[str, Shape], gently: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = at_once
    ) -> list[torch.Tensor]:
        """Allocate the buffers and touch every page of them. Returns them."""
        return [gently(self._buffer(name, shape).zero_) for name, shape in shapes.items()]

    def stage(self, snapshot: Snapshot, *, late: bool = False) -> tuple[dict[str, torch.Tensor], Any, Copying | None]:
        """Copy what this rank writes, or begin to.

        Args:
            snapshot: the live state.
            late: the caller sees to it that parameters and optimizer state stand still until the copy is released.

        Returns:
            (local tensors by key, the tree, what is still to be copied into the former). The tree is untouched by whatever
            training does next, and so are the tensors if there is nothing to be copied.
        """
        waits: set[torch.device] = set()
        names: set[str] = set()

        def copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
            buffer = self._buffer(name, _shape(tensor))
            names.add(name)
            buffer.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                waits.add(tensor.device)
            return buffer

        staged: dict[str, torch.Tensor] = {}
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        with torch.no_grad():
            for key, tensor in self.wanted(snapshot).items():
                source = local(tensor)
                if late and _stands_still(key, snapshot) and (source.is_cuda or _is_plain(source)):
                    names.add(key)
                    staged[key] = self._buffer(key, _shape(source))
                    pairs[key] = staged[key], source
                else:
                    staged[key] = copy(key, source)
            shared = snapshot.tree["shared"]
            lasting = {key: shared[key] for key in LASTING if key in shared}
            tree = {**snapshot.tree, "shared": {key: value for key, value in shared.items() if key not in lasting}}
            tree = map_tensors(tree, lambda path, tensor: copy(path, local(tensor)))
            tree["shared"] |= lasting
        for device in waits:
            torch.cuda.current_stream(device).synchronize()
        # Buffers of what is no longer there would only hold memory.
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}
        return staged, tree, Copying(pairs) if pairs else None

    def _buffer(self, name: str, shape: Shape) -> torch.Tensor:
        size, dtype, pinned = shape
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != size or buffer.dtype != dtype:
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype, pin_memory=pinned)
        return buffer


def _shape(tensor: torch.Tensor) -> Shape:
    return tensor.shape, tensor.dtype, tensor.is_cuda


def _stands_still(key: str, snapshot: Snapshot) -> bool:
    """Whether only an optimizer's step changes it: buffers change in a forward pass, `extra` whenever it likes."""
    return key in snapshot.parameters or key.startswith("optim.")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
