"""A state that is not fit is never committed, whoever's part of it is to blame; one that is fit always is."""

import json
import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from saving import make_saver, position
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptd_shim import GlobalSampler, StateRejected, TrainerShim
from ckptd_shim.contract import ENV_LAUNCH, REPORT_FILE, Control, Guard, LaunchContext, Marker, ResumeFrom
from ckptd_shim.digest import crc32c_bytes, verify_checkpoint
from ckptd_shim.guard import LEAST, LEAST_NORMS, LossWatch, NormWatch, Rejection, inspect, verdict
from ckptd_shim.ranks import Ranks
from ckptd_shim.state import TrainState

# --- what one rank sees -----------------------------------------------------------------------------------------------


def seen(tensors, *, parameters=(), loss_problem=None, **guard):
    return inspect(
        Guard(**guard), loss_problem=loss_problem, tensors=tensors, staged=tensors,
        parameters={key: key for key in parameters},
    )  # fmt: skip


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, 299_999, 599_999])
def test_one_nan_is_found_wherever_it_is(dtype, at):
    tensor = torch.zeros(600, 1000, dtype=torch.float32)
    assert seen({"model.w": tensor.to(dtype)}, parameters=["model.w"])["unfit"] is None
    tensor.view(-1)[at] = math.nan
    found = seen({"model.w": tensor.to(dtype)}, parameters=["model.w"])
    assert found["unfit"] == "model.w holds NaN"


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_so_is_an_infinity(dtype, value):
    tensor = torch.ones(7, dtype=dtype)
    tensor[3] = value
    assert seen({"optim.0.state.w.exp_avg": tensor})["unfit"] == "optim.0.state.w.exp_avg holds infinity"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_largest_number_is_finite(dtype):
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert seen({"model.w": tensor}, parameters=["model.w"])["unfit"] is None


def test_what_is_no_parameter_may_hold_what_it_likes():
    mask = torch.full((4, 4), -math.inf)
    tensors = {
        "model.mask": mask,
        "extra.best": mask,
        "optim.0.state.w.step": torch.tensor(3),
        "model.e": torch.ones(0),
    }
    assert seen(tensors, parameters=["model.e"])["unfit"] is None
    assert seen({"model.mask": mask}, parameters=["model.mask"], finite=False)["unfit"] is None


@pytest.mark.parametrize("dtype", FLOATS[:5])
def test_the_norm_is_the_norm(dtype):
    torch.manual_seed(0)
    tensors = {f"model.{i}": torch.randn(n, dtype=torch.float64).to(dtype) for i, n in enumerate((3, 300_000))}
    found = seen({**tensors, "optim.0.x": torch.ones(9)}, parameters=tensors, param_norm=1.0)
    expected = sum(float(t.to(torch.complex128).abs().pow(2).sum()) for t in tensors.values())
    assert found["squares"] == pytest.approx(expected, rel=1e-4)


def test_a_norm_beyond_float32_is_a_number():
    assert seen({"model.w": torch.full((4,), 1e30)}, parameters=["model.w"], param_norm=1.0)["squares"] == (
        pytest.approx(4e60, rel=1e-5)
    )


def test_tied_weights_count_once():
    tied = nn.Linear(3, 3, bias=False)
    model = nn.ModuleDict({"a": tied, "b": tied})
    snapshot = TrainState(model=model).capture(position(1), world_size=1, incomparable=None)
    found = inspect(
        Guard(param_norm=1.0), loss_problem=None, tensors=snapshot.tensors, staged=snapshot.tensors,
        parameters=snapshot.parameters,
    )  # fmt: skip
    assert found["squares"] == pytest.approx(float(tied.weight.detach().pow(2).sum()), rel=1e-5)


# --- the loss ---------------------------------------------------------------------------------------------------------


def watch(losses, **guard):
    result = LossWatch(Guard(**guard))
    for loss in losses:
        result.note(loss)
    return result


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_must_be_finite_unless_nobody_minds(loss):
    assert watch([]).problem(loss) == f"the loss is {loss}"
    assert watch([], finite=False).problem(loss) is None
    assert watch([]).problem(None) is None


def test_a_spike_is_measured_in_robust_deviations():
    losses = [2.0, 4.0] * 20  # median 3, median absolute deviation 1
    quiet = watch(losses, loss_spike=6.0)
    assert quiet.problem(3.0 + 6.0 * 1.4826 - 1e-3) is None
    assert quiet.problem(-1e9) is None, "a loss cannot be too low"
    found = quiet.problem(3.0 + 6.0 * 1.4826 + 1e-3)
    assert found.startswith("the loss 11.89")
    assert "6.0 standard deviations above its recent median 3 (loss_spike: 6)" in found
    assert watch(losses).problem(1e9) is None, "nobody asked"
    # A fifth of the window are spikes already: they must not hide the next one.
    assert watch([*losses, *[1e6] * 10], loss_spike=6.0).problem(100.0) is not None


def test_little_is_known_at_first_and_a_loss_that_does_not_move_has_a_deviation_too():
    assert watch([1.0] * (LEAST - 1), loss_spike=5.0).problem(1e9) is None
    still = watch([1.0] * LEAST, loss_spike=5.0)
    assert still.problem(1.0 + 4e-6) is None
    assert still.problem(1.1) is not None
    assert watch([0.0] * LEAST, loss_spike=5.0).problem(0.0) is None
    assert watch([math.nan, math.inf, None] * LEAST, loss_spike=5.0).problem(1e9) is None, "they teach nothing"


# --- all of them together ---------------------------------------------------------------------------------------------


def test_the_first_rank_with_a_complaint_is_named_and_the_norm_is_that_of_all():
    fine, bad = {"unfit": None, "squares": 9.0}, {"unfit": "x", "squares": math.nan}
    assert verdict(Guard(), [fine, bad, bad]) == Rejection(why="x", rank=1)
    assert verdict(Guard(param_norm=4.3), [fine, fine]) is None
    assert verdict(Guard(param_norm=4.2), [fine, fine]) == Rejection(
        why="the norm of the parameters is 4.24264 (param_norm: 4.2)", rank=None
    )
    assert verdict(Guard(param_norm=1e300), [{"unfit": None, "squares": math.nan}]) is not None


# --- saving -----------------------------------------------------------------------------------------------------------


def reports(path):
    with open(path) as file:
        return [json.loads(line) for line in file if "staged" not in line]


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    model(torch.randn(4, 4)).pow(2).mean().backward()
    optimizer.step()
    return optimizer


def poison(model, optimizer, what, rank):
    """Damage one value, on rank 1 where there is one; returns how to undo it."""
    if what == "inf in the optimizer":
        tensor = optimizer.state[next(iter(model.parameters()))]["exp_avg_sq"]
    else:
        tensor = next(iter(model.parameters())).detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    values = local.view(-1)
    before = values[-1].item()
    if rank == (dist.get_world_size() - 1 if dist.is_initialized() else 0):
        values[-1] = {"NaN": math.nan, "inf in the optimizer": math.inf, "norm": 1e4}.get(what, before)

    def undo():
        values[-1] = before

    return undo


def refuse(rank, world, what, where, report):
    """Save three times: the state is fit, is not, and is again."""
    ranks = Ranks(dist.new_group(backend="gloo") if world > 1 else None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6))
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    optimizer = trained(model)
    state = TrainState(model=model, optimizer=optimizer, rank=rank)
    saver = make_saver(where, ranks, report=report if rank == 0 else None)
    saver._guard = Guard(param_norm=1e3 if what == "norm" else None)
    outcomes = []
    for step in (1, 2, 3):
        bad = step == 2
        undo = poison(model, optimizer, what, rank) if bad else None
        problem = "the loss is nan" if bad and what == "loss" and rank == world - 1 else None
        at = position(step)
        saver.save(
            lambda at=at: state.capture(at, world_size=world, incomparable=None),
            position=at, loss=0.5, loss_problem=problem,
        )  # fmt: skip
        saver.wait()
        if undo is not None:
            undo()
        outcomes.append([saver.outcome.committed, saver.outcome.rejected, saver.outcome.error])
        if world > 1:
            dist.barrier()
    saver.close()
    return outcomes


WHY = {
    "NaN": "model.0.weight holds NaN",
    "inf in the optimizer": "optim.0.state.0.weight.exp_avg_sq holds infinity",
    "norm": "the norm of the parameters is 10000 (param_norm: 1000)",
    "loss": "the loss is nan",
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", WHY)
def test_a_state_that_is_not_fit_leaves_nothing_behind_and_the_next_is_committed(tmp_path, world, what):
    where, report = tmp_path / "saves", tmp_path / "report"
    results = run_ranks(world, __file__, "refuse", what=what, where=os.fspath(where), report=os.fspath(report))
    assert results == [results[0]] * world
    assert [each[:2] for each in results[0]] == [[True, False], [False, True], [True, False]]
    assert sorted(os.listdir(where)) == ["step_000000001.a0001", "step_000000003.a0001"]
    assert verify_checkpoint(where / "step_000000003.a0001").sequence == 2
    first, second, third = reports(report)
    assert [line["kind"] for line in (first, second, third)] == ["save_committed", "save_rejected", "save_committed"]
    rank = None if what == "norm" else world - 1
    expected = {"step": 2, "path": os.fspath(where / "step_000000002.a0001"), "tier": "disk", "rank": rank}
    assert {key: second[key] for key in expected} == expected
    assert second["why"] == results[0][1][2]
    assert second["why"].replace("optim.0.0.", "optim.0.state.0.") == WHY[what]
    assert second["stall_s"] > 0


def held_twice(rank, world):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    whole = torch.arange(1.0, 7.0)
    tensors = {
        "model.replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "model.sharded": distribute_tensor(whole, mesh, [Shard(0)]),
    }
    staged = {key: tensor.to_local() for key, tensor in tensors.items()}
    guard = Guard(param_norm=1.0)
    mine = inspect(guard, loss_problem=None, tensors=tensors, staged=staged, parameters={key: key for key in tensors})
    return [mine["squares"], verdict(guard, Ranks(dist.group.WORLD).exchange(mine)).why]


def test_what_several_ranks_hold_counts_once():
    first, second = run_ranks(2, __file__, "held_twice")
    assert first[0] + second[0] == pytest.approx(2 * 91.0)
    assert first[1] == second[1] == f"the norm of the parameters is {math.sqrt(182.0):.6g} (param_norm: 1)"


# --- a script ---------------------------------------------------------------------------------------------------------


def launch(tmp_path, monkeypatch, guard):
    (tmp_path / "saves").mkdir()
    LaunchContext(
        run_id="r", run_name="n", attempt=1, attempt_dir=str(tmp_path), control_path=str(tmp_path / "control.json"),
        tier="disk", save_dir=str(tmp_path / "saves"), resume=None, world_at_start=None, global_batch=8,
        micro_batch=None, interval_s=None, interval_steps=10, commit_sequence=0, guard=guard,
    ).write(tmp_path / "launch.json")  # fmt: skip
    monkeypatch.setenv(ENV_LAUNCH, str(tmp_path / "launch.json"))


@pytest.mark.filterwarnings("error:Converting a tensor")
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_script_s_loss_is_looked_at_when_it_is_saved(tmp_path, monkeypatch, kind):
    launch(tmp_path, monkeypatch, Guard(loss_spike=8.0))
    model = nn.Linear(4, 4)
    shim = TrainerShim(model=model)
    shim.resume()
    noise = random.Random(0)
    bad = {20: math.nan, 40: 50.0}
    for step in range(1, 51):
        shim._schedule._next = step  # an agreement at each step, as steps of a second would have
        loss = kind(bad.get(step, 2.0 + noise.uniform(-0.1, 0.1)))
        shim.step(loss=loss.requires_grad_() if isinstance(loss, torch.Tensor) else loss)
        shim._saver.wait()
    shim.close()
    lines = [line for line in reports(tmp_path / REPORT_FILE) if line["kind"].startswith("save")]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("save_committed", 10), ("save_rejected", 20), ("save_committed", 30), ("save_rejected", 40),
        ("save_committed", 50),
    ]  # fmt: skip
    assert lines[1]["why"] == "the loss is nan"
    assert "standard deviations above its recent median" in lines[3]["why"]


def test_a_stop_does_not_ask_twice_about_the_same_state(tmp_path, monkeypatch):
    launch(tmp_path, monkeypatch, None)
    Control(
        seq=1, attempt=1, interval_s=None, interval_steps=None, save_request=1, stop_after_save=True, reason="test",
        issued_at=0.0,
    ).write(tmp_path / "control.json")  # fmt: skip
    model = nn.Linear(4, 4)
    shim = TrainerShim(model=model)
    shim.resume()
    model.bias.data[0] = math.inf
    assert shim.step(loss=1.0)
    shim.close()
    lines = [line for line in reports(tmp_path / REPORT_FILE) if line["kind"] in ("save_rejected", "finished")]
    assert [line["kind"] for line in lines] == ["save_rejected", "finished"]
    assert lines[0]["why"] == "model.bias holds infinity"
    assert (lines[1]["stopping"], lines[1]["saved"]) == (True, False)


def alone(directory, **options):
    model = nn.Linear(4, 4)
    return model, TrainerShim(model=model, directory=str(directory), interval={"steps": 100}, **options)


def test_alone_the_guard_is_on_and_says_at_the_end_that_work_is_lost(tmp_path):
    model, shim = alone(tmp_path)
    shim.resume()
    shim.step(loss=1.0)
    model.weight.data[0, 0] = math.nan
    with pytest.raises(StateRejected, match=r"the last step, 1, is not fit to be committed: model.weight holds NaN"):
        shim.close()
    assert os.listdir(tmp_path) == []


def test_alone_it_can_be_switched_off(tmp_path):
    model, shim = alone(tmp_path, guard={"finite": False})
    shim.resume()
    shim.step(loss=math.nan)
    model.weight.data[0, 0] = math.nan
    shim.close()
    assert len(os.listdir(tmp_path)) == 1
    with pytest.raises(TypeError, match="fnite"):
        alone(tmp_path, guard={"fnite": False})


def test_a_loss_of_some_step_before_says_nothing_of_the_last(tmp_path):
    """As tensors losses are looked at about once a second: one that was infinite then need not be now."""
    _, shim = alone(tmp_path)
    shim.resume()
    shim.step(loss=torch.tensor(math.inf))
    while shim._looked_at == shim.global_step:
        shim.step(loss=torch.tensor(1.0 if shim.global_step > 50 else math.inf))
    shim.close()
    assert len(os.listdir(tmp_path)) == 1


# --- gradients, and the norm from commit to commit ----------------------------------------------------------------------


def test_a_norm_that_leaves_the_usual_range_is_refused_to_either_side():
    guard = Guard(param_norm_spike=6.0)
    watch = NormWatch(guard, [100.0 + (i % 2) for i in range(LEAST_NORMS - 1)])
    assert watch.problem(1e9) is None, "too little is known"
    told = {"unfit": None, "squares": 100.5**2}
    assert verdict(guard, [told], watch) is None
    assert len(watch.recent) == LEAST_NORMS, "what may be committed is remembered"
    for norm in (150.0, 50.0):
        found = verdict(guard, [{"unfit": None, "squares": norm**2}], watch)
        assert f"norm of the parameters is {norm:g}" in found.why
        assert "(param_norm_spike: 6)" in found.why
    assert len(watch.recent) == LEAST_NORMS, "what is refused teaches nothing"
    still = NormWatch(guard, [100.0] * LEAST_NORMS)
    assert still.problem(100.5) is None, "half a percent is no spike"
    assert still.problem(101.0) is not None
    assert NormWatch(Guard(), [100.0] * LEAST_NORMS).problem(1e9) is None, "nobody asked"


def test_the_norms_of_earlier_commits_are_known_after_a_resume(tmp_path):
    options = {"guard": {"param_norm_spike": 6.0}}
    for first in (1, 9):
        model, shim = alone(tmp_path, **options)
        shim.resume()
        assert shim.global_step == first - 1
        for _ in range(8):
            with torch.no_grad():
                if shim.global_step == 0:
                    model.weight.fill_(1.0)
                    model.bias.fill_(1.0)
            shim.step(loss=1.0)
            shim._save(shim.global_step)
            shim._drain()
        shim.close()
    marker = Marker.read(tmp_path / "step_000000016.a0002" / "COMMITTED")
    assert marker.param_norms == pytest.approx([math.sqrt(20.0)] * 16)
    model, shim = alone(tmp_path, **options)
    shim.resume()
    with torch.no_grad():
        model.weight.mul_(3.0)
    shim.step(loss=1.0)
    with pytest.raises(StateRejected, match="standard deviations from its recent median"):
        shim.close()


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_gradients_that_are_not_finite_spoil_the_state_unless_a_scaler_left_the_step_out(tmp_path, kind):
    model, shim = alone(tmp_path / "a")
    shim.resume()
    shim.step(loss=1.0, grad_norm=kind(math.inf))
    shim.step(loss=1.0, grad_norm=kind(1.0))
    shim._save(2)
    shim._drain()
    assert shim._saver.committed_step == 2, "the last step's is what counts"
    shim.step(loss=1.0, grad_norm=kind(math.nan))
    with pytest.raises(StateRejected, match="the norm of the gradients is nan"):
        shim.close()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    shim = TrainerShim(model=model, scaler=scaler, directory=str(tmp_path / "b"), interval={"steps": 100})
    shim.resume()
    shim.step(loss=1.0, grad_norm=kind(math.inf))
    shim.close()
    assert len(os.listdir(tmp_path / "b")) == 1
    _, shim = alone(tmp_path / "c")
    shim.resume()
    shim.step(grad_norm=torch.ones(2))
    with pytest.raises(TypeError, match=r"grad_norm=\.\.\."):
        shim.close()


# --- data that is passed over -----------------------------------------------------------------------------------------


def with_data(directory):
    data = TensorDataset(torch.arange(64.0))
    sampler = GlobalSampler(64, global_batch=8, seed=1, rank=0, world_size=1)
    loader = DataLoader(data, batch_sampler=sampler)
    model = nn.Linear(1, 1)
    return loader, sampler, TrainerShim(model=model, dataloader=loader, directory=str(directory), interval="1h")


def test_data_is_passed_over_once_and_the_position_stays_ahead_of_the_counter(tmp_path, monkeypatch):
    loader, sampler, shim = with_data(tmp_path / "x")
    shim.resume()
    seen = [shim.step(loss=1.0) for _, _ in zip(range(2), loader, strict=False)]
    assert len(seen) == 2
    shim.close()
    (saved,) = os.listdir(tmp_path / "x")
    path = str(tmp_path / "x" / saved)

    def again(path, attempt, skip):
        with open(os.path.join(path, "COMMITTED"), "rb") as file:
            crc = crc32c_bytes(file.read())
        (tmp_path / "saves").mkdir(exist_ok=True)
        LaunchContext(
            run_id=Marker.read(os.path.join(path, "COMMITTED")).run_id, run_name="n", attempt=attempt,
            attempt_dir=str(tmp_path), control_path=str(tmp_path / "control.json"), tier="disk",
            save_dir=str(tmp_path / "saves"), world_at_start=1, global_batch=8, micro_batch=None, interval_s=None,
            interval_steps=100, commit_sequence=1, skip_data_to=skip,
            resume=ResumeFrom(step=Marker.read(os.path.join(path, "COMMITTED")).step, tier="disk", path=path, marker_crc32c=crc),
        ).write(tmp_path / "launch.json")  # fmt: skip
        monkeypatch.setenv(ENV_LAUNCH, str(tmp_path / "launch.json"))
        return with_data(tmp_path / "x")

    # Refused at the data position 40: samples 16 to 40 are passed over.
    loader, sampler, shim = again(path, 2, 40)
    shim.resume()
    assert (shim.global_step, shim.samples_seen, sampler.position) == (2, 16, 40)
    batch = next(iter(loader))[0].tolist()
    assert batch == [float(i) for i in GlobalSampler(64, 8, 1, rank=0, world_size=1).indices(40)]
    shim.step(loss=1.0)
    shim.close()
    (saved,) = os.listdir(tmp_path / "saves")
    path = str(tmp_path / "saves" / saved)
    marker = Marker.read(os.path.join(path, "COMMITTED"))
    assert (marker.samples_seen, marker.comparable) == (24, False)
    assert marker.comparable_reason == "the data from sample 16 to 40 was passed over at step 2 (guard.skip_data)"

    # From there on nothing is to be passed over, and the data goes on where it was.
    loader, sampler, shim = again(path, 3, None)
    shim.resume()
    assert (shim.global_step, shim.samples_seen, sampler.position) == (3, 24, 48)
    shim.close()
