"""How is a tree of plain values and tensors kept in a file that nothing needs to unpickle?

Layout: 8 bytes of magic, the length of the header as a little-endian 64 bit integer, the header (JSON), then the bytes
of the tensors, arrays and byte strings one after the other. The header describes the tree; where a value is bytes it
gives offset and length. Reading builds only the types listed in `_Decoder`: data, never code.
"""

from __future__ import annotations

import collections
import ctypes
import json
import math
import os
import re
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import crc32c as _crc32c
import torch
from torch.distributed.tensor import DTensor

from ckptd_shim.digest import crc32c_bytes
from ckptd_shim.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAGIC: Final = b"ckptdx01"
_LENGTH: Final = struct.Struct("<Q")
_DOUBLE: Final = struct.Struct("<d")
_LIMIT: Final = 1 << 62
"""Integers beyond this are kept in hex: Python refuses decimal digits in large numbers."""
_ALIGN: Final = 64
_EXACT: Final = (type(None), bool, str)


class _Encoder:
    def __init__(self) -> None:
        self.blobs: list[memoryview] = []
        self.offset = 0

    def blob(self, data: bytes | bytearray | memoryview) -> list[int]:
        view = memoryview(data).cast("B")
        padding = -self.offset % _ALIGN
        if padding:
            self.blobs.append(memoryview(bytes(padding)))
            self.offset += padding
        place = [self.offset, view.nbytes]
        self.blobs.append(view)
        self.offset += view.nbytes
        return place

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.encode(value, f"{where}[{i}]") for i, value in enumerate(values)]

    def pairs(self, mapping: dict[Any, Any], where: str) -> list[Any]:
        return [
            [self.encode(key, f"{where} (key {key!r})"), self.encode(value, f"{where}[{key!r}]")]
            for key, value in mapping.items()
        ]

    def encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _EXACT:
            return value
        if kind is int:
            return value if -_LIMIT < value < _LIMIT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", _DOUBLE.pack(value).hex()]
        if kind is list:
            return ["list", self.items(value, where)]
        if kind is tuple:
            return ["tuple", self.items(value, where)]
        if kind is dict:
            return ["dict", self.pairs(value, where)]
        if kind is collections.OrderedDict:
            # A module's state dict carries its version table in this attribute.
            metadata = getattr(value, "_metadata", None)
            return ["ordered", self.pairs(value, where), self.encode(metadata, f"{where}._metadata")]
        if kind is collections.Counter:
            return ["counter", self.pairs(value, where)]
        if kind is collections.deque:
            return ["deque", self.items(value, where), value.maxlen]
        if kind in (set, frozenset):
            # The order of a set is not the same in two processes; the file should be.
            return [kind.__name__, self.items(sorted(value, key=repr), where)]
        if kind in (bytes, bytearray):
            return [kind.__name__, *self.blob(value)]
        if kind is torch.Size:
            return ["size", list(value)]
        if kind is torch.dtype:
            return ["dtype", dtype_name(value)]
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return self.tensor(value, where)
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and (kind is numpy.ndarray or isinstance(value, numpy.generic))
            and value.dtype.kind in "biufcSUMm"
        ):
            name = "array" if kind is numpy.ndarray else "scalar"
            return [name, value.dtype.str, list(value.shape), *self.blob(value.tobytes())]
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
            "keep numbers, strings, bytes, lists, tuples, dicts, sets, tensors and NumPy arrays in a state_dict",
        )

    def tensor(self, value: torch.Tensor, where: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(f"{where} is a tensor of layout {value.layout} on {value.device}, which cannot be stored")
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return ["tensor", dtype_name(value.dtype), list(value.shape), *self.blob(bytes_of(flat))]


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which stays alive with the view. (`Tensor.numpy` would need NumPy.)"""
    if not flat.nbytes:
        return memoryview(b"")
    buffer = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    buffer.owner = flat  # type: ignore[attr-defined]
    return memoryview(buffer)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: object) -> torch.dtype:
    """The dtype that `dtype_name` calls `name`. Raises CheckpointError for anything else."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


def dump(tree: Any) -> list[bytes | memoryview]:
    """The file's contents as a list of buffers. Tensors on the CPU are not copied: write before they change.

    Raises:
        TypeError: a value that the format cannot hold; the message names its place in the tree and its type.
    """
    encoder = _Encoder()
    return [_head(_json(encoder.encode(tree, "state"))), *encoder.blobs]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tree `{"shared": ..., "rank": ...}`, encoded so that the shared part can be left out of the file."""

    own: str
    own_blobs: list[memoryview]
    shared: str
    shared_blobs: list[memoryview]

    def shared_crc32c(self) -> str:
        """CRC-32C of the shared part: where it is the same on all ranks, one of them has to write it."""
        crc = _crc32c.crc32c(self.shared.encode())
        for blob in self.shared_blobs:
            crc = _crc32c.crc32c(blob, crc)
        return f"{crc:08x}"

    def chunks(self, *, shared: bool) -> list[bytes | memoryview]:
        """The file's contents, with or without the shared part."""
        pairs = f'["rank",{self.own}]' + (f',["shared",{self.shared}]' if shared else "")
        return [_head(f'["dict",[{pairs}]]'), *self.own_blobs, *(self.shared_blobs if shared else [])]


class Packer:
    """Encodes the trees of save after save. What is long and never changes is not encoded again.

    Args:
        lasting: keys of the shared part whose values hold strings, numbers and lists only.
    """

    def __init__(self, *lasting: str) -> None:
        self._lasting = lasting
        self._known: dict[str, tuple[Any, str]] = {}

    def pack(self, tree: dict[str, Any]) -> Packed:
        """Tensors on the CPU are not copied: write before they change.

        Raises:
            TypeError: a value that the format cannot hold; the message names its place in the tree and its type.
        """
        encoder = _Encoder()
        # This rank's own comes first, so that the offsets in it are the same with and without the rest.
        own = _json(encoder.encode(tree["rank"], "state['rank']"))
        count = len(encoder.blobs)
        pairs = []
        for key, value in tree["shared"].items():
            known = self._known.get(key)
            if known is None or known[0] != value:
                known = value, _json(encoder.encode(value, f"state['shared'][{key!r}]"))
                if key in self._lasting:
                    self._known[key] = known
            pairs.append(f"[{json.dumps(key)},{known[1]}]")
        return Packed(
            own=own,
            own_blobs=encoder.blobs[:count],
            shared=f'["dict",[{",".join(pairs)}]]',
            shared_blobs=encoder.blobs[count:],
        )


def _json(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def _head(tree: str) -> bytes:
    header = f'{{"tree":{tree}}}'.encode()
    header += b" " * (-(len(MAGIC) + _LENGTH.size + len(header)) % _ALIGN)
    return MAGIC + _LENGTH.pack(len(header)) + header


def write(path: str | os.PathLike[str], chunks: list[bytes | memoryview], *, durable: bool = True) -> None:
    """Write what `dump` gave into a new file, on disk when this returns if `durable`. Raises OSError."""
    with open(path, "xb") as file:
        file.writelines(chunks)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def read(path: str | os.PathLike[str], crc32c: str | None = None) -> Any:
    """Read the tree that `write` wrote. Tensors come back on the CPU.

    Args:
        path: the file.
        crc32c: refuse other bytes than those of this CRC-32C.

    Raises:
        CheckpointError: the file cannot be read or is not what `write` writes.
    """
    try:
        with open(path, "rb") as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            if file.readinto(data) != len(data):
                raise CheckpointError(f"{os.fspath(path)} shrank while it was read")
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    if crc32c is not None and (actual := crc32c_bytes(data)) != crc32c:
        raise CheckpointError(f"{os.fspath(path)} has CRC-32C {actual}, {crc32c} was committed: its bytes have changed")
    try:
        return loads(data)
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error


def loads(data: bytearray) -> Any:
    """Decode what `dump` gave, joined. Raises CheckpointError."""
    start = len(MAGIC) + _LENGTH.size
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise CheckpointError("this is no file of extras, or one of another version")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > len(data) - start:
        raise CheckpointError(f"the header should have {length} bytes, {len(data) - start} are there")
    try:
        header = json.loads(data[start : start + length])
        return _Decoder(memoryview(data)[start + length :]).decode(header["tree"])
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError, ImportError) as error:
        # Whatever a damaged header leads to, it is a damaged file.
        raise CheckpointError(f"the contents are damaged: {type(error).__name__}: {error}") from error


class _Decoder:
    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.builders: dict[str, Callable[..., Any]] = {
            "int": lambda text: int(text, 16),
            "float": lambda text: _DOUBLE.unpack(bytes.fromhex(text))[0],
            "list": self.items,
            "tuple": lambda values: tuple(self.items(values)),
            "dict": lambda pairs: dict(self.pairs(pairs)),
            "ordered": self.ordered,
            "counter": lambda pairs: collections.Counter(dict(self.pairs(pairs))),
            "deque": lambda values, maxlen: collections.deque(self.items(values), maxlen),
            "set": lambda values: set(self.items(values)),
            "frozenset": lambda values: frozenset(self.items(values)),
            "bytes": lambda offset, length: bytes(self.blob(offset, length)),
            "bytearray": lambda offset, length: bytearray(self.blob(offset, length)),
            "size": torch.Size,
            "dtype": named_dtype,
            "tensor": self.tensor,
            "array": self.array,
            "scalar": lambda *fields: self.array(*fields)[()],
        }

    def blob(self, offset: int, length: int) -> memoryview:
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= len(self.body):
            raise CheckpointError(f"bytes {offset} to {offset}+{length} of {len(self.body)} are missing")
        return self.body[offset : offset + length]

    def items(self, values: list[Any]) -> list[Any]:
        return [self.decode(value) for value in values]

    def pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in pairs]

    def decode(self, node: Any) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise CheckpointError("the header holds an object where a value should be")
            return node
        kind, *rest = node
        if not isinstance(kind, str) or kind not in self.builders:
            raise CheckpointError(f"a value of the unknown kind {kind!r}")
        return self.builders[kind](*rest)

    def ordered(self, pairs: list[Any], metadata: Any) -> Any:
        result = collections.OrderedDict(self.pairs(pairs))
        if (table := self.decode(metadata)) is not None:
            result._metadata = table  # type: ignore[attr-defined]
        return result

    def tensor(self, dtype: str, shape: list[int], offset: int, length: int) -> torch.Tensor:
        data = self.blob(offset, length)
        needed = math.prod(_shape(shape)) * named_dtype(dtype).itemsize
        if needed != length:
            raise CheckpointError(f"a tensor {dtype}{shape} has {length} bytes instead of {needed}")
        result = torch.empty(shape, dtype=named_dtype(dtype))
        if length:
            result.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return result

    def array(self, dtype: str, shape: list[int], offset: int, length: int) -> Any:
        import numpy  # noqa: ICN001  the name of the module that the script imports as well

        if not re.fullmatch(r"[<>|=]?[biufcSUMm]\d+(\[\w+\])?", dtype):
            raise CheckpointError(f"an array of the unknown type {dtype!r}")
        # A copy: the array must be writable and must not keep the whole file in memory.
        return (
            numpy.frombuffer(bytes(self.blob(offset, length)), dtype=numpy.dtype(dtype)).reshape(_shape(shape)).copy()
        )


def _shape(shape: list[int]) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(f"{shape!r} is no shape")
    return shape
