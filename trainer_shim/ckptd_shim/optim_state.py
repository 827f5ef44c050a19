"""How is an optimizer's state taken apart into named tensors and plain values, and put back?

torch's own `get_optimizer_state_dict` is not used: it takes a hidden step on an optimizer that has none behind it,
drops the state of frozen parameters, and loses the hyper-parameters of later groups. Here nothing is touched: what is
in `optimizer.state` is named after the parameter that it belongs to (canonical, so the same under DDP, FSDP2 and tensor
parallelism), and what is not there yet stays absent.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ckptd_shim.extras import dtype_name, named_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

Names = dict[torch.Tensor, str]
"""Parameter (by identity) to its canonical fully qualified name."""
Schema = dict[str, list[Any]]
"""Key of a tensor to [dtype, global shape, device type]."""


def describe(tensor: torch.Tensor) -> list[Any]:
    """The schema of one tensor."""
    return [dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type]


class NamedOptimizer:
    """One optimizer with names for its parameters.

    Args:
        optimizer: the optimizer.
        names: the names of the parameters of every model.
        prefix: what its tensors' keys begin with, `optim.0`.

    Raises:
        ValueError: a parameter that belongs to no model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, prefix: str) -> None:
        self.optimizer = optimizer
        self.names = names
        self.prefix = prefix
        for g, group in enumerate(optimizer.param_groups):
            for p, param in enumerate(group["params"]):
                if param not in names:
                    raise ValueError(
                        f"parameter {p} of group {g} of {prefix} ({type(optimizer).__name__}, shape {list(param.shape)}) "
                        "belongs to no module given as model=: pass every module whose parameters are optimised, and "
                        "build the optimizer after the model has been wrapped or sharded",
                    )

    def groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters of every group, parameters given by name."""
        return [
            {**group, "params": [self.names[param] for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def settings(self) -> list[dict[str, Any]]:
        """The hyper-parameters of every group, and nothing else: taken when the script has built it, to compare by."""
        return [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def capture(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors by key, plain rest). Nothing is copied.

        The rest is `{"groups": ..., "state": {name: {key: value}}, "tensors": {name: [key]}}`.

        Raises:
            TypeError: state that belongs to no parameter, which nobody could put back.
        """
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, dict[Any, Any]] = {}
        keys: dict[str, list[str]] = {}
        for owner, state in self.optimizer.state.items():
            name = self.names.get(owner) if isinstance(owner, torch.Tensor) else None
            if name is None or not isinstance(state, dict):
                raise TypeError(
                    f"{self.prefix} ({type(self.optimizer).__name__}) keeps state under {_short(owner)}, which is no "
                    "parameter of the model: such an optimizer cannot be resumed exactly",
                )
            plain[name], keys[name] = {}, []
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and isinstance(key, str):
                    tensors[self.key(name, key)] = value
                    keys[name].append(key)
                else:
                    plain[name][key] = value
        return tensors, {"groups": self.groups(), "state": plain, "tensors": keys}

    def key(self, name: str, key: str) -> str:
        """Key of one tensor of the state."""
        return f"{self.prefix}.state.{name}.{key}"

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What keeps `saved` (the plain rest of `capture`) from being put back here, one line each."""
        now, then = self.groups(), saved["groups"]
        if len(now) != len(then):
            return [f"{self.prefix}: saved with {len(then)} parameter groups, now {len(now)}"]
        lines = []
        for g, (new, old) in enumerate(zip(now, then, strict=True)):
            where = f"{self.prefix}.param_groups[{g}]"
            lines += [f"{where}: {name!r} was saved in this group, now it is not in it" for name in _minus(old, new)]
            lines += [f"{where}: {name!r} is in this group now, it was not when saved" for name in _minus(new, old)]
            lines += [f"{where}: saved with the hyper-parameter {key!r}, now without" for key in old if key not in new]
            lines += [f"{where}: now has the hyper-parameter {key!r}, saved without" for key in new if key not in old]
        return lines

    def destinations(self, saved: Mapping[str, Any], schema: Schema) -> dict[str, torch.Tensor]:
        """New tensors to read the saved state into, laid out like the parameter where they have its shape."""
        params = {self.names[p]: p for group in self.optimizer.param_groups for p in group["params"]}
        result: dict[str, torch.Tensor] = {}
        for name, keys in saved["tensors"].items():
            for key in keys:
                full = self.key(name, key)
                dtype, shape, device = schema[full]
                param = params[name].detach()
                if list(param.shape) == shape and (isinstance(param, DTensor) or device != "cpu"):
                    result[full] = torch.empty_like(param, dtype=named_dtype(dtype))
                else:
                    # A step counter lives on the CPU beside a parameter on a GPU.
                    place = "cpu" if device == "cpu" else param.device
                    result[full] = torch.empty(shape, dtype=named_dtype(dtype), device=place)
        return result

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `capture` gave, with `tensors` holding the values of `destinations`."""
        params = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        index = {self.names[param]: i for i, param in enumerate(params)}
        state: dict[int, dict[Any, Any]] = {}
        for name, plain in saved["state"].items():
            state[index[name]] = {**plain, **{key: tensors[self.key(name, key)] for key in saved["tensors"][name]}}
        groups = []
        for group, then in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            groups.append({**then, "params": [index[self.names[param]] for param in group["params"]]})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        # load_state_dict casts floating-point state to the parameter's dtype; an exact resume keeps what was saved.
        for i, values in state.items():
            loaded = self.optimizer.state[params[i]]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(device=loaded[key].device)


def compare_settings(prefix: str, saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Hyper-parameters that the saving script built with another value than this one, a line each."""
    lines = []
    for g, (old, new) in enumerate(zip(saved, now, strict=False)):
        lines += compare_values(f"{prefix}.param_groups[{g}]", old, new)
    return lines


def compare_values(where: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Values under the same key that differ, a line each. Keys that only one side has are somebody else's to name."""
    return [
        f"{where}: {key!r} was {_shown(then)} when saved, is {_shown(now[key])} now"
        for key, then in saved.items()
        if key in now and not _same(then, now[key])
    ]


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and torch.equal(left.cpu(), right.cpu())
        )
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124  NaN is like NaN


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _minus(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    others = set(right["params"])
    return [name for name in left["params"] if name not in others]


def _short(owner: object) -> str:
    return f"a tensor of shape {list(owner.shape)}" if isinstance(owner, torch.Tensor) else repr(owner)
