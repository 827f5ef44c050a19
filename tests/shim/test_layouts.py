"""Every layout resumes bit for bit on as many ranks, and with equal tensors, schedule and samples on another number."""

import os

import pytest
from gloo_ranks import run_ranks
from layouts import GLOBAL_BATCH, Job

from ckptd_shim.digest import committed_paths, read_marker

STEPS = 4
TOTAL = 9  # an epoch has five steps: the second half crosses into the next one


def straight_and_resumed(rank, world, layout, scratch):
    """The uninterrupted run, and one that is stopped after STEPS and resumed twice; in one process group."""
    whole = Job(layout, None, workers=1)
    whole.shim.resume()
    whole.train(TOTAL)
    digest = whole.digest(scratch)
    losses, seen, lrs = [], [], []
    for until in (STEPS, STEPS + 1, TOTAL):  # the second stop is at the end of an epoch
        job = Job(layout, scratch, workers=1)
        job.shim.resume()
        job.train(until)
        job.shim.close()
        losses, seen, lrs = losses + job.losses, seen + job.seen, lrs + job.lrs
    return {
        "losses": [whole.losses, losses], "seen": [whole.seen, seen], "lrs": [whole.lrs, lrs],
        "digests": [digest, job.digest(scratch)], "incomparable": job.shim._incomparable,
    }  # fmt: skip


def first_half(rank, world, layout, scratch):
    job = Job(layout, scratch)
    job.shim.resume()
    job.train(STEPS)
    job.shim.close()
    return {"digest": job.digest(scratch), "seen": job.seen, "lrs": job.lrs}


def second_half(rank, world, layout, scratch):
    job = Job(layout, scratch)
    job.shim.resume()
    put_back = job.digest(scratch)
    draws = [float(x) for x in __import__("torch").rand(4)]
    job.train(TOTAL)
    job.shim.close()
    return {
        "digest": put_back, "seen": job.seen, "lrs": job.lrs, "draws": draws, "incomparable": job.shim._incomparable,
        "data_rank": job.sampler.rank,
    }  # fmt: skip


@pytest.mark.parametrize("layout, world", [("ddp", 2), ("fsdp", 2), ("tp", 2), ("2d", 4)])
def test_on_as_many_ranks_it_is_the_uninterrupted_run_bit_for_bit(tmp_path, layout, world):
    for found in run_ranks(world, __file__, "straight_and_resumed", layout=layout, scratch=str(tmp_path)):
        for name in ("losses", "seen", "lrs", "digests"):
            whole, resumed = found[name]
            assert whole == resumed, name
        assert len(found["losses"][0]) == TOTAL
        assert found["incomparable"] is None
    assert all(read_marker(path).comparable for path in committed_paths(tmp_path))


@pytest.mark.parametrize(
    "before, after, reason",
    [
        (("ddp", 3), ("ddp", 2), "world size changed from 3 to 2 at step 4"),
        (("fsdp", 4), ("fsdp", 3), "world size changed from 4 to 3 at step 4"),
        (("fsdp", 2), ("fsdp", 4), "world size changed from 2 to 4 at step 4"),
        (("2d", 4), ("tp", 2), "world size changed from 4 to 2 at step 4"),
        (("2d", 4), ("fsdp", 4), "the layout changed at step 4"),
        (("tp", 2), ("ddp", 1), "world size changed from 2 to 1 at step 4"),
    ],
)
def test_on_another_number_of_ranks_everything_but_random_numbers_is_the_same(tmp_path, before, after, reason):
    first = run_ranks(before[1], __file__, "first_half", layout=before[0], scratch=str(tmp_path))
    second = run_ranks(
        after[1], __file__, "second_half", layout=after[0], scratch=str(tmp_path), group=True
    )  # fmt: skip
    assert {str(each["digest"]) for each in first + second} == {str(first[0]["digest"])}  # weights, moments, counters
    lrs = first[0]["lrs"] + second[0]["lrs"]
    assert lrs == pytest.approx([1e-2 * 0.95 ** (k + 1) for k in range(TOTAL)])
    # Each global batch is whole, whoever takes which part of it: an epoch has every sample once.
    taken = [step_of(first, k) for k in range(STEPS)] + [step_of(second, k) for k in range(TOTAL - STEPS)]
    assert all(len(batch) == GLOBAL_BATCH for batch in taken)
    assert sorted([sample for batch in taken[:5] for sample in batch]) == list(range(60))
    assert all(each["incomparable"].startswith(reason) for each in second)
    marker = read_marker(max(committed_paths(tmp_path), key=os.path.basename))
    assert (marker.step, marker.comparable) == (TOTAL, False)
    assert marker.comparable_reason.startswith(reason)
    if before[1] != after[1] and after[1] > 1:
        assert len({str(each["draws"]) for each in second}) == after[1]  # reseeded for each rank


def step_of(results, k):
    """The samples of one step, over the ranks that share the data out (others hold the same)."""
    shares = {}
    for rank, each in enumerate(results):
        share = len(each["seen"]) // (STEPS if "draws" not in each else TOTAL - STEPS)
        shares.setdefault(tuple(each["seen"][k * share : (k + 1) * share]), rank)
    return [sample for share in shares for sample in share]


def accumulate(rank, world, micro):
    job = Job("ddp", None, dropout=0.0, micro=micro)
    job.shim.resume()
    job.train(6)
    weights = [p.detach().flatten().tolist() for p in job.model.parameters()]
    return {
        "k": job.shim.accumulation_steps,
        "losses": job.losses,
        "weights": [value for part in weights for value in part],
    }


def test_the_update_is_the_same_on_one_to_four_workers(tmp_path):
    results = {
        (world, micro): run_ranks(world, __file__, "accumulate", micro=micro)[0]
        for world, micro in ((1, 12), (1, 3), (2, 3), (3, 4), (3, 2), (4, 2))
    }
    assert {key: each["k"] for key, each in results.items()} == {
        (1, 12): 1, (1, 3): 4, (2, 3): 2, (3, 4): 1, (3, 2): 2, (4, 2): 3,
    }  # fmt: skip
    reference = results.pop((1, 12))
    for key, each in results.items():
        assert each["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-6), key
        losses = [float.fromhex(loss) for loss in each["losses"]]
        assert losses == pytest.approx([float.fromhex(loss) for loss in reference["losses"]], rel=1e-5), key
