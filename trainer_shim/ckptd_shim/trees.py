"""How are the tensors inside a tree of containers found, taken out, and put back?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def split_dtensors(tree: Any, where: str) -> tuple[Any, dict[str, DTensor]]:
    """(the tree with a note in place of each DTensor, the DTensors by key)."""
    found: dict[str, DTensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            if path in found:
                raise ValueError(f"two DTensors would both be called {path}: give one of their keys another name")
            found[path] = value
            return {"$dtensor": path}
        if type(value) in (list, tuple):
            return type(value)(visit(item, f"{path}.{i}") for i, item in enumerate(value))
        if isinstance(value, dict) and any(isinstance(leaf, DTensor) for leaf in _leaves(value)):
            return {key: visit(item, f"{path}.{key}") for key, item in value.items()}
        return value

    return visit(tree, where), found


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def join_dtensors(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `split_dtensors`."""
    if type(tree) is dict:
        if tree.keys() == {"$dtensor"}:
            return tensors[tree["$dtensor"]]
        return {key: join_dtensors(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(join_dtensors(item, tensors) for item in tree)
    return tree


def map_tensors(tree: Any, function: Callable[[str, torch.Tensor], torch.Tensor], where: str = "") -> Any:
    """A copy of `tree` with `function(path, tensor)` in place of each tensor: containers are new, leaves are shared."""
    if isinstance(tree, torch.Tensor):
        return function(where, tree)
    kind = type(tree)
    if kind in (list, tuple):
        return kind(map_tensors(item, function, f"{where}/{i}") for i, item in enumerate(tree))
    if isinstance(tree, dict):
        copy = tree.copy()
        for key, value in tree.items():
            copy[key] = map_tensors(value, function, f"{where}/{key!r}")
        return copy
    if kind.__name__ == "ndarray" or kind in (set, bytearray):
        return tree.copy()
    return tree
