"""How do the staged tensors get into files, and what is said when they do not?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import shutil
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from ckptd_shim import contract
from ckptd_shim.background import at_once
from ckptd_shim.contract import FileDigest
from ckptd_shim.framing import DigestedFile, Framer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch.distributed as dist

    Gentle = Callable[[Callable[[], None]], None]

Problem = dict[str, Any]
"""What went wrong on a rank, as the others are told: {"error": text, "errno": number or None}."""

# A world of one needs no process group; torch would say so at each save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _Planner(DefaultSavePlanner):
    """Plans by the live tensors, which know how they are sharded, and writes the staged ones."""

    def __init__(self, staged: dict[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._staged[index.fqn]


class _Writer(FileSystemWriter):
    """Writes one file a rank, and remembers why it failed: what torch raises after telling all ranks is only a text."""

    failure: BaseException | None = None
    plan: tuple[tuple[MetadataIndex, ...], str] | None = None
    results: tuple[WriteResult, ...] = ()
    files: tuple[FileDigest, ...] = ()
    marshalled: bytes = b""

    def __init__(self, path: str, framer: Framer, *, durable: bool, gently: Gentle) -> None:
        super().__init__(path, sync_files=durable, thread_count=1, overwrite=False)
        self._framer = framer
        self._gently = gently

    def write_data(self, plan: Any, planner: Any) -> Any:
        with self._remembering():
            indices = tuple(item.index for item in plan.items)
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            tensors = [planner.resolve_data(item) for item in plan.items]
            path = os.path.join(self.path, name)
            self.files, places = write_file(path, tensors, self._framer, durable=self.sync_files, gently=self._gently)
            self.results = tuple(
                WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, offset, length))
                for index, (offset, length) in zip(indices, places, strict=True)
            )
            self.plan = indices, name
            done: Future[list[WriteResult]] = Future()
            done.set_result(list(self.results))
            return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On rank 0, when every rank has written. The same plan gives the same bytes at every save."""
        with self._remembering():
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
            metadata.storage_meta = StorageMeta()
            self.marshalled = pickle.dumps(metadata)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise


def write_file(
    path: str, tensors: Sequence[torch.Tensor], framer: Framer, *, durable: bool, gently: Gentle = at_once
) -> tuple[tuple[FileDigest, ...], list[tuple[int, int]]]:
    """Write tensors one after the other: (the file with its digest, offset and length of each). No tensors, no file."""
    if not tensors:
        return (), []
    file = DigestedFile(path, gently)
    places = []
    try:
        for tensor in tensors:
            offset = file.size
            places.append((offset, framer.put(file, tensor)))
        file.close(durable=durable)
    finally:
        file.discard()
    return (FileDigest(name=os.path.basename(path), size=file.size, crc32c=file.crc32c),), places


def write_bytes(
    path: str, chunks: Iterable[bytes | memoryview], *, durable: bool, gently: Gentle = at_once
) -> FileDigest:
    """Write buffers into a new file. Raises OSError."""
    file = DigestedFile(path, gently)
    try:
        for chunk in chunks:
            file.put(chunk)
        file.close(durable=durable)
    finally:
        file.discard()
    return FileDigest(name=os.path.basename(path), size=file.size, crc32c=file.crc32c)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who writes what where: worked out by torch for one save, and good for every one of the same tensors."""

    signature: str
    """Of this rank's part; see `signature_of`."""
    indices: tuple[MetadataIndex, ...]
    name: str
    places: tuple[tuple[int, int], ...]
    metadata: Metadata
    marshalled: bytes
    """What is in `.metadata`; rank 0 has it."""


class TensorWriter:
    """Writes the staged tensors of save after save. Every rank calls the same methods in the same order.

    Args:
        rank: this rank.
        group: all ranks; None in a world of one.
        durable: with the files on disk on return.
        gently: who does the heavy pieces.
    """

    def __init__(self, *, rank: int, group: dist.ProcessGroup | None, durable: bool, gently: Gentle = at_once) -> None:
        self._gently = gently
        self._rank = rank
        self._group = group
        self._durable = durable
        self.framer = Framer()
        self.layout: Layout | None = None
        """Of the newest save that all ranks wrote; `write` goes by it when it is told that every rank has one that fits."""

    def learn(self, buffers: Iterable[torch.Tensor]) -> None:
        """Find out beforehand what does not depend on the values that the buffers will have."""
        for buffer in buffers:
            self._gently(functools.partial(self.framer.learn, buffer))

    def write(
        self,
        path: str,
        tensors: dict[str, torch.Tensor],
        staged: dict[str, torch.Tensor],
        *,
        signature: str,
        again: bool,
    ) -> tuple[list[FileDigest], Metadata]:
        """Write this rank's part of `tensors` into the directory `path`, which exists. A collective unless `again`.

        Args:
            path: the directory.
            tensors: by key; they say how each is sharded.
            staged: this rank's part of each, on the CPU.
            signature: of `tensors`.
            again: every rank has a `layout` of its signature, so there is nothing to work out together.

        Raises:
            BaseException: this rank's own failure where it has one, else torch's account of the others' failures.
        """
        if again:
            assert self.layout is not None
            layout = self.layout
            parts = [staged[index.fqn] for index in layout.indices]
            files, places = write_file(
                os.path.join(path, layout.name), parts, self.framer, durable=self._durable, gently=self._gently
            )
            if tuple(places) != layout.places:
                raise RuntimeError(f"{layout.name} is laid out otherwise than at the save before")
        else:
            layout, files = self._plan_and_write(path, tensors, staged, signature)
            self.layout = layout
        listed = list(files)
        if self._rank == 0:
            name = os.path.join(path, contract.DCP_METADATA)
            listed.append(write_bytes(name, [layout.marshalled], durable=self._durable))
        return listed, layout.metadata

    def spread(self, path: str, broadcast: Callable[[bytes | None], bytes], *, again: bool, leads: bool) -> None:
        """After `write`, where each node has its own directory: have `.metadata` in all of them.

        A collective unless `again`. `leads`: this rank writes it on its node. Raises OSError.
        """
        assert self.layout is not None
        if not again:
            marshalled = broadcast(self.layout.marshalled if self._rank == 0 else None)
            self.layout = dataclasses.replace(self.layout, marshalled=marshalled)
        if leads and self._rank != 0:
            write_bytes(os.path.join(path, contract.DCP_METADATA), [self.layout.marshalled], durable=self._durable)

    def _plan_and_write(
        self, path: str, tensors: dict[str, torch.Tensor], staged: dict[str, torch.Tensor], signature: str
    ) -> tuple[Layout, tuple[FileDigest, ...]]:
        self.layout = None
        writer = _Writer(path, self.framer, durable=self._durable, gently=self._gently)
        try:
            metadata = save_tensors(
                dict(tensors), storage_writer=writer, planner=_Planner(staged), process_group=self._group,
                no_dist=self._group is None,
            )  # fmt: skip
        except BaseException:
            if writer.failure is None:
                raise
            raise writer.failure from None
        assert writer.plan is not None
        layout = Layout(
            signature=signature,
            indices=writer.plan[0],
            name=writer.plan[1],
            places=tuple((each.storage_data.offset, each.storage_data.length) for each in writer.results),
            metadata=metadata,
            marshalled=writer.marshalled,
        )
        return layout, writer.files


def needed_files(tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> list[str]:
    """Names of the files that this rank's part of `tensors` lies in, sorted; other ranks' where they wrote it for it."""
    stored = metadata.storage_data or {}
    found = set()
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            place = stored.get(MetadataIndex(key, torch.Size(offsets)))
        else:
            place = stored.get(MetadataIndex(key, torch.Size([0] * tensor.dim())))
        if place is not None:
            found.add(str(place.relative_path))
        elif isinstance(tensor, DTensor) and tensor.to_local().numel() == 0:
            continue  # of a tensor with fewer rows than ranks this one has none
        else:
            found |= {str(each.relative_path) for index, each in stored.items() if index.fqn == key}
    return sorted(found)


def signature_of(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """(digest of all that decides how this rank's tensors are laid out in files, the same of those that are not sharded).

    What is not sharded every rank must hold alike, because rank 0 alone writes it.
    """
    everything, alike = hashlib.sha256(), hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        text = f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}"
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            text += f"\0{tensor.placements}\0{mesh.shape}\0{mesh.get_coordinate()}\0{tuple(tensor.to_local().shape)}"
        else:
            alike.update(text.encode())
        everything.update(text.encode())
    return everything.hexdigest(), alike.hexdigest()


def check_plan(metadata: Metadata, sizes: dict[str, int]) -> None:
    """Raise ValueError unless every planned chunk of every tensor lies inside a file of `sizes` (bytes by name)."""
    stored = metadata.storage_data or {}
    for key, planned in metadata.state_dict_metadata.items():
        if not isinstance(planned, TensorStorageMetadata):
            raise ValueError(f"{key} was planned as something else than a tensor")  # noqa: TRY004  not a caller's fault
        for chunk in planned.chunks:
            place = stored.get(MetadataIndex(key, chunk.offsets))
            if place is None:
                raise ValueError(f"{key} at {list(chunk.offsets)} was planned and not written")
            size = sizes.get(place.relative_path, -1)
            if size < place.offset + place.length:
                raise ValueError(
                    f"{place.relative_path} has {size} bytes, {key} should end at byte {place.offset + place.length}",
                )


_SHOWN: Final = 500


def problem_of(error: BaseException) -> Problem:
    text = str(error)
    if isinstance(error, CheckpointException):
        text = "; ".join(f"rank {rank}: {_text(each[0])}" for rank, each in error.failures.items())
    elif not isinstance(error, OSError):
        text = _text(error)
    return {"error": text[:_SHOWN], "errno": _errno(error)}


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _errno(error: BaseException) -> int | None:
    """The number of the first OSError behind an exception."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, OSError) and each.errno is not None:
            return each.errno
        pending += [each.__cause__, each.__context__]
        if isinstance(each, CheckpointException):
            pending += [failure for failure, _ in each.failures.values()]
    return None


def first_problem(told: list[dict[str, Any]]) -> Problem | None:
    """The problem to report: one with a number tells most, and the ranks that only heard of it come after."""
    problems = [each["problem"] | {"rank": rank} for rank, each in enumerate(told) if each["problem"] is not None]
    if not problems:
        return None
    chosen = next((each for each in problems if each["errno"] is not None), problems[0])
    rank = chosen.pop("rank")
    return chosen if len(told) == 1 else chosen | {"error": f"rank {rank}: {chosen['error']}"}


def remove_partial(path: str) -> bool:
    """Remove a partial checkpoint, its marker first. Returns whether it is gone."""
    contract.unlink_quietly(os.path.join(path, contract.COMMITTED))
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
