"""How do the ranks tell each other small things, from whichever thread?"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of the job, or the only one where torch.distributed is not initialised.

    Args:
        group: a gloo group of all ranks that nobody else uses; None in a world of one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in the order of ranks: a collective. The objects travel as JSON.

        Raises:
            RuntimeError: a rank is gone, or has not come within the group's timeout.
        """
        if self.group is None:
            return [mine]
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=self.group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank: a collective.

        Raises:
            RuntimeError: a rank is gone, or has not come within the group's timeout.
        """
        if self.group is None:
            return data or b""
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0, group=self.group)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0 and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=self.group)
        return buffer.numpy().tobytes() if buffer.numel() else b""
