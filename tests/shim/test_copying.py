"""What is copied while training goes on is the state at the save, bit for bit, or the save fails and says why."""

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import begin_save, digest, load, make_saver
from torch import nn

from ckptd_shim import TrainerShim
from ckptd_shim.background import Gently
from ckptd_shim.copying import Copying
from ckptd_shim.slowdown import Slowdown
from ckptd_shim.state import TrainState


def make(width=300, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Linear(width, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, width=300):
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- the copy alone ---------------------------------------------------------------------------------------------------


def pairs(count=3, size=3_000_000):
    return {f"t{i}": (torch.zeros(size), torch.rand(size)) for i in range(count)}


def test_several_threads_copy_every_piece_once():
    for _ in range(5):
        given = pairs(4)
        wanted = {key: source.clone() for key, (_, source) in given.items()}
        copying = Copying(given)
        helpers = [threading.Thread(target=copying.work) for _ in range(3)]
        for helper in helpers:
            helper.start()
        copying.release()
        for key, (target, source) in given.items():
            assert torch.equal(target, wanted[key])
            source.zero_()  # as an optimizer does, from here on
        assert copying.result() is None
        for helper in helpers:
            helper.join()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[-1:].zero_(),
        lambda t: t.data.mul_(0.5),  # which torch does not count
        lambda t: t.detach().copy_(torch.rand(t.shape)),
    ],
)
def test_a_change_before_the_copy_is_found(change):
    given = pairs()
    copying = Copying(given)
    change(given["t1"][1])
    assert copying.result() == "t1"


def test_empty_and_tiny_tensors():
    given = {"a": (torch.ones(0), torch.ones(0)), "b": (torch.zeros(()), torch.tensor(3.0))}
    copying = Copying(given)
    assert copying.result() is None
    assert given["b"][0].item() == 3.0
    assert Copying({"a": (torch.ones(0), torch.ones(0))}).result() is None


# --- under a saver ----------------------------------------------------------------------------------------------------


def test_steps_that_race_the_copy_do_not_get_into_it(tmp_path):
    model, optimizer = make()
    train(model, optimizer)
    shim = TrainerShim(model=model, optimizer=optimizer, directory=tmp_path, interval={"steps": 1000})
    shim.resume()
    saved = {}
    for number in range(5):
        train(model, optimizer)
        shim.step()
        before = digest(model, optimizer)
        shim._save(shim.global_step)
        assert shim._saver._copying is not None  # nothing was waited for
        saved[shim.global_step] = before
        if number % 2:
            model(torch.randn(4, 300))  # a forward pass changes the running statistics
        train(model, optimizer)
        train(model, optimizer)
        shim.global_step += 1
        assert digest(model, optimizer) != before
    shim._saver.wait()
    other, second = make(seed=5)
    for step, wanted in saved.items():
        load(tmp_path / f"step_{step:09d}.a0001", TrainState(model=other, optimizer=second))
        assert digest(other, second) == wanted, step
    shim.close()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_change_behind_the_optimizers_back_fails_the_save_and_the_next_one_copies_at_once(tmp_path, hidden):
    model, optimizer = make(width=50)
    shim = TrainerShim(model=model, optimizer=optimizer, directory=tmp_path, interval={"steps": 1000})
    shim.resume()
    train(model, optimizer, 50)
    shim.step()
    saver = shim._saver
    saver.wait()
    held, submit = [], saver._submit
    saver._submit = held.append
    shim.global_step += 1
    shim._save(shim.global_step)
    with torch.no_grad():
        (model[2].weight.data if hidden else model[2].weight).add_(1.0)
    saver._submit = submit
    submit(held[0])
    saver.wait()
    assert not saver.outcome.committed
    assert "model.2.weight was changed outside of the optimizer's step" in saver.outcome.error
    shim.global_step += 1
    wanted = digest(model, optimizer)
    shim._save(shim.global_step)
    with torch.no_grad():
        model[2].weight.add_(1.0)
    saver.wait()
    assert saver.outcome.committed
    load(saver.outcome.path, TrainState(model=model, optimizer=optimizer))
    assert digest(model, optimizer) == wanted
    shim.close()


def test_without_an_optimizer_or_overlap_all_is_copied_in_the_call(tmp_path):
    model, optimizer = make(width=20)
    for number, options in enumerate(({"model": model}, {"model": model, "optimizer": optimizer, "overlap": False})):
        shim = TrainerShim(**options, directory=tmp_path / str(number), interval={"steps": 1000})
        shim.resume()
        shim.step()
        shim._save(1)
        assert shim._saver._copying is None
        shim.close()


def test_what_the_optimizer_waits_for_is_part_of_the_stall(tmp_path):
    model, optimizer = make(width=50)
    shim = TrainerShim(model=model, optimizer=optimizer, directory=tmp_path, interval={"steps": 1000})
    shim.resume()
    train(model, optimizer, 50)
    shim.step()
    saver = shim._saver
    saver.wait()
    held, submit = [], saver._submit
    saver._submit = held.append
    shim.global_step += 1
    shim._save(shim.global_step)
    copying = saver._copying
    piece = copying._pieces.pop()  # a thread has begun this one, and is slow
    waiting = threading.Thread(target=shim.before_optimizer_step)
    waiting.start()
    assert not copying._copied.wait(0.3)
    copying._copy(*piece, count=1)
    waiting.join()
    assert shim._waited_s >= 0.25
    assert copying.stalled_s >= 0.25
    saver._submit = submit
    submit(held[0])
    saver.wait()
    assert saver.outcome.committed
    shim.close()


def test_the_optimizers_no_longer_call_a_shim_that_is_closed(tmp_path):
    model, optimizer = make(width=20)
    shim = TrainerShim(model=model, optimizer=optimizer, directory=tmp_path, interval={"steps": 1000})
    shim.resume()
    assert optimizer._optimizer_step_pre_hooks
    shim.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_second_save_from_a_kept_plan_is_read_by_torch_alone(tmp_path):
    model, optimizer = make(width=60)
    state = TrainState(model=model, optimizer=optimizer)
    train(model, optimizer, 60)
    saver = make_saver(tmp_path)
    try:
        for step in (1, 2):
            begin_save(saver, state, step)
            saver.wait()
            assert saver.outcome.committed
            train(model, optimizer, 60)
            wanted = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
        assert saver._writer.layout is not None
        begin_save(saver, state, 3)
        saver.wait()
    finally:
        saver.close()
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(found, checkpoint_id=saver.outcome.path, no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


# --- what works beside training ---------------------------------------------------------------------------------------


def test_pieces_are_done_by_a_thread_that_gives_way_unless_somebody_waits():
    threads = torch.get_num_threads()
    gently = Gently(name="test")
    here = threading.get_native_id()

    def who():
        return threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    try:
        there, niceness = gently(who)
        assert there != here
        assert niceness > os.getpriority(os.PRIO_PROCESS, here)
        assert gently(torch.get_num_threads) == 1
        assert torch.get_num_threads() == threads
        with gently.hurry():
            assert gently(who)[0] == here
        with pytest.raises(ZeroDivisionError):
            gently(lambda: 1 // 0)
        assert gently(lambda: 7) == 7
    finally:
        gently.close()


def test_the_slowdown_is_what_steps_took_longer_during_the_upload():
    slowdown = Slowdown()
    now = 0.0

    def steps(count, seconds):
        nonlocal now
        for _ in range(count):
            slowdown.step(now, seconds)
            now += seconds

    steps(3, 1.0)
    slowdown.begin()
    steps(2, 1.5)
    assert slowdown.take() is None  # three steps tell too little
    steps(1, 1.0)
    slowdown.over(now)
    steps(20, 1.0)
    slowdown.begin()
    steps(4, 1.25)
    slowdown.over(now - 0.1)  # in the middle of the last of them
    steps(20, 1.0)
    assert slowdown.take() == pytest.approx(1.0)
    slowdown.begin()
    steps(4, 0.9)
    assert slowdown.take() == pytest.approx(-0.4)  # noise has both signs
    assert slowdown.take() is None  # once
