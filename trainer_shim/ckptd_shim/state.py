"""What must an exact resume restore, and in which order?

Captured are two things. `Snapshot.tensors` holds the model's and the optimizers' tensors and the DTensors of `extra`,
under keys that do not depend on how the model is wrapped or sharded: torch's distributed checkpoint writes them, and can
read them on another number of ranks. `Snapshot.tree` holds the rest: schedulers, scaler, `extra`, counters, and what
belongs to one rank alone: the states of its random generators and of its loader, and its modules' buffers.

Put back in this order: model and optimizers, then schedulers (their constructors overwrote the learning rates), scaler,
`extra`, loader, and the random generators last, because everything before may draw from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptd_shim import randomness
from ckptd_shim.data import DataPosition, is_stateful
from ckptd_shim.optim_state import NamedOptimizer, Names, Schema, compare_settings, compare_values, describe
from ckptd_shim.trees import join_dtensors, split_dtensors

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Attribute names that torch.compile and activation checkpointing put into a parameter's name."""
_EXTRA_STATE = "_extra_state"


LASTING: Final = ("schema", "layout")
"""Parts of the shared tree that are the same from save to save, and hold no tensors."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """References to the live state, not copies."""

    tensors: dict[str, torch.Tensor]
    tree: dict[str, Any]
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Keys of tensors that are parameters, not buffers, to the first key of the same one: tied weights have several."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where training stands: the counters that the shim keeps."""

    step: int
    samples: int
    epoch: int
    seed: int
    global_batch: int | None
    skipped: int = 0
    """Global samples that were passed over and not trained on: the data stands so much further than the counter."""

    @property
    def data(self) -> int:
        """Where the data stands, in global samples."""
        return self.samples + self.skipped


class TrainState:
    """Everything that the script handed to the shim, by role.

    Args:
        model: a module, or a list or a dict of modules.
        optimizer: an optimizer, or a list of them.
        scheduler: an object with state_dict and load_state_dict, or a list of them.
        scaler: an object with state_dict and load_state_dict, such as a GradScaler.
        dataloader: a loader. A GlobalSampler in it is put where the counters say; of any other sampler the state is kept,
            else the loader's own, if it has one (torchdata's StatefulDataLoader).
        extra: more objects with state_dict and load_state_dict, by name.
        rank: this rank.

    Raises:
        TypeError, ValueError: an argument that cannot be checkpointed, named in the message.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        extra: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self.models = _modules(model)
        names: Names = {}
        self._parameters: dict[str, str] = {}
        self._keys: dict[str, dict[str, str]] = {}
        first: dict[torch.Tensor, str] = {}
        for prefix, module in self.models.items():
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise TypeError(
                    f"model {prefix or 'given'} uses FullyShardedDataParallel: shard it by fully_shard instead"
                )
            for name, param in module.named_parameters(remove_duplicate=False):
                canonical = prefix + canonical_name(module, name)
                names.setdefault(param, canonical)
                key = f"model.{canonical}"
                self._parameters[key] = first.setdefault(param, key)
        self.optimizers = [
            NamedOptimizer(_of_type(each, torch.optim.Optimizer, f"optimizer {i}"), names, f"optim.{i}")
            for i, each in enumerate(_listed(optimizer))
        ]
        self.schedulers = [_stateful(each, f"scheduler {i}") for i, each in enumerate(_listed(scheduler))]
        self.scaler = None if scaler is None else _stateful(scaler, "scaler")
        self.extra = {name: _stateful(each, f"extra[{name!r}]") for name, each in dict(extra or {}).items()}
        self.data = DataPosition(dataloader)
        self.devices = randomness.cuda_devices(names)
        self._built = [each.settings() for each in self.optimizers]
        self._schedules = [(_class(each), _settings_of(each)) for each in self.schedulers]

    # --- capturing --------------------------------------------------------------------------------------------------

    def capture(self, position: Position, *, world_size: int, incomparable: str | None) -> Snapshot:
        """The state as it is now. Draws no random number and changes nothing.

        Raises:
            TypeError: an optimizer whose state cannot be put back.
        """
        tensors, model_rest = self.model_state()
        buffers = {} if self.rank == 0 else self._buffers(tensors)
        optimizers = []
        for each in self.optimizers:
            own, rest = each.capture()
            tensors.update(own)
            optimizers.append(rest)
        extra = {}
        for name, each in self.extra.items():
            extra[name], found = split_dtensors(each.state_dict(), f"extra.{name}")
            tensors.update(found)
        tree = {
            "shared": {
                "position": vars(position),
                "world_size": world_size,
                "incomparable": incomparable,
                "schema": {key: describe(tensor) for key, tensor in tensors.items()},
                "model": model_rest,
                "optimizers": optimizers,
                "schedulers": [(_class(each), each.state_dict()) for each in self.schedulers],
                "scaler": None if self.scaler is None else (_class(self.scaler), self.scaler.state_dict()),
                "extra": extra,
                "loader_kind": self.data.kind,
                "built": {"optimizers": self._built, "schedulers": self._schedules},
                "layout": {key: _layout(tensor) for key, tensor in tensors.items() if isinstance(tensor, DTensor)},
            },
            "rank": {"loader": self.data.capture(), "random": randomness.capture(self.devices), "buffers": buffers},
        }
        return Snapshot(tensors=tensors, tree=tree, parameters=self._parameters)

    def model_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(parameters and buffers by key, what else the modules keep). References, not copies."""
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        for prefix, module in self.models.items():
            for key, value in self._state_of(prefix, module).items():
                full = f"model.{prefix}{key}"
                if isinstance(value, torch.Tensor) and not key.endswith(_EXTRA_STATE):
                    tensors[full] = value
                else:
                    rest[full] = value
        return tensors, rest

    def _state_of(self, prefix: str, module: nn.Module) -> dict[str, Any]:
        """What `get_model_state_dict` gives, which takes long to find out how each key is called without its wrappers."""
        raw = module.state_dict()
        names = self._keys.setdefault(prefix, {})
        if raw.keys() == names.keys():
            return {names[key]: value for key, value in raw.items()}
        state = get_model_state_dict(module) if raw else {}  # torch refuses a module without any state
        names.clear()
        ours = {key: canonical_name(module, key) for key in raw}
        if len(set(ours.values())) == len(ours) and set(ours.values()) == state.keys():
            names.update(ours)
        return state

    def _buffers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What ranks need not hold alike, unlike parameters: the running statistics of a BatchNorm, say."""
        return {
            key: tensor
            for key, tensor in tensors.items()
            if key not in self._parameters and not isinstance(tensor, DTensor)
        }

    # --- restoring --------------------------------------------------------------------------------------------------

    def differences(self, saved: Mapping[str, Any], *, seed: int, same_world: bool) -> list[str]:
        """Why the saved tree `saved` does not fit, one line for each difference; empty if it does. Touches nothing."""
        shared = saved["shared"]
        tensors, rest = self.model_state()
        lines = _compare_schemas(
            {key: value for key, value in shared["schema"].items() if key.startswith("model.")},
            {key: describe(tensor) for key, tensor in tensors.items()},
        )
        lines += _compare_keys("model", shared["model"], rest)
        if len(shared["optimizers"]) != len(self.optimizers):
            lines.append(f"optimizer: saved with {len(shared['optimizers'])}, now {len(self.optimizers)}")
        else:
            for each, then in zip(self.optimizers, shared["optimizers"], strict=True):
                lines += each.differences(then)
            for each, then, built in zip(self.optimizers, shared["built"]["optimizers"], self._built, strict=True):
                lines += compare_settings(each.prefix, then, built)
        lines += self._schedule_differences(shared["built"]["schedulers"])
        scaler, own = shared["scaler"], self.scaler
        if (scaler and scaler[0]) != (own and _class(own)):
            lines.append(f"scaler: saved {scaler[0] if scaler else 'none'}, now {_class(own) if own else 'none'}")
        lines += _compare_keys("extra", shared["extra"], self.extra)
        sharded: Schema = {}
        for name in self.extra.keys() & shared["extra"].keys():
            found = split_dtensors(self.extra[name].state_dict(), f"extra.{name}")[1]
            sharded.update({key: describe(tensor) for key, tensor in found.items()})
        lines += _compare_schemas(
            {key: value for key, value in shared["schema"].items() if key.startswith("extra.")}, sharded
        )
        lines += self.data.differences(
            shared["loader_kind"], saved["rank"]["loader"], saved_world=shared["world_size"], same_world=same_world
        )
        if shared["position"]["seed"] != seed:
            lines.append(f"seed: saved {shared['position']['seed']}, now {seed}")
        return lines

    def _schedule_differences(self, saved: list[Any]) -> list[str]:
        """Schedules are compared as the scripts built them: where they stand now says nothing of what they will do."""
        then, now = [name for name, _ in saved], [name for name, _ in self._schedules]
        if then != now:
            return [f"scheduler: saved {_words(then)}, now {_words(now)}"]
        lines = []
        for i, ((_, old), (_, new)) in enumerate(zip(saved, self._schedules, strict=True)):
            lines += compare_values(f"scheduler {i}", old, new)
        return lines

    def layout_change(self, saved: Mapping[str, Any]) -> str | None:
        """How the tensors are sharded otherwise than when `saved` was taken, in a few words; None: they are not."""
        tensors, _ = self.model_state()
        for key, then in saved["shared"]["layout"].items():
            tensor = tensors.get(key)
            if key.startswith("model.") and tensor is not None:
                now = _layout(tensor) if isinstance(tensor, DTensor) else "whole"
                if now != then:
                    return f"{key} was sharded as {then}, now {now}"
        return None

    def destinations(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Tensors to read the saved ones into, by key: the model's and `extra`'s own, new ones for the optimizers."""
        shared = saved["shared"]
        result, _ = self.model_state()
        for each, then in zip(self.optimizers, shared["optimizers"], strict=True):
            result.update(each.destinations(then, shared["schema"]))
        for name, each in self.extra.items():
            result.update(split_dtensors(each.state_dict(), f"extra.{name}")[1])
        return result

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, same_world: bool) -> None:
        """Put everything back; `tensors` are the destinations, filled.

        Args:
            saved: this rank's tree, or rank 0's when the number of ranks has changed.
            tensors: the destinations by key.
            same_world: whether `saved` is this rank's own. If not, its random generators begin anew, from the seed, the
                step and the rank.
        """
        shared, own = saved["shared"], saved["rank"]
        position = Position(**shared["position"])
        if same_world:
            tensors = {**tensors, **own["buffers"]}
        for prefix, module in self.models.items():
            start = f"model.{prefix}"
            state: dict[str, Any] = {
                key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)
            }
            state |= {key[len(start) :]: value for key, value in shared["model"].items() if key.startswith(start)}
            if state:
                set_model_state_dict(module, state, options=StateDictOptions(strict=True))
        for each, then in zip(self.optimizers, shared["optimizers"], strict=True):
            each.restore(then, tensors)
        for scheduler, (_, state) in zip(self.schedulers, shared["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(shared["scaler"][1])
        for name, each in self.extra.items():
            each.load_state_dict(join_dtensors(shared["extra"][name], tensors))
        self.data.restore(own["loader"], position.data)
        self.data.seed(position.seed, position.step, self.rank)
        if same_world:
            randomness.restore(own["random"], self.devices)
        else:
            randomness.reseed(self.devices, position.seed, position.step, self.rank)


def canonical_name(model: nn.Module, name: str) -> str:
    """The name that a parameter has in the bare model, as `get_model_state_dict` gives it."""
    parts, module = [], model
    for part in name.split("."):
        wrapper = part in _WRAPPERS or (isinstance(module, DistributedDataParallel) and part == "module")
        if not wrapper:
            parts.append(part)
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            module = child
    return ".".join(parts)


# --- arguments --------------------------------------------------------------------------------------------------------


def _modules(model: Any) -> dict[str, nn.Module]:
    """Modules by the prefix of their keys: none for a single one, else its name or index and a dot."""
    if model is None:
        return {}
    if isinstance(model, nn.Module):
        return {"": model}
    named = model if isinstance(model, Mapping) else dict(enumerate(_listed(model)))
    if dotted := [name for name in named if "." in str(name)]:
        raise ValueError(f"the name of a model may hold no dot: {', '.join(map(repr, dotted))}")
    return {f"{name}.": _of_type(module, nn.Module, f"model {name!r}") for name, module in named.items()}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _of_type(value: Any, cls: type, what: str) -> Any:
    if not isinstance(value, cls):
        raise TypeError(f"{what} should be a {cls.__module__}.{cls.__qualname__}, is {value!r}")
    return value


def _stateful(value: Any, what: str) -> Any:
    if not is_stateful(value):
        raise TypeError(f"{what} should have state_dict and load_state_dict, is {value!r}")
    return value


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _settings_of(scheduler: Any) -> dict[str, Any]:
    """What a scheduler was built with, as far as its state says it."""
    return {key: _plain(value) for key, value in scheduler.state_dict().items() if not key.startswith("_")}


def _plain(value: Any) -> Any:
    """A copy: a scheduler's own lists change as it steps."""
    return list(value) if type(value) is list else value


def _layout(tensor: DTensor) -> str:
    """How a tensor is spread, in words that are equal for equal layouts."""
    mesh = tensor.device_mesh
    return f"{tuple(mesh.shape)}{tuple(map(str, tensor.placements))}"


def _words(names: list[str]) -> str:
    return ", ".join(names) or "none"


# --- comparing --------------------------------------------------------------------------------------------------------


def _compare_schemas(saved: Schema, now: Schema) -> list[str]:
    lines = _compare_keys("tensor", saved, now)
    for key in saved.keys() & now.keys():
        for what, then, new in zip(("dtype", "shape"), saved[key][:2], now[key][:2], strict=True):
            if then != new:
                lines.append(f"{key}: saved with {what} {then}, now {new}")
    return sorted(lines)


def _compare_keys(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = [f"{what} {key!r}: saved, but there is none of that name now" for key in saved if key not in now]
    return lines + [f"{what} {key!r}: there now, but none of that name was saved" for key in now if key not in saved]
