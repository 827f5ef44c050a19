"""What is captured comes back bit for bit, for the optimizers and wrappers that people use; what does not fit is refused."""
# ruff: noqa: NPY002  scripts draw from NumPy's global generator

import copy
import functools
import random

import numpy as np
import pytest
import torch
from saving import digest, load, save
from torch import nn

from ckptd_shim.errors import CheckpointMismatch
from ckptd_shim.randomness import derive_seed
from ckptd_shim.state import TrainState, canonical_name


def make_model(seed=0, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))


def train(model, optimizer, steps, seed=7, scheduler=None):
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):

        def closure(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        x = torch.randn(6, 4, generator=data)
        optimizer.step(functools.partial(closure, x))
        if scheduler is not None:
            scheduler.step()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw amsgrad foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_comes_back_and_goes_on_as_if_nothing_had_happened(tmp_path, name, steps):
    model, other = make_model(), make_model(seed=1)
    optimizer, second = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    train(model, optimizer, steps)
    before = digest(model, optimizer)
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    assert digest(model, optimizer) == before  # saving changes nothing
    train(model, optimizer, 2, seed=9)

    load(path, TrainState(model=other, optimizer=second))
    assert digest(other, second) == before
    train(other, second, 2, seed=9)  # dropout included: the random generators are back, too
    assert digest(other, second) == digest(model, optimizer)


def test_an_optimizer_that_never_stepped_stays_without_state(tmp_path):
    model = make_model()
    path = save(tmp_path, TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters())))
    optimizer = torch.optim.AdamW(model.parameters())
    load(path, TrainState(model=model, optimizer=optimizer))
    assert not optimizer.state


def test_groups_keep_their_own_hyper_parameters_and_frozen_parameters_their_state(tmp_path):
    def make():
        model = make_model()
        groups = [
            {"params": model[0].parameters(), "lr": 1e-2},
            {"params": model[3].parameters(), "lr": 3e-4, "betas": (0.5, 0.7)},
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make()
    state = TrainState(model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    model[0].weight.requires_grad_(False)
    optimizer.param_groups[1]["lr"] = 5e-5
    path = save(tmp_path, state)
    other, second = make()
    other[0].weight.requires_grad_(False)
    load(path, TrainState(model=other, optimizer=second))
    assert [(g["lr"], g["betas"]) for g in second.param_groups] == [(1e-2, (0.9, 0.999)), (5e-5, (0.5, 0.7))]
    assert torch.equal(second.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_state_of_another_dtype_than_its_parameter_is_not_cast(tmp_path):
    class Wide(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("sum", torch.zeros(p.shape, dtype=torch.float32)).add_(1 / 3)

    model = nn.Linear(3, 3).bfloat16()
    optimizer = Wide(model.parameters(), lr=0.1)
    optimizer.step()
    path = save(tmp_path, TrainState(model=model, optimizer=optimizer))
    second = Wide(model.parameters(), lr=0.1)
    load(path, TrainState(model=model, optimizer=second))
    assert second.state[model.weight]["sum"].dtype == torch.float32
    assert torch.equal(second.state[model.weight]["sum"], optimizer.state[model.weight]["sum"])


def test_schedulers_scaler_and_extra_come_back(tmp_path):
    class Counter:
        def __init__(self):
            self.n, self.average = 0, torch.zeros(3)

        def state_dict(self):
            return {"n": self.n, "average": self.average}

        def load_state_dict(self, state):
            self.n, self.average = state["n"], state["average"]

    def make():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            ],
            milestones=[3],
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "extra": {"c": Counter()},
        }

    first = make()
    state = TrainState(**first)
    train(first["model"], first["optimizer"], 4, scheduler=first["scheduler"])
    first["scaler"].load_state_dict(first["scaler"].state_dict() | {"scale": 1024.0, "_growth_tracker": 3})
    first["extra"]["c"].load_state_dict({"n": 5, "average": torch.randn(3)})
    path = save(tmp_path, state)
    second = make()
    load(path, TrainState(**second))
    assert second["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()
    assert second["optimizer"].param_groups[0]["lr"] == first["optimizer"].param_groups[0]["lr"]
    assert second["scaler"].state_dict() == first["scaler"].state_dict()
    assert second["extra"]["c"].n == 5
    assert torch.equal(second["extra"]["c"].average, first["extra"]["c"].average)
    for _ in range(4):
        first["scheduler"].step()
        second["scheduler"].step()
        assert second["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()


def test_what_is_staged_does_not_follow_what_training_does_next(tmp_path):
    model = make_model()
    ema = {"w": torch.ones(3), "array": np.ones(2), "list": [1]}

    class Ema:
        def state_dict(self):
            return ema

        def load_state_dict(self, state):
            ema.update(state)

    from saving import begin_save, make_saver

    saver = make_saver(tmp_path)
    try:
        before = digest(model)
        begin_save(saver, TrainState(model=model, extra={"ema": Ema()}), 1)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        ema["w"].zero_()
        ema["array"][:] = 0
        ema["list"].append(2)
        saver.wait()
        load(saver.outcome.path, TrainState(model=model, extra={"ema": Ema()}))
    finally:
        saver.close()
    assert digest(model) == before
    assert torch.equal(ema["w"], torch.ones(3))
    assert ema["array"].tolist() == [1, 1]
    assert ema["list"] == [1]


def test_random_generators_are_put_back_last(tmp_path):
    class Greedy:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            torch.rand(3), random.random(), np.random.rand()

    path = save(tmp_path, TrainState(model=make_model(), extra={"greedy": Greedy()}))
    torch.manual_seed(5)
    state = TrainState(model=nn.Linear(1, 1), extra={"greedy": Greedy()})
    state = TrainState(model=make_model(3), extra={"greedy": Greedy()})
    load(path, state)
    first = torch.rand(2), random.random(), np.random.rand()
    load(path, state)
    second = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_tied_frozen_and_absent_parameters_and_extra_state(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.note = "new"

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    models = {"tied": Tied(), "none": nn.Identity()}
    models["tied"].note = "old"
    optimizer = torch.optim.AdamW(models["tied"].parameters())
    models["tied"].a.weight.grad = torch.ones(3, 3)
    optimizer.step()
    path = save(tmp_path, TrainState(model=models, optimizer=optimizer))
    fresh = {"tied": Tied(), "none": nn.Identity()}
    second = torch.optim.AdamW(fresh["tied"].parameters())
    load(path, TrainState(model=fresh, optimizer=second))
    assert digest(fresh["tied"], second) == digest(models["tied"], optimizer)
    assert fresh["tied"].a.weight is fresh["tied"].b.weight
    assert fresh["tied"].note == "old"


def test_a_compiled_model_has_the_names_of_the_bare_one(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = save(tmp_path, TrainState(model=torch.compile(model), optimizer=optimizer))
    other = make_model(seed=4)
    second = torch.optim.AdamW(other.parameters())
    load(path, TrainState(model=other, optimizer=second))
    assert digest(other, second) == digest(model, optimizer)
    compiled = torch.compile(model)
    assert [canonical_name(compiled, n) for n, _ in compiled.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]


def mismatches():
    def base():
        model = make_model()
        optimizer = torch.optim.AdamW(
            [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters())}]
        )
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            "extra": {"ema": nn.Linear(2, 2)},
        }

    def narrower(a):
        a["model"] = make_model(width=6)
        a["optimizer"] = torch.optim.AdamW(
            [{"params": list(a["model"][0].parameters())}, {"params": list(a["model"][3].parameters())}]
        )

    def one_group(a):
        a["optimizer"] = torch.optim.AdamW([*a["model"][0].parameters(), *a["model"][3].parameters()])

    def swapped(a):
        a["optimizer"] = torch.optim.AdamW(
            [{"params": list(a["model"][3].parameters())}, {"params": list(a["model"][0].parameters())}]
        )

    def sgd(a):
        a["optimizer"] = torch.optim.SGD(
            [{"params": list(a["model"][0].parameters())}, {"params": list(a["model"][3].parameters())}]
        )

    def decayed(a):
        a["optimizer"].param_groups[1]["weight_decay"] = 0.1

    def other_schedule(a):
        a["scheduler"] = torch.optim.lr_scheduler.ConstantLR(a["optimizer"], factor=1 / 3, total_iters=50)

    return base, {
        "value": (decayed, r"optim\.0\.param_groups\[1\]: 'weight_decay' was 0\.01 when saved, is 0\.1 now"),
        "schedule": (other_schedule, r"scheduler 0: 'total_iters' was 5 when saved, is 50 now"),
        "shape": (narrower, r"model\.0\.weight: saved with shape \[8, 4\], now \[6, 4\]"),
        "dtype": (lambda a: a["model"][3].bfloat16(), r"model\.3\.bias: saved with dtype float32, now bfloat16"),
        "missing": (
            lambda a: a["model"].append(nn.Linear(2, 2)),
            r"'model\.4\.weight': there now, but none of that name was saved",
        ),
        "unexpected": (lambda a: a["model"].__delitem__(1), r"'model\.1\.running_mean': saved, but there is none"),
        "groups": (one_group, r"optim\.0: saved with 2 parameter groups, now 1"),
        "members": (swapped, r"optim\.0\.param_groups\[0\]: '0\.weight' was saved in this group"),
        "hyper": (sgd, r"saved with the hyper-parameter 'betas', now without"),
        "optimizers": (lambda a: a.update(optimizer=[]), "optimizer: saved with 1, now 0"),
        "scheduler": (lambda a: a.update(scheduler=None), "scheduler: saved .*ConstantLR, now none"),
        "scaler": (lambda a: a.update(scaler=torch.amp.GradScaler("cpu")), "scaler: saved none, now .*GradScaler"),
        "extra": (lambda a: a.update(extra={"emma": nn.Linear(2, 2)}), "extra 'ema': saved, but there is none"),
    }


@pytest.mark.parametrize("name", mismatches()[1])
def test_a_mismatch_is_named_with_both_sides_and_touches_nothing(tmp_path, name):
    base, changes = mismatches()
    change, pattern = changes[name]
    saved = base()
    state = TrainState(**saved)
    saved["scheduler"].step()
    path = save(tmp_path, state)
    now = base()
    with torch.no_grad():
        now["model"][0].weight.add_(1)
    change(now)
    optimizers = now["optimizer"] if isinstance(now["optimizer"], list) else [now["optimizer"]]
    torch.manual_seed(11)
    before = digest(now["model"], *optimizers, torch.get_rng_state())
    with pytest.raises(CheckpointMismatch, match=pattern) as caught:
        load(path, TrainState(**now))
    assert digest(now["model"], *optimizers, torch.get_rng_state()) == before
    assert caught.value.differences


def test_all_differences_come_at_once(tmp_path):
    path = save(tmp_path, TrainState(model=make_model()))
    with pytest.raises(CheckpointMismatch) as caught:
        load(path, TrainState(model=make_model(width=6), scaler=torch.amp.GradScaler("cpu")), seed=1)
    text = str(caught.value)
    assert "model.0.weight" in text
    assert "scaler" in text
    assert "seed: saved 0, now 1" in text


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"model": "x"}, "should be a torch.nn"),
        ({"model": {"a": nn.Identity(), "a.b": nn.Identity()}}, "no dot"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)}, "belongs to no module"),
        ({"scheduler": 3}, "scheduler 0 should have state_dict"),
        ({"extra": {"ema": 1}}, r"extra\['ema'\] should have state_dict"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, pattern):
    with pytest.raises((TypeError, ValueError), match=pattern):
        TrainState(**arguments)


def test_an_optimizer_with_state_of_no_parameter_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    optimizer.state["global"] = {"n": 1}
    with pytest.raises(TypeError, match="'global'"):
        save(tmp_path, TrainState(model=model, optimizer=optimizer))


def test_tensors_under_keys_that_look_alike_are_not_mixed_up(tmp_path):
    tree = {1: torch.ones(2), "1": torch.zeros(2), "a/b": torch.full((2,), 3.0), "a": {"b": torch.full((2,), 4.0)}}

    class Alike:
        def __init__(self):
            self.tree = tree

        def state_dict(self):
            return self.tree

        def load_state_dict(self, state):
            self.tree = state

    path = save(tmp_path, TrainState(extra={"x": Alike()}))
    back = Alike()
    load(path, TrainState(extra={"x": back}))
    assert back.tree is not tree
    assert digest(back.tree) == digest(tree)


def test_seeds_differ_by_step_and_rank_and_not_by_process():
    seeds = {derive_seed("torch", 1, step, rank) for step in range(20) for rank in range(20)}
    assert len(seeds) == 400
    assert derive_seed("torch", 1, 2, 3) == 7962465318225351726


def test_capture_draws_nothing():
    state = TrainState(model=make_model(), optimizer=None)
    from saving import position

    before = copy.deepcopy((torch.get_rng_state(), random.getstate()))
    state.capture(position(1), world_size=1, incomparable=None)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
