"""A training script with a TrainerShim: interrupted and resumed it computes what it would have computed uninterrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from gloo_ranks import run_ranks
from saving import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptd_shim import CheckpointError, CheckpointMismatch, GlobalSampler, TrainerShim
from ckptd_shim.contract import (
    ENV_LAUNCH,
    REPORT_FILE,
    Control,
    LaunchContext,
    Phase,
    ResumeFrom,
    parse_checkpoint_dirname,
    pulse_name,
)
from ckptd_shim.digest import committed_paths, crc32c_bytes, read_marker, verify_checkpoint
from ckptd_shim.interval import parse_interval
from ckptd_shim.loss import LastLoss
from ckptd_shim.pulse import read_pulse_file

TOTAL = 12


class Ema:
    def __init__(self, model):
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for name, p in model.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"average": self.average, "updates": self.updates}

    def load_state_dict(self, state):
        self.average, self.updates = state["average"], state["updates"]


class Job:
    """A script: dropout, AdamW in two groups, LambdaLR, an EMA, a GlobalSampler, noise from three random generators."""

    def __init__(self, directory=None, interval=None, *, world=1, kind="ddp", seed=3, wide=16, workers=0):
        random.seed(seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, wide), nn.BatchNorm1d(wide), nn.Dropout(0.3), nn.Linear(wide, 1))
        if world > 1 and kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model[3])
            self.model = fully_shard(model)
        else:
            self.model = model
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 0.9**k)
        data = torch.Generator().manual_seed(1)
        dataset = TensorDataset(
            torch.arange(40), torch.randn(40, 8, generator=data), torch.randn(40, 1, generator=data)
        )
        self.loader = DataLoader(dataset, batch_sampler=GlobalSampler(40, 8, 5), num_workers=workers)
        self.ema = Ema(model)
        self.bare = model
        self.shim = TrainerShim(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=self.loader,
            extra={"ema": self.ema}, seed=seed, directory=directory, interval=interval,
        )  # fmt: skip
        self.losses, self.seen = [], []

    def train(self, until=TOTAL, each_step=None):
        """Train until a step or until told to stop, as in the documentation."""
        shim = self.shim
        while shim.global_step < until:
            for which, x, y in self.loader:
                self.seen += which.tolist()
                noise = random.random() * 0.01 + torch.rand(()).item() * 0.01
                loss = (self.model(x + noise) - y).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.ema.update(self.bare)
                self.losses.append(loss.item())
                stop = shim.step(loss=loss)
                if each_step is not None:
                    each_step(shim.global_step)
                if stop or shim.global_step == until:
                    break
            if shim.stopping:
                break
        return self

    def digest(self):
        return digest(
            self.model, self.optimizer, self.scheduler.state_dict(), self.ema.state_dict(), torch.get_rng_state()
        )


def run(directory, until, *, interval=None, **options):
    job = Job(os.fspath(directory), interval or {"steps": 100}, **options)
    job.shim.resume()
    started = job.shim.global_step
    job.train(until)
    job.shim.close()
    return job, started


# --- one rank, alone --------------------------------------------------------------------------------------------------


def test_resumed_twice_is_bit_for_bit_the_uninterrupted_run(tmp_path):
    whole, _ = run(tmp_path / "a", TOTAL)
    first, _ = run(tmp_path / "b", 4)
    second, started = run(tmp_path / "b", 7)
    third, again = run(tmp_path / "b", TOTAL)
    assert (started, again) == (4, 7)
    assert first.losses + second.losses + third.losses == whole.losses
    assert first.seen + second.seen + third.seen == whole.seen
    assert third.digest() == whole.digest()
    assert (third.shim.samples_seen, third.shim.epoch) == (TOTAL * 8, 2)


def test_a_loader_that_prefetches_resumes_at_the_samples_trained_on(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forking beside the saver's thread
        whole, _ = run(tmp_path / "a", TOTAL, workers=2)
        first, _ = run(tmp_path / "b", 3, workers=2)
        second, started = run(tmp_path / "b", TOTAL, workers=2)
    assert started == 3
    assert first.seen + second.seen == whole.seen
    assert first.losses + second.losses == whole.losses


def test_an_interval_in_steps_commits_each_in_order(tmp_path):
    run(tmp_path, 10, interval={"steps": 4})
    markers = sorted((read_marker(path) for path in committed_paths(tmp_path)), key=lambda m: m.sequence)
    assert [(m.sequence, m.step, m.samples_seen, m.epoch) for m in markers] == [
        (1, 4, 32, 0),
        (2, 8, 64, 1),
        (3, 10, 80, 2),
    ]
    assert all(m.comparable and m.global_batch == 8 and m.loss is not None for m in markers)
    assert len({m.run_id for m in markers}) == 1
    _, started = run(tmp_path, 11)
    assert started == 10
    newest = max((read_marker(path) for path in committed_paths(tmp_path)), key=lambda m: m.sequence)
    assert (newest.sequence, newest.step, newest.attempt, newest.run_id) == (4, 11, 2, markers[0].run_id)


def test_a_damaged_newest_checkpoint_is_passed_over_and_all_damaged_is_an_error(tmp_path, capsys):
    run(tmp_path, 6, interval={"steps": 3})
    by_step = {parse_checkpoint_dirname(os.path.basename(p))[0]: p for p in committed_paths(tmp_path)}
    with open(os.path.join(by_step[6], "__0_0.distcp"), "r+b") as file:
        file.seek(500)
        file.write(b"\x99\x99")
    job = Job(os.fspath(tmp_path), 60)
    job.shim.resume()
    assert job.shim.global_step == 3
    assert job.shim.resumed_from == by_step[3]
    job.shim.close()
    assert "CRC-32C" in capsys.readouterr().err
    os.unlink(os.path.join(by_step[3], "extras_rank0"))
    job = Job(os.fspath(tmp_path), 60)
    with pytest.raises(CheckpointError, match="none of them can be read"):
        job.shim.resume()
    job.shim.close()


def test_a_script_that_differs_is_refused_untouched(tmp_path):
    run(tmp_path, 2)
    job = Job(os.fspath(tmp_path), 60, wide=12)
    before = job.digest()
    with pytest.raises(CheckpointMismatch, match=r"model\.0\.weight"):
        job.shim.resume()
    assert job.digest() == before
    job.shim.close()


def test_a_closed_run_that_made_no_step_saves_nothing(tmp_path):
    job, _ = run(tmp_path, 0)
    job.shim.close()
    assert committed_paths(tmp_path) == []
    run(tmp_path, 2)
    before = committed_paths(tmp_path)
    run(tmp_path, 2)
    assert committed_paths(tmp_path) == before


def test_without_ckptd_and_without_a_directory_it_works_and_saves_nothing(capsys):
    job = Job()
    job.shim.resume()
    job.train(3)
    job.shim.close()
    assert job.shim.global_step == 3
    assert capsys.readouterr().err.count("nothing is saved") == 1


def test_a_last_save_that_fails_is_not_silent(tmp_path):
    job = Job(os.fspath(tmp_path / "x"), {"steps": 100})
    job.shim.resume()
    job.train(2)
    (tmp_path / "x").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match="the last save, of step 2, failed"):
        job.shim.close()


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"interval": "10m"}, "without directory="),
        ({"directory": "x", "interval": "10 parsecs"}, "positive duration"),
        ({"directory": "x", "interval": 0}, "positive duration"),
        ({"directory": "x", "interval": {"steps": 0}}, "1 or more"),
        ({"directory": "x", "interval": {"stps": 5}}, "should be seconds"),
        ({"seed": "1"}, "seed should be an int"),
    ],
)
def test_wrong_arguments(arguments, pattern):
    with pytest.raises((TypeError, ValueError), match=pattern):
        TrainerShim(**arguments)


def test_two_global_batches_are_refused():
    loader = DataLoader(range(40), batch_sampler=GlobalSampler(40, 8, 5))
    with pytest.raises(ValueError, match=r"8 by the sampler, 16 by global_batch="):
        TrainerShim(dataloader=loader, global_batch=16)


def test_intervals():
    assert parse_interval("10m") == (600.0, None)
    assert parse_interval("1.5h") == (5400.0, None)
    assert parse_interval(30) == (30.0, None)
    assert parse_interval({"steps": 50}) == (None, 50)
    assert parse_interval(None) == (None, None)


def test_step_before_resume_and_resume_twice_are_refused():
    shim = TrainerShim()
    with pytest.raises(RuntimeError, match="resume"):
        shim.step()
    shim.resume()
    with pytest.raises(RuntimeError, match="before"):
        shim.resume()
    for no_loss in ([1.0], "much", torch.zeros(3)):
        with pytest.raises(TypeError, match=r"step\(loss=...\) takes a number or a tensor of one element, not "):
            LastLoss().look(no_loss)
    assert shim.step(samples=5) is False
    assert (shim.global_step, shim.samples_seen, shim.epoch, shim.accumulation_steps) == (1, 5, 0, 1)
    with pytest.raises(ValueError, match="eval"), shim.phase("lunch"):
        pass
    shim.close()


def test_the_package_exports_five_names_and_reads_the_contract_without_torch():
    code = (
        "import sys, ckptd_shim.contract, ckptd_shim.digest, ckptd_shim as s; assert 'torch' not in sys.modules; "
        "assert s.__all__ == ['CheckpointError', 'CheckpointMismatch', 'GlobalSampler', 'StateRejected', "
        "'TrainerShim']; "
        "assert issubclass(s.CheckpointMismatch, s.CheckpointError); assert 'torch' not in sys.modules; "
        "assert all(getattr(s, name).__name__ == name for name in s.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- one rank, under ckptd --------------------------------------------------------------------------------------------


def launch(tmp_path, monkeypatch=None, *, attempt=1, resume=None, sequence=0, interval_steps=None, **more):
    """Write what ckptd would; returns the attempt's directory."""
    where = tmp_path / f"attempt{attempt}"
    where.mkdir()
    (tmp_path / "saves").mkdir(exist_ok=True)
    context = LaunchContext(
        run_id="run", run_name="test", attempt=attempt, attempt_dir=os.fspath(where),
        control_path=os.fspath(tmp_path / "control.json"), tier="memory", save_dir=os.fspath(tmp_path / "saves"),
        resume=resume, world_at_start=1, global_batch=8, micro_batch=2, interval_s=None, interval_steps=interval_steps,
        commit_sequence=sequence, **more,
    )  # fmt: skip
    context.write(where / "launch.json")
    if monkeypatch is not None:
        monkeypatch.setenv(ENV_LAUNCH, os.fspath(where / "launch.json"))
    return where


def reports(where):
    with open(where / REPORT_FILE) as file:
        return [json.loads(line) for line in file]


def chosen(path, tier="memory"):
    with open(os.path.join(path, "COMMITTED"), "rb") as file:
        crc = crc32c_bytes(file.read())
    return ResumeFrom(step=read_marker(path).step, tier=tier, path=path, marker_crc32c=crc)


def ask(tmp_path, **what):
    fields = {"seq": 1, "attempt": 1, "interval_s": None, "interval_steps": None, "save_request": 0}
    fields |= {"stop_after_save": False, "reason": "test", "issued_at": 0.0}
    Control(**(fields | what)).write(tmp_path / "control.json")


def test_asked_to_stop_it_saves_stops_and_resumes_exactly(tmp_path, monkeypatch):
    whole, _ = run(tmp_path / "alone", TOTAL)
    where = launch(tmp_path, monkeypatch)
    job = Job("ignored", "1m")
    assert job.shim.accumulation_steps == 4
    job.shim.resume()
    assert read_pulse_file(where / pulse_name(0)).phase == Phase.FIRST_STEP

    def at(step):
        if step == 5:
            ask(tmp_path, save_request=1, stop_after_save=True)

    job.train(each_step=at)
    assert job.shim.stopping
    stopped = job.shim.global_step
    assert 5 < stopped < TOTAL
    job.shim.close()
    job.shim.close()
    lines = reports(where)
    kinds = [line["kind"] for line in lines]
    assert kinds == ["initialised", "restored", "first_step", "save_staged", "save_committed", "stopping", "finished"]
    assert (lines[1]["step"], lines[1]["path"]) == (0, None)
    committed = lines[4]
    assert (committed["step"], committed["samples"], committed["tier"], committed["sequence"]) == (
        stopped,
        stopped * 8,
        "memory",
        1,
    )
    assert committed["comparable"] is True
    assert 0 < committed["stall_s"] <= committed["upload_s"]
    assert committed["bytes"] == sum(
        f.size for f in verify_checkpoint(committed["path"], committed["marker_crc32c"]).files
    )
    assert (lines[6]["step"], lines[6]["stopping"]) == (stopped, True)
    pulse = read_pulse_file(where / pulse_name(0))
    assert (pulse.phase, pulse.step, pulse.samples) == (Phase.END, stopped, stopped * 8)
    assert pulse.loss == pytest.approx(job.losses[-1], abs=2.0)

    (tmp_path / "control.json").unlink()
    second = launch(tmp_path, monkeypatch, attempt=2, resume=chosen(committed["path"]), sequence=7)
    resumed = Job()
    resumed.shim.resume()
    assert resumed.shim.global_step == stopped
    resumed.train()
    resumed.shim.close()
    assert job.losses + resumed.losses == whole.losses
    assert resumed.digest() == whole.digest()
    last = [line for line in reports(second) if line["kind"] == "save_committed"][-1]
    assert (last["step"], last["sequence"]) == (TOTAL, 8)  # counted on from what ckptd said


def test_only_the_chosen_checkpoint_is_resumed_from(tmp_path, monkeypatch):
    launch(tmp_path, monkeypatch, interval_steps=2)
    job = Job()
    job.shim.resume()
    job.train(4)
    job.shim.close()
    older, newer = sorted(committed_paths(tmp_path / "saves"))
    wrong = ResumeFrom(step=4, tier="memory", path=newer, marker_crc32c=chosen(older).marker_crc32c)
    launch(tmp_path, monkeypatch, attempt=2, resume=wrong)
    job = Job()
    with pytest.raises(CheckpointError, match="not the checkpoint that was chosen"):
        job.shim.resume()
    job.shim.close()
    launch(tmp_path, monkeypatch, attempt=3, resume=chosen(older))
    job = Job()
    job.shim.resume()
    assert job.shim.global_step == 2  # although a newer one lies beside it
    job.shim.close()
    launch(tmp_path, monkeypatch, attempt=4, resume=None)
    job = Job()
    job.shim.resume()
    assert job.shim.global_step == 0
    job.shim.close()


def test_a_save_that_fails_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    where = launch(tmp_path, monkeypatch, interval_steps=2)
    job = Job()
    job.shim.resume()
    taken = tmp_path / "saves" / "step_000000004.a0001"
    taken.mkdir()
    (taken / "kept").touch()
    job.train(6)
    job.shim.close()
    lines = [line for line in reports(where) if line["kind"] in ("save_committed", "save_failed")]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("save_committed", 2),
        ("save_failed", 4),
        ("save_committed", 6),
    ]
    assert lines[1]["errno"] == 17
    assert [m.sequence for m in map(read_marker, sorted(committed_paths(tmp_path / "saves")))] == [1, 2]


def test_sigterm_becomes_a_save_and_a_stop(tmp_path):
    where = launch(tmp_path)
    job = subprocess.Popen(
        [sys.executable, __file__, "until-told"],
        env=os.environ
        | {ENV_LAUNCH: os.fspath(where / "launch.json"), "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    try:
        deadline = time.monotonic() + 60
        while (pulse := read_pulse_file(where / pulse_name(0))) is None or pulse.step < 3:
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    kinds = [line["kind"] for line in reports(where)]
    assert kinds[-4:] == ["save_staged", "save_committed", "stopping", "finished"]


def test_a_script_that_ends_with_an_exception_ends(tmp_path):
    where = launch(tmp_path, interval_steps=1)
    job = subprocess.run(
        [sys.executable, __file__, "raise"],
        check=False,
        env=os.environ
        | {ENV_LAUNCH: os.fspath(where / "launch.json"), "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 1
    assert "the script's own error" in job.stderr
    kinds = [line["kind"] for line in reports(where)]
    assert "finished" not in kinds
    assert kinds.count("save_committed") >= 1


def script(what):
    job = Job()
    job.shim.resume()

    def at(step):
        time.sleep(0.01)
        if what == "raise" and step == 3:
            raise RuntimeError("the script's own error")

    job.train(10**9, each_step=at)
    job.shim.close()


# --- two ranks --------------------------------------------------------------------------------------------------------


def segment(rank, world, directory, until, kind="ddp"):
    job, started = run(directory, until, world=world, kind=kind, interval={"steps": 3})
    return {
        "started": started,
        "losses": job.losses,
        "seen": job.seen,
        "digest": job.digest(),
        "step": job.shim.global_step,
        "samples": job.shim.samples_seen,
        "average": [p.double().sum().item() for p in job.ema.average.values()] if kind == "ddp" else None,
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_interrupted_compute_what_they_would_have_uninterrupted(tmp_path, kind):
    whole = run_ranks(2, __file__, "segment", directory=os.fspath(tmp_path / "a"), until=8, kind=kind)
    first = run_ranks(2, __file__, "segment", directory=os.fspath(tmp_path / "b"), until=5, kind=kind)
    second = run_ranks(2, __file__, "segment", directory=os.fspath(tmp_path / "b"), until=8, kind=kind)
    for rank in range(2):
        assert second[rank]["started"] == 5
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]
        assert second[rank]["digest"] == whole[rank]["digest"]
    assert whole[0]["losses"] != whole[1]["losses"]


def test_from_two_ranks_to_one_and_back_no_sample_is_lost_and_the_change_is_marked(tmp_path):
    where = os.fspath(tmp_path)
    first = run_ranks(2, __file__, "segment", directory=where, until=4)
    (alone,) = run_ranks(1, __file__, "segment", directory=where, until=7)
    (twin,) = run_ranks(1, __file__, "segment", directory=os.fspath(tmp_path / "twin"), until=7)
    again = run_ranks(2, __file__, "segment", directory=where, until=9)
    assert (alone["started"], again[0]["started"], again[0]["samples"]) == (4, 7, 72)
    in_order = [{*first[0]["seen"][i * 4 : i * 4 + 4], *first[1]["seen"][i * 4 : i * 4 + 4]} for i in range(4)]
    assert in_order == [set(twin["seen"][i * 8 : i * 8 + 8]) for i in range(4)]
    assert alone["seen"] == twin["seen"][32:]
    markers = sorted((read_marker(p) for p in committed_paths(where)), key=lambda m: m.sequence)
    said = [(m.step, m.world_size, m.comparable, m.comparable_reason) for m in markers]
    change = "world size changed from 2 to 1 at step 4"
    assert said == [
        (3, 2, True, None), (4, 2, True, None), (7, 1, False, change), (9, 2, False, change),
    ]  # fmt: skip


def reseeded(rank, world, directory):
    job = Job(directory, {"steps": 100}, world=world)
    job.shim.resume()
    drawn = [random.random(), torch.rand(()).item()]
    job.shim.close()
    return drawn


def test_on_another_world_size_random_numbers_begin_anew_the_same_way_and_differ_by_rank(tmp_path):
    run_ranks(1, __file__, "segment", directory=os.fspath(tmp_path), until=2)
    first = run_ranks(2, __file__, "reseeded", directory=os.fspath(tmp_path))
    assert run_ranks(2, __file__, "reseeded", directory=os.fspath(tmp_path)) == first
    assert len({*first[0], *first[1]}) == 4


if __name__ == "__main__":
    script(sys.argv[1])
