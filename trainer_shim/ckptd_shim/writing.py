"""How do the staged tensors get into files, and what is said when they do not?"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from ckptd_shim import contract

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import torch
    import torch.distributed as dist

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


class _Files(FileSystem):
    """Keeps the first error of the disk: torch's writer turns it into one that has lost the number."""

    error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        files = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                try:
                    return super().write(data) or 0
                except OSError as error:
                    files.error = files.error or error
                    raise

        with io.BufferedWriter(Raw(path, mode)) as stream:
            yield stream


class _Writer(FileSystemWriter):
    """torch's writer, which remembers why it failed: what it raises after telling all ranks is only a text."""

    failure: BaseException | None = None

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = self._files = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        with self._remembering():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with self._remembering():
            super().finish(metadata, results)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failure = self._files.error or error
            raise


def write_tensors(
    path: str,
    tensors: dict[str, torch.Tensor],
    staged: dict[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    durable: bool,
) -> Metadata:
    """Write this rank's part of `tensors` into the directory `path`: a collective of `group`.

    Args:
        path: the directory, which exists.
        tensors: by key; they say how each is sharded.
        staged: this rank's part of each, on the CPU.
        group: all ranks; None in a world of one.
        durable: with the files on disk on return.

    Raises:
        BaseException: this rank's own failure where it has one, else torch's account of the others' failures.
    """
    writer = _Writer(
        path,
        sync_files=durable,
        # With more threads a failed one goes unnoticed; copying ahead is done, and would touch the GPU.
        thread_count=1,
        per_thread_copy_ahead=0,
        overwrite=False,
    )
    try:
        return save_tensors(
            dict(tensors), storage_writer=writer, planner=_Planner(staged), process_group=group, no_dist=group is None
        )
    except BaseException:
        if writer.failure is None:
            raise
        raise writer.failure from None


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
