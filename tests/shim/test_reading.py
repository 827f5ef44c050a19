"""Tensors of every kind come back bit for bit, straight into place where that is possible, and by torch where not."""

import pytest
import torch
from saving import digest, load, save
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckptd_shim.reading import Reader
from ckptd_shim.state import TrainState

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
]


class Zoo(nn.Module):
    """Buffers of every dtype and shape; one is not contiguous, one is empty, one has no dimension."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, dtype in enumerate(DTYPES):
            values = torch.randint(0, 2, (5, 3), generator=generator)
            self.register_buffer(f"b{i}", values.to(dtype))
        self.register_buffer("scalar", torch.rand((), generator=generator))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("transposed", torch.rand(4, 6, generator=generator).t())
        self.register_buffer("large", torch.rand(300, 1000, generator=generator))


@pytest.fixture
def left_to_torch(monkeypatch):
    """What torch's own reader was asked for; it still reads."""
    asked = []
    original = FileSystemReader.read_data

    def noting(self, plan, planner):
        asked.extend(item.dest_index.fqn for item in plan.items)
        return original(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", noting)
    return asked


def test_every_dtype_and_shape(tmp_path, left_to_torch):
    saved, other = Zoo(1), Zoo(2)
    assert digest(saved) != digest(other)
    path = save(tmp_path, TrainState(model=saved))
    load(path, TrainState(model=other))
    assert digest(other) == digest(saved)
    assert other.transposed.stride() == Zoo(3).transposed.stride()
    assert set(left_to_torch) <= {"model.empty", "model.transposed"}


def test_an_archive_of_another_kind_is_left_to_torch(tmp_path, left_to_torch, monkeypatch):
    saved, other = Zoo(1), Zoo(2)
    path = save(tmp_path, TrainState(model=saved))
    monkeypatch.setattr("ckptd_shim.reading._RECORD", "/elsewhere")
    load(path, TrainState(model=other))
    assert digest(other) == digest(saved)
    assert "model.large" in left_to_torch


def test_a_file_that_ends_too_soon_is_an_error(tmp_path):
    with open(tmp_path / "short", "wb") as file:
        file.write(b"x" * 10)
    from ckptd_shim.reading import _read_into

    with open(tmp_path / "short", "rb", buffering=0) as file, pytest.raises(EOFError, match="before its tensor"):
        _read_into(file, 4, memoryview(bytearray(7)))
    assert issubclass(Reader, FileSystemReader)
