"""Which checkpoint is resumed from, and how does it get back into the script?

Under ckptd the daemon's choice is the only one that is accepted, and its bytes have just been verified. Alone, the
shim takes the newest committed checkpoint that it can verify. `.metadata` is a pickle: it is read by an unpickler that
knows torch's own descriptions of tensors and nothing else.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from ckptd_shim import contract, extras
from ckptd_shim.digest import check_sizes, committed_paths, crc32c_bytes, read_marker, verify_checkpoint
from ckptd_shim.errors import CheckpointError, CheckpointMismatch
from ckptd_shim.extras import dtype_name
from ckptd_shim.reading import Reader
from ckptd_shim.state import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd_shim.contract import Marker
    from ckptd_shim.ranks import Ranks
    from ckptd_shim.state import TrainState

_ADMITTED: Final = frozenset({
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was resumed from."""

    path: str
    marker: Marker
    position: Position
    incomparable: str | None
    """Why checkpoints from here on cannot be compared with those of an uninterrupted run; None: they can."""


def newest(directory: str) -> tuple[str, Marker] | None:
    """The newest committed checkpoint below `directory` that is whole; None where nothing was ever committed.

    Raises:
        CheckpointError: there are commits, and none of them can be read, or they are of several runs.
    """
    markers: list[tuple[Marker, str]] = []
    problems: list[str] = []
    for path in committed_paths(directory):
        try:
            markers.append((read_marker(path), path))
        except CheckpointError as error:
            problems.append(str(error))
    runs = sorted({marker.run_id for marker, _ in markers})
    if len(runs) > 1:
        raise CheckpointError(
            f"{directory} holds checkpoints of {len(runs)} runs ({', '.join(runs)}): move all but one run's away"
        )
    for marker, path in sorted(markers, key=lambda each: each[0].sequence, reverse=True):
        try:
            return path, verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            print(
                f"ckptd: {error}; trying the checkpoint before it (not step {marker.step})", file=sys.stderr, flush=True
            )
    if problems:
        raise CheckpointError(
            f"{directory} holds {len(problems)} committed checkpoints, and none of them can be read: {'; '.join(problems)}"
        )
    return None


def load(  # noqa: D417
    path: str, *, state: TrainState, ranks: Ranks, seed: int, marker_crc32c: str | None = None,
    skip_data_to: int | None = None, partial: bool = False,
) -> Loaded:  # fmt: skip
    """Put the checkpoint at `path` back into `state`. A collective: it succeeds on every rank, or on none.

    Args:
        marker_crc32c: refuse a directory whose `COMMITTED` has another CRC-32C.
        skip_data_to: pass over the data up to this position (global samples), where the loader can be put there.
        partial: files may be missing here that this rank does not need.

    Raises:
        CheckpointMismatch: it was saved by a script that differs from this one. Nothing is touched.
        CheckpointError: it cannot be read, or is not the one that was chosen.
    """
    problem: Exception | None = None
    plan = None
    try:
        plan = _check(path, state=state, ranks=ranks, seed=seed, marker_crc32c=marker_crc32c, partial=partial)
    except Exception as error:
        problem = error
    _agree(ranks, problem, path)
    assert plan is not None
    marker, tree, tensors, metadata = plan
    if ranks.rank == 0 and marker.torch not in ("", torch.__version__):
        print(
            f"ckptd: {path} was written with torch {marker.torch}, this is {torch.__version__}: it is put back whole, but "
            "what is computed from here on need not be bit for bit what it would have been",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    same_world = marker.world_size == ranks.size
    layout = None
    passed_over = _pass_over(tree, skip_data_to, state, ranks.rank)
    try:
        if tensors:
            load_tensors(
                tensors,
                storage_reader=Reader(path, metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        layout = state.layout_change(tree)
        state.restore(tree, tensors, same_world=same_world)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        problem = CheckpointError(f"{path} could not be put back: {type(error).__name__}: {error}")
        problem.__cause__ = error
    _agree(ranks, problem, path)
    return Loaded(
        path=path,
        marker=marker,
        position=Position(**tree["shared"]["position"]),
        incomparable=_incomparable(tree["shared"]["incomparable"], marker, ranks.size, layout) or passed_over,
    )


def _pass_over(tree: dict[str, Any], to: int | None, state: TrainState, rank: int) -> str | None:
    """Move the data position in `tree` on to `to`; returns what that means for later comparisons, None: nothing was done."""
    before = Position(**tree["shared"]["position"])
    if to is None or to <= before.data:
        return None
    if not state.data.can_skip:
        if rank == 0:
            print(
                "ckptd: guard.skip_data is asked for, and this loader has no set_position: the same data is trained on again",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return None
    batch = before.global_batch or 1
    skipped = -(-(to - before.data) // batch) * batch
    tree["shared"]["position"]["skipped"] = before.skipped + skipped
    return f"the data from sample {before.data} to {before.data + skipped} was passed over at step {before.step} (guard.skip_data)"


def _check(
    path: str, *, state: TrainState, ranks: Ranks, seed: int, marker_crc32c: str | None, partial: bool
) -> tuple[Marker, dict[str, Any], dict[str, torch.Tensor], Metadata]:
    """Everything that can be known to be wrong before anything is touched."""
    marker = read_marker(path, marker_crc32c)
    check_sizes(path, marker, partial=partial)
    same_world = marker.world_size == ranks.size
    name = contract.extras_name(ranks.rank if same_world else 0)
    tree = extras.read(os.path.join(path, name), _digest_of(name, path, marker))
    if isinstance(tree, dict) and "shared" not in tree:
        # All ranks had the same, and rank 0 wrote it for them.
        first = contract.extras_name(0)
        tree |= {"shared": extras.read(os.path.join(path, first), _digest_of(first, path, marker))["shared"]}
    if (
        not isinstance(tree, dict)
        or tree.keys() < {"shared", "rank"}
        or tree["shared"]["position"]["step"] != marker.step
    ):
        raise CheckpointError(f"{path}: the extras are not those of step {marker.step}")
    differences = state.differences(tree, seed=seed, same_world=same_world)
    if differences:
        raise CheckpointMismatch(path, differences)
    tensors = state.destinations(tree)
    if not tensors and all(each.name != contract.DCP_METADATA for each in marker.files):
        # Committed by a framework, which reads its own files: what is put back here is the rest.
        return marker, tree, tensors, Metadata({})
    metadata = read_metadata(path, marker)
    for key, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{path}: {contract.DCP_METADATA} does not list {key}")
        if saved.size != tensor.shape or saved.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {contract.DCP_METADATA} has {key} as {dtype_name(saved.properties.dtype)}{list(saved.size)}, "
                f"the extras as {dtype_name(tensor.dtype)}{list(tensor.shape)}",
            )
    return marker, tree, tensors, metadata


def _agree(ranks: Ranks, problem: Exception | None, path: str) -> None:
    """Raise on every rank if any has a problem: its own where it has one."""
    told = ranks.exchange({"problem": None if problem is None else str(problem)})
    if problem is not None:
        raise problem
    for rank, each in enumerate(told):
        if each["problem"] is not None:
            raise CheckpointError(f"{path}: rank {rank} cannot resume: {each['problem']}")


def _incomparable(before: str | None, marker: Marker, world_size: int, layout: str | None) -> str | None:
    if before is not None:
        return before
    if marker.world_size != world_size:
        return f"world size changed from {marker.world_size} to {world_size} at step {marker.step}"
    if layout is not None:
        return f"the layout changed at step {marker.step}: {layout}"
    return None


def _digest_of(name: str, path: str, marker: Marker) -> str:
    for listed in marker.files:
        if listed.name == name:
            return listed.crc32c
    raise CheckpointError(f"{path}: {name} was not committed")


def _member(owner: Any, name: str) -> Any:
    """A member of an enum by its name, which Python before 3.11.4 pickles as a call of getattr; nothing else is got."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(
        f"it asks for {name!r} of what is no enum, which has no place in a description of tensors"
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a description of tensors")


def read_metadata(path: str, marker: Marker) -> Metadata:
    """Read `.metadata` of the checkpoint at `path`.

    Raises:
        CheckpointError: it cannot be read, holds anything but descriptions of tensors, or points outside `marker`.
    """
    name = os.path.join(path, contract.DCP_METADATA)
    expected = _digest_of(contract.DCP_METADATA, path, marker)
    try:
        with open(name, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    # These very bytes: nothing is unpickled that the job did not write.
    if (actual := crc32c_bytes(data)) != expected:
        raise CheckpointError(f"{name} has CRC-32C {actual}, {expected} was committed: its bytes have changed")
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
    listed = {each.name for each in marker.files}
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{name} is no description of a checkpoint")
    for place in metadata.storage_data.values():
        if place.relative_path not in listed:
            raise CheckpointError(f"{name} points to {place.relative_path!r}, which was not committed")
    return metadata


def agree_on(ranks: Ranks, directory: str) -> tuple[str, str, Mapping[str, Any]] | None:
    """Rank 0's `newest`, told to all: (path, CRC-32C of its marker, {sequence, run_id}); None: nothing to resume.

    Raises:
        CheckpointError: on every rank, if rank 0 found commits of which none can be read.
    """
    mine: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            if (found := newest(directory)) is not None:
                path, marker = found
                with open(os.path.join(path, contract.COMMITTED), "rb") as file:
                    crc = crc32c_bytes(file.read())
                mine = {"path": path, "crc": crc, "sequence": marker.sequence, "run_id": marker.run_id}
        except (CheckpointError, OSError) as error:
            mine = {"error": str(error)}
    told = ranks.exchange(mine)[0]
    if "error" in told:
        raise CheckpointError(told["error"])
    return (told["path"], told["crc"], told) if told else None


def next_attempt(directory: str) -> int:
    """A number above that of every attempt that has left a directory here, so that none is written twice."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 1
    return 1 + max((parsed[1] for name in names if (parsed := contract.parse_checkpoint_dirname(name))), default=0)
