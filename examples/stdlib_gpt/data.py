"""What is it trained on? The source of Python's own standard library, split into training and validation by file."""

import hashlib
import pathlib
import sysconfig

import torch
from torch.utils.data import Dataset

NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
VALIDATION_SHARE = 0.05


class Windows(Dataset):
    """Consecutive pieces of a text: item i is (`length` bytes, the bytes that follow each of them), both int64."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        piece = self.text[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


def load(length: int) -> tuple[Windows, Windows]:
    """(training, validation) windows of `length` bytes: the same ones on every rank and in every attempt."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_OURS.isdisjoint(name.parts):
            # By a digest of its name: a file is on one side for good, whatever other files there are.
            draw = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") / 2**32
            parts[draw < VALIDATION_SHARE].append(path.read_bytes())
    training, validation = (Windows(b"\n".join(files), length) for files in parts)
    return training, validation
