"""How is the live state copied so that training may go on while it is written?

One buffer in host memory for each tensor, kept from save to save: touching new pages costs several times the copy. The
copy is a plain `copy_`, which uses all of torch's intra-op threads; from a GPU it goes through pinned memory, and all
of them are waited for at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim.trees import map_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def warm(self, shapes: Mapping[str, Shape]) -> None:
        """Allocate the buffers and touch every page of them."""
        for name, shape in shapes.items():
            self._buffer(name, shape).zero_()

    def stage(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], Any]:
        """Copy what this rank writes. Returns (local tensors by key, the tree), both untouched by what training does."""
        waits: set[torch.device] = set()
        names: set[str] = set()

        def copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
            names.add(name)
            buffer = self._buffer(name, _shape(tensor))
            buffer.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                waits.add(tensor.device)
            return buffer

        with torch.no_grad():
            staged = {key: copy(key, local(tensor)) for key, tensor in self.wanted(snapshot).items()}
            tree = map_tensors(snapshot.tree, lambda path, tensor: copy(path, local(tensor)))
        for device in waits:
            torch.cuda.current_stream(device).synchronize()
        # Buffers of what is no longer there would only hold memory.
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}
        return staged, tree

    def _buffer(self, name: str, shape: Shape) -> torch.Tensor:
        size, dtype, pinned = shape
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != size or buffer.dtype != dtype:
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype, pin_memory=pinned)
        return buffer


def _shape(tensor: torch.Tensor) -> Shape:
    return tensor.shape, tensor.dtype, tensor.is_cuda
