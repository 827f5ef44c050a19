"""How do tensors get from a checkpoint's files into the memory where they belong, with one copy and not three?

torch keeps each tensor as a zip archive of its own inside a `.distcp` file, and its reader makes a tensor of it, and
copies that. Here the tensor's bytes are found in the archive and read straight into place, where that is possible: into
contiguous memory on the CPU, of whole rows of the saved chunk. That is nearly always so, and torch does the rest.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ckptd_shim.extras import bytes_of

if TYPE_CHECKING:
    import io

_RECORD: Final = "/data/0"
"""End of the name, in torch's archive, of the bytes of a tensor's storage."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Of a zip member: signature, length of its name, length of its extra field; the bytes follow."""


class Reader(FileSystemReader):
    """Reads with metadata that was checked before, and no other pickle.

    Args:
        path: the checkpoint directory.
        metadata: what `.metadata` holds.
    """

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item straight into place, or leave it to torch, which reads with weights_only."""
        rest = []
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            with open(os.path.join(self.path, name), "rb", buffering=0) as file:
                rest += [item for item in items if not self._read(file, item, planner)]
        if rest:
            return super().read_data(LoadPlan(rest, plan.storage_data, plan.planner_data), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read one item into place. False: it is not of the simple kind, and nothing was done."""
        if item.type == LoadItemType.BYTE_IO:
            return False
        place = self.storage_data[item.storage_index]
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        chunk = _chunk_of(saved, item)
        if chunk is None or place.transform_descriptors:
            return False
        target = planner.resolve_tensor(item).detach()
        assert isinstance(saved, TensorStorageMetadata)
        simple = (
            target.device.type == "cpu"
            and target.layout == torch.strided
            and target.is_contiguous()
            and target.numel() > 0
            and target.dtype == saved.properties.dtype
            and target.size() == item.lengths
        )
        row = math.prod(chunk[1:]) * target.itemsize
        start = _record_start(file, place.offset, place.length, math.prod(chunk) * target.itemsize) if simple else None
        if start is None:
            return False
        _read_into(file, start + (item.storage_offsets[0] * row if chunk else 0), bytes_of(target.reshape(-1)))
        planner.commit_tensor(item, target)
        return True


def _chunk_of(saved: Any, item: ReadItem) -> torch.Size | None:
    """The shape of the saved chunk, if the item takes whole rows of it."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    for chunk in saved.chunks:
        if chunk.offsets == item.storage_index.offset:
            whole = all(offset == 0 for offset in item.storage_offsets[1:]) and item.lengths[1:] == chunk.sizes[1:]
            return chunk.sizes if whole else None
    return None


class _Slice:
    """A part of a file as a file, for `zipfile`."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + to)
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._file.fileno(), left if count < 0 else min(count, left), self._offset + self._at)
        self._at += len(data)
        return data


def _record_start(file: io.FileIO, offset: int, length: int, size: int) -> int | None:
    """Where in the file the `size` bytes of the tensor begin whose archive is at `offset`; None: it is another kind."""
    try:
        with zipfile.ZipFile(_Slice(file, offset, length)) as archive:
            (info,) = [each for each in archive.infolist() if each.filename.endswith(_RECORD)]
            order = [archive.read(each) for each in archive.infolist() if each.filename.endswith("/byteorder")]
    except (zipfile.BadZipFile, ValueError, OSError):
        return None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != size or order not in ([], [b"little"]):
        return None
    signature, name, extra = _LOCAL_HEADER.unpack(
        os.pread(file.fileno(), _LOCAL_HEADER.size, offset + info.header_offset)
    )
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    return offset + start if signature == b"PK\x03\x04" and start + size <= length else None


def _read_into(file: io.FileIO, start: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file.fileno(), [memory[done:]], start + done)
        if count == 0:
            raise EOFError(f"{file.name} ends at byte {start + done}, before its tensor does")
        done += count
