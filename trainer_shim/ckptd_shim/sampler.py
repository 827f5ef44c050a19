"""Which samples does each rank train on at each step, whatever the number of ranks?

An epoch's order is a function of the seed and the epoch alone. It is never laid out in memory: a keyed permutation says
which sample stands at a position, so an epoch can be entered anywhere at no cost. Step s of an epoch takes the
positions [s*G, (s+1)*G), G being the global batch; rank r of W takes the r-th W-th part of them, in order.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ckptd_shim import contract
from ckptd_shim.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_M32: Final = 0xFFFFFFFF
_ROUNDS: Final = 8
_LEAST_BITS: Final = 6
_FEW: Final = 32
"""Up to so many indices plain integers are faster than tensors."""

_Ints = TypeVar("_Ints", int, torch.Tensor)


def accumulation_steps(global_batch: int, world_size: int, micro_batch: int | None) -> int:
    """In how many micro-batches a rank takes its share of a global batch.

    The smallest k that divides the share `global_batch / world_size` and makes it `micro_batch` samples a piece or
    fewer; with a micro-batch of None, 1.

    Raises:
        SetupError: `world_size` does not divide `global_batch`, or a number is below 1.
    """
    if global_batch < 1 or world_size < 1 or (micro_batch is not None and micro_batch < 1):
        raise SetupError(
            f"global batch {global_batch}, world size {world_size} and micro-batch {micro_batch} must each be 1 or more"
        )
    share, rest = divmod(global_batch, world_size)
    if rest:
        raise SetupError(f"a world of {world_size} ranks does not divide the global batch of {global_batch} samples")
    if micro_batch is None:
        return 1
    return next(k for k in range(-(-share // micro_batch), share + 1) if share % k == 0)


def _mix(x: _Ints) -> _Ints:
    """Scatter 32 bits: https://github.com/skeeto/hash-prospector, whose multipliers keep products below 2^63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _M32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _M32
    return x ^ (x >> 15)


def _keys(purpose: str, seed: int, epoch: int, count: int) -> list[int]:
    """`count` keys of 32 bits that depend on nothing else, on every machine and with every version."""
    text = f"ckptd {purpose} {seed} {epoch}".encode()
    digest = hashlib.shake_128(text).digest(4 * count)
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 4 * count, 4)]


class Permutation:
    """A keyed permutation of range(size), evaluated index by index in constant memory.

    An unbalanced Feistel network over the next power of two (64 at least: smaller networks shuffle badly), walked
    on until it lands inside the range: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """

    def __init__(self, size: int, keys: Sequence[int]) -> None:
        bits = max((size - 1).bit_length(), _LEAST_BITS)
        self._size = size
        self._keys = keys
        self._low_bits = bits // 2
        self._low = (1 << self._low_bits) - 1
        self._high = (1 << (bits - self._low_bits)) - 1

    def _once(self, x: _Ints) -> _Ints:
        low, high = x & self._low, x >> self._low_bits
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = high ^ (_mix(low ^ even) & self._high)
            low = low ^ (_mix(high ^ odd) & self._low)
        return (high << self._low_bits) | low

    def _walk(self, x: int) -> int:
        x = self._once(x)
        while x >= self._size:
            x = self._once(x)
        return x

    def __call__(self, positions: Sequence[int]) -> list[int]:
        """The sample at each position; positions lie in range(size)."""
        if len(positions) <= _FEW:
            return [self._walk(p) for p in positions]
        x = self._once(torch.tensor(positions, dtype=torch.int64))
        outside = (x >= self._size).nonzero().squeeze(1)
        while len(outside) > _FEW:
            x[outside] = self._once(x[outside])
            outside = outside[x[outside] >= self._size]
        result: list[int] = x.tolist()
        for i in outside.tolist():
            result[i] = self._walk(result[i])
        return result


class GlobalSampler(Sampler[list[int]]):
    """A batch sampler that is the same on any number of ranks: each item is this rank's share of one optimizer step.

    Iterating begins at the position and ends with the epoch; the next `iter` goes on with the next epoch. The position
    moves as batches are handed out, and a DataLoader with workers takes them ahead of training: what training has done
    is known to the shim's counters, and `set_position` puts the sampler there on resume.

    Args:
        dataset_size: number of samples.
        global_batch: samples of one optimizer step over all ranks.
        seed: of the order; the same on every rank and in every attempt.
        micro_batch: the most samples that fit a device at once; default: job.yaml's, else the whole share.
        rank: this rank among those that share the batch out; default: of torch.distributed, else of the environment.
        world_size: the number of those ranks; likewise. Give both where not every rank has data of its own.
        shuffle: False: the dataset's own order, in every epoch.
        drop_last: True: an epoch leaves its last `dataset_size % global_batch` samples out (others in each epoch). False:
            its last batch is filled up from the start of the same epoch's order.
        weights: draw with replacement, in proportion to these `dataset_size` numbers; an epoch is as long as without.

    Raises:
        SetupError: numbers that do not fit each other, or a global batch that is not job.yaml's.
    """

    def __init__(
        self,
        dataset_size: int,
        global_batch: int,
        seed: int,
        *,
        micro_batch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        weights: Sequence[float] | torch.Tensor | None = None,
    ) -> None:
        launch = _launch_context()
        if launch is not None and launch.global_batch not in (None, global_batch):
            raise SetupError(
                f"GlobalSampler has global_batch={global_batch}, but batch.global in job.yaml is {launch.global_batch}: "
                "make them equal"
            )
        if micro_batch is None and launch is not None:
            micro_batch = launch.micro_batch
        self.rank, self.world_size = _rank_and_world(rank, world_size)
        self.accumulation_steps = accumulation_steps(global_batch, self.world_size, micro_batch)
        if dataset_size < 1:
            raise SetupError(f"a dataset of {dataset_size} samples has nothing to train on")
        if drop_last and dataset_size < global_batch:
            raise SetupError(
                f"the dataset has {dataset_size} samples, fewer than one global batch of {global_batch}: with "
                "drop_last=True an epoch would have no step at all"
            )
        self.dataset_size = dataset_size
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._share = global_batch // self.world_size
        self._position = 0
        self._cumulative = None if weights is None else _cumulative(weights, dataset_size)
        self._order: tuple[int, Permutation] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.dataset_size // self.global_batch if self.drop_last else -(-self.dataset_size // self.global_batch)

    @property
    def samples_per_epoch(self) -> int:
        """Samples trained on in an epoch over all ranks: a multiple of the global batch."""
        return self.steps_per_epoch * self.global_batch

    def __len__(self) -> int:
        """Optimizer steps in an epoch: what a progress bar and a scheduler want to know, wherever the position is."""
        return self.steps_per_epoch

    @property
    def position(self) -> int:
        """Global samples handed out since the start of training, over all ranks and epochs."""
        return self._position

    def set_position(self, samples: int) -> None:
        """Go on after `samples` global samples trained on since the start of training.

        Raises:
            SetupError: negative, or not a whole number of global batches.
        """
        if samples < 0 or samples % self.global_batch:
            raise SetupError(
                f"{samples} samples are no whole number of global batches of {self.global_batch}: was the global batch "
                "another one before?"
            )
        self._position = samples

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.epoch_of(self._position)

    def epoch_of(self, samples: int) -> int:
        """The epoch that training is in after `samples` global samples; at the end of one it is the next."""
        return samples // self.samples_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """From the position to the end of its epoch: lists of `global_batch / world_size` indices."""
        epoch = self.epoch
        while self.epoch == epoch:
            position = self._position
            self._position = position + self.global_batch
            yield self.indices(position)

    def indices(self, samples: int) -> list[int]:
        """This rank's share of the global batch that begins after `samples` global samples; moves nothing."""
        epoch, offset = divmod(samples, self.samples_per_epoch)
        first = offset + self.rank * self._share
        positions = range(first, first + self._share)
        if self._cumulative is not None:
            return self._drawn(self._cumulative, epoch, positions)
        inside = [p % self.dataset_size for p in positions]
        if not self.shuffle:
            return inside
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Permutation(self.dataset_size, _keys("order", self.seed, epoch, _ROUNDS)))
        return self._order[1](inside)

    def _drawn(self, cumulative: torch.Tensor, epoch: int, positions: range) -> list[int]:
        """Inverse of the cumulative distribution at a number in [0, 1) that the position fixes, 53 bits of it."""
        key, *salt = _keys("draw", self.seed, epoch, 3)
        x = torch.arange(positions.start, positions.stop, dtype=torch.int64)
        x = _mix((x & _M32) ^ key) ^ _mix(x >> 32)
        high, low = _mix(x ^ salt[0]) >> 5, _mix(_mix(x ^ salt[1]) ^ key) >> 6
        uniform = (high * 2**26 + low).to(torch.float64) / 2**53
        # right=True steps over samples of weight zero; rounding must not step over the last one.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        last = int(torch.searchsorted(cumulative, cumulative[-1]))
        result: list[int] = drawn.clamp(max=last).tolist()
        return result


def _cumulative(weights: Sequence[float] | torch.Tensor, size: int) -> torch.Tensor:
    values = torch.as_tensor(weights, dtype=torch.float64).reshape(-1)
    if len(values) != size:
        raise SetupError(f"there are {len(values)} weights for {size} samples")
    sums = torch.cumsum(values, 0)
    if bool((values < 0).any()) or not bool(torch.isfinite(sums[-1])) or not bool(sums[-1] > 0):
        raise SetupError("weights must be finite, none below zero, and not all of them zero")
    return sums


def _launch_context() -> contract.LaunchContext | None:
    path = os.environ.get(contract.ENV_LAUNCH)
    return contract.LaunchContext.read(path) if path else None


def _rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Arguments, else torch.distributed, else the launcher's environment, else a world of one."""
    if (rank is None) != (world_size is None):
        raise SetupError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            # A sampler made before init_process_group must not take the whole batch on every rank.
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise SetupError(f"rank {rank} is not in a world of {world_size}")
    return rank, world_size
