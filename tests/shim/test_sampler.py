"""The same samples at the same steps on any number of ranks, each of them once an epoch."""

import collections
import itertools
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ckptd_shim import contract
from ckptd_shim.sampler import _ROUNDS, GlobalSampler, Permutation, _keys, accumulation_steps


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in (contract.ENV_LAUNCH, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def world(size, *args, **options):
    return [GlobalSampler(*args, rank=rank, world_size=size, **options) for rank in range(size)]


def global_steps(samplers, steps=None):
    """The global batches, put together out of the ranks' shares, from where the samplers stand to the epoch's end."""
    for shares in itertools.islice(zip(*samplers, strict=True), steps):
        yield [i for share in shares for i in share]


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@given(size=st.integers(1, 5000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_a_permutation_is_one(size, seed, epoch):
    permutation = Permutation(size, _keys("order", seed, epoch, _ROUNDS))
    order = permutation(range(size))
    assert sorted(order) == list(range(size))
    some = range(0, size, max(1, size // 20))
    assert [permutation([p])[0] for p in some] == [order[p] for p in some]  # plain integers and tensors agree


@given(size=st.integers(2**31, 2**60), at=st.lists(st.integers(0, 2**31 - 1), min_size=40, max_size=60, unique=True))
def test_a_huge_permutation_stays_inside_and_apart(size, at):
    permutation = Permutation(size, _keys("order", 1, 2, _ROUNDS))
    drawn = permutation(at)
    assert len(set(drawn)) == len(at)
    assert all(0 <= i < size for i in drawn)
    assert drawn == [permutation([p])[0] for p in at]


def chi_square(counts, cells):
    expected = sum(counts.values()) / cells
    return sum((n - expected) ** 2 / expected for n in counts.values()) + (cells - len(counts)) * expected


@pytest.mark.parametrize("size", [2, 3, 5, 16, 63, 64, 65])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_sample_comes_first_equally_often(size, vary):
    keys = (_keys("order", *((i, 0) if vary == "seed" else (0, i)), _ROUNDS) for i in range(200 * size))
    counts = collections.Counter(Permutation(size, k)([0])[0] for k in keys)
    cells = size - 1
    assert chi_square(counts, size) < cells + 5 * (2 * cells) ** 0.5 + 10


def test_all_orders_of_four_are_equally_likely():
    counts = collections.Counter(
        tuple(Permutation(4, _keys("order", seed, 0, _ROUNDS))(range(4))) for seed in range(9600)
    )
    assert chi_square(counts, 24) < 60  # 23 degrees of freedom: one in 30,000


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_an_order_follows_neither_itself_nor_the_next_epoch(size):
    at = [GlobalSampler(size, size, 7, rank=0, world_size=1).indices(epoch * size) for epoch in range(50)]
    assert len({tuple(order) for order in at}) == 50
    fixed = sum(a == b for one, two in itertools.pairwise(at) for a, b in zip(one, two, strict=True))
    steps = sum(b - a == 1 for order in at for a, b in itertools.pairwise(order))
    for count in (fixed, steps):  # about one each an epoch in random orders
        assert count < 49 + 6 * 7


@settings(deadline=None)
@given(data=st.data())
def test_every_sample_once_an_epoch_over_any_worlds_and_stops(data):
    batch = data.draw(st.integers(1, 24), label="global batch")
    steps = data.draw(st.integers(1, 12), label="steps per epoch")
    size = steps * batch + data.draw(st.integers(0, batch - 1), label="tail")
    seed = data.draw(st.integers(0, 2**64), label="seed")
    whole = GlobalSampler(size, batch, seed, rank=0, world_size=1)
    reference = [list(whole) for _ in range(3)]
    samples, seen = 0, []
    while samples < 3 * whole.samples_per_epoch:
        samplers = world(data.draw(st.sampled_from(divisors(batch)), label="world"), size, batch, seed)
        for sampler in samplers:
            sampler.set_position(samples)
        for content in global_steps(samplers, data.draw(st.integers(1, 2 * steps), label="stop after")):
            seen.append(content)
            samples += batch
        assert {s.epoch for s in samplers} == {whole.epoch_of(samples)}
    seen = seen[: 3 * steps]
    assert seen == [batch for epoch in reference for batch in epoch]
    for epoch in range(3):
        indices = [i for content in seen[epoch * steps : (epoch + 1) * steps] for i in content]
        assert len(set(indices)) == len(indices) == steps * batch
        assert set(indices) <= set(range(size))
        if size == steps * batch:
            assert set(indices) == set(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 60), batch=st.sampled_from([1, 4, 6, 12, 100]), ranks=st.integers(1, 4))
def test_a_kept_tail_wraps_to_the_start_of_the_same_epoch(size, batch, ranks):
    ranks = ranks if batch % ranks == 0 else 1
    samplers = world(ranks, size, batch, 5, drop_last=False)
    order = Permutation(size, _keys("order", 5, 0, _ROUNDS))(range(size))
    content = [i for step in global_steps(samplers) for i in step]
    steps = -(-size // batch)
    assert content == [order[p % size] for p in range(steps * batch)]
    assert (len(samplers[0]), samplers[0].samples_per_epoch) == (steps, steps * batch)
    assert samplers[0].epoch == 1


def test_a_dropped_tail_is_another_in_each_epoch():
    sampler = GlobalSampler(10, 4, 1, rank=0, world_size=1)
    assert (len(sampler), sampler.steps_per_epoch, sampler.samples_per_epoch) == (2, 2, 8)
    left_out = [frozenset(range(10)) - {i for batch in sampler for i in batch} for _ in range(30)]
    assert {len(rest) for rest in left_out} == {2}
    assert set().union(*left_out) == set(range(10))


def test_without_shuffling_the_order_is_the_datasets():
    sampler = GlobalSampler(7, 2, 1, rank=0, world_size=1, shuffle=False, drop_last=False)
    assert list(sampler) == list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 0]]


def test_iterating_goes_on_from_epoch_to_epoch_and_from_where_it_was():
    sampler = GlobalSampler(12, 4, 3, rank=0, world_size=1)
    assert (sampler.position, sampler.epoch, len(sampler)) == (0, 0, 3)
    first = next(iter(sampler))
    assert sampler.position == 4
    rest = list(sampler)
    assert (len(rest), sampler.position, sampler.epoch) == (2, 12, 1)
    assert sorted(itertools.chain(first, *rest)) == list(range(12))
    second = list(sampler)
    assert (len(second), sampler.epoch) == (3, 2)
    assert sorted(itertools.chain(*second)) == list(range(12))
    sampler.set_position(8)
    assert list(sampler) == rest[1:]
    assert [sampler.epoch_of(n) for n in (0, 4, 8, 12, 23, 24)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("samples", [-4, 3, 5])
def test_a_position_inside_a_batch_is_refused(samples):
    sampler = GlobalSampler(12, 4, 3, rank=0, world_size=1)
    with pytest.raises(ValueError, match="whole number of global batches of 4"):
        sampler.set_position(samples)
    assert sampler.position == 0


def test_entering_an_epoch_anywhere_costs_nothing():
    sampler = GlobalSampler(10_000_000, 64, 9, rank=3, world_size=8)
    sampler.set_position(64)
    next(iter(sampler))
    best = 1.0
    for _ in range(10):
        begun = time.perf_counter()
        fresh = GlobalSampler(10_000_000, 64, 9, rank=3, world_size=8)
        fresh.set_position(9_000_000)
        next(iter(fresh))
        best = min(best, time.perf_counter() - begun)
    assert best < 1e-3


def test_the_order_is_pinned():
    """A change here breaks every run in flight: its epochs would go on in another order."""
    assert GlobalSampler(1000, 8, 1234, rank=0, world_size=1).indices(8) == PINNED
    assert GlobalSampler(1000, 4, -5, rank=0, world_size=1, weights=range(1000)).indices(4000) == PINNED_DRAWN


PINNED = [345, 435, 502, 497, 689, 479, 407, 762]
PINNED_DRAWN = [517, 984, 777, 975]


def test_the_same_in_another_process():
    code = (
        "from ckptd_shim.sampler import GlobalSampler as G; print(G(5000, 50, 3, rank=0, world_size=1).indices(2500))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=env
    )
    assert done.stdout == f"{GlobalSampler(5000, 50, 3, rank=0, world_size=1).indices(2500)}\n"


@given(batch=st.integers(1, 300), ranks=st.integers(1, 16), micro=st.integers(1, 40))
def test_accumulation_is_the_smallest_that_fits(batch, ranks, micro):
    if batch % ranks:
        with pytest.raises(ValueError, match="does not divide"):
            accumulation_steps(batch, ranks, micro)
        return
    share = batch // ranks
    fits = [k for k in range(1, share + 1) if share % k == 0 and share // k <= micro]
    assert accumulation_steps(batch, ranks, micro) == fits[0]


@pytest.mark.parametrize("numbers", [(0, 1, 1), (4, 0, 1), (4, 1, 0), (-4, 1, 1)])
def test_accumulation_of_nothing_is_refused(numbers):
    with pytest.raises(ValueError, match="1 or more"):
        accumulation_steps(*numbers)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="fewer than one global batch of 8"):
        GlobalSampler(7, 8, 1, rank=0, world_size=1)
    assert len(GlobalSampler(7, 8, 1, rank=0, world_size=1, drop_last=False)) == 1
    with pytest.raises(ValueError, match="nothing to train on"):
        GlobalSampler(0, 8, 1, rank=0, world_size=1, drop_last=False)
    with pytest.raises(ValueError, match="world of 3 ranks does not divide"):
        GlobalSampler(100, 8, 1, rank=0, world_size=3)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        GlobalSampler(100, 8, 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="both rank and world_size"):
        GlobalSampler(100, 8, 1, rank=1)


@pytest.mark.parametrize(
    "weights", [[1.0] * 99, [0.0] * 100, [1.0] * 99 + [-1.0], [float("nan")] * 100, [float("inf")] * 100]
)
def test_wrong_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        GlobalSampler(100, 8, 1, rank=0, world_size=1, weights=weights)


def test_weighted_draws_follow_the_weights_on_any_number_of_ranks():
    weights = [0.0, 1.0, 2.0, 0.0, 5.0, 0.0] + [0.0] * 394
    whole = list(GlobalSampler(400, 40, 11, rank=0, world_size=1, weights=weights))
    assert list(global_steps(world(4, 400, 40, 11, weights=torch.tensor(weights)))) == whole
    sampler = GlobalSampler(400, 40, 11, rank=0, world_size=1, weights=weights)
    epochs = [list(sampler) for _ in range(20)]
    assert epochs[0] == whole
    assert epochs[1] != whole
    counts = collections.Counter(i for epoch in epochs for batch in epoch for i in batch)
    assert set(counts) == {1, 2, 4}
    expected = {1: 1000, 2: 2000, 4: 5000}
    assert sum((counts[i] - n) ** 2 / n for i, n in expected.items()) < 20


def test_weighted_draws_are_uniform_over_positions():
    drawn = GlobalSampler(256, 256 * 40, 2, rank=0, world_size=1, weights=[0.5] * 256, drop_last=False).indices(0)
    assert chi_square(collections.Counter(drawn), 256) < 255 + 5 * 510**0.5
    pairs = collections.Counter((a // 16, b // 16) for a, b in itertools.pairwise(drawn))
    assert chi_square(pairs, 256) < 255 + 5 * 510**0.5


def context(tmp_path, **changes):
    document = contract.LaunchContext(
        run_id="r",
        run_name="r",
        attempt=1,
        attempt_dir=str(tmp_path),
        control_path="",
        tier="disk",
        save_dir=str(tmp_path),
        resume=None,
        world_at_start=None,
        interval_s=None,
        interval_steps=None,
        commit_sequence=0,
        **{"global_batch": None, "micro_batch": None, **changes},
    )
    document.write(tmp_path / "launch.json")
    return str(tmp_path / "launch.json")


def test_the_batch_of_the_job_spec(tmp_path, monkeypatch):
    monkeypatch.setenv(contract.ENV_LAUNCH, context(tmp_path, global_batch=64, micro_batch=8))
    sampler = GlobalSampler(1000, 64, 1, rank=1, world_size=2)
    assert sampler.accumulation_steps == 4
    assert GlobalSampler(1000, 64, 1, rank=1, world_size=2, micro_batch=32).accumulation_steps == 1
    with pytest.raises(ValueError, match=r"global_batch=32, but batch\.global in job\.yaml is 64"):
        GlobalSampler(1000, 32, 1, rank=1, world_size=2)
    monkeypatch.setenv(contract.ENV_LAUNCH, context(tmp_path))
    assert GlobalSampler(1000, 32, 1, rank=1, world_size=2).accumulation_steps == 1


def test_rank_and_world_come_from_the_process_group_or_the_environment(monkeypatch):
    assert (GlobalSampler(100, 8, 1).rank, GlobalSampler(100, 8, 1).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    early = GlobalSampler(100, 8, 1)
    assert (early.rank, early.world_size) == (2, 4)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert (GlobalSampler(100, 8, 1).rank, GlobalSampler(100, 8, 1).world_size) == (0, 1)
        told = GlobalSampler(100, 8, 1, rank=1, world_size=2)
        assert (told.rank, told.world_size) == (1, 2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_one_item_an_optimizer_step(workers):
    data = torch.arange(20) * 10
    sampler = GlobalSampler(20, 4, 3, rank=1, world_size=2)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    assert len(loader) == 5
    expected = GlobalSampler(20, 4, 3, rank=1, world_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[i * 10 for i in share] for share in expected]
    sampler.set_position(8)
    expected.set_position(8)
    assert [batch.tolist() for batch in loader] == [[i * 10 for i in share] for share in expected]


def test_a_sampler_can_be_pickled():
    sampler = GlobalSampler(20, 4, 3, rank=1, world_size=2)
    next(iter(sampler))
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.position == 4
    assert list(copy) == list(sampler)
