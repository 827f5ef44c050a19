"""What a script forgets is found and named, from traces of real runs of it; noise is told apart."""

import dataclasses
import os
import runpy
import sys
from pathlib import Path

import pytest
from gloo_ranks import run_ranks

from ckptd.drills import curves, traces
from ckptd_shim.contract import ENV_LAUNCH, Drill, LaunchContext, ResumeFrom
from ckptd_shim.digest import committed_paths, crc32c_file

SCRIPT = Path(__file__).parents[2] / "system" / "forgetful.py"
N = 5


def leg(rank, world, launch, argv):
    """One attempt of the script, as a worker of ckptd would run it."""
    os.environ[ENV_LAUNCH] = launch
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def run_leg(directory, *argv, stop_at, world=1, interval=None, attempt=1):
    directory.mkdir(parents=True, exist_ok=True)
    saves = directory / "ckpt"
    saves.mkdir(exist_ok=True)
    found = committed_paths(saves)
    resume = None
    if found:
        marker = os.path.join(found[0], "COMMITTED")
        resume = ResumeFrom(step=N, tier="disk", path=found[0], marker_crc32c=crc32c_file(marker)[1])
    launch = LaunchContext(
        run_id="run", run_name="job", attempt=attempt, attempt_dir=str(directory), tier="disk", save_dir=str(saves),
        control_path=str(directory / "control.json"), resume=resume, world_at_start=None, global_batch=12, micro_batch=12,
        interval_s=None, interval_steps=interval, commit_sequence=0,
        drill=Drill(trace=str(directory / f"trace{attempt}"), stop_at_step=stop_at, digest_at=[N, 2 * N]),
    )  # fmt: skip
    path = directory / "launch.json"
    launch.write(path)
    run_ranks(world, __file__, "leg", group=True, launch=str(path), argv=list(argv))
    return traces.read(directory / f"trace{attempt}")


def straight_and_resumed(tmp_path, *argv, worlds=(1, 1)):
    straight = run_leg(tmp_path / "straight", *argv, stop_at=2 * N, world=worlds[0])
    first = run_leg(tmp_path / "resumed", *argv, stop_at=N, interval=N, world=worlds[0])
    second = run_leg(tmp_path / "resumed", *argv, stop_at=2 * N, interval=N, attempt=2, world=worlds[1])
    return straight, traces.joined(first, second, N)


@pytest.mark.parametrize(
    "forget, likely, first, words",
    [
        ("", None, None, "bit for bit"),
        ("scheduler", "scheduler", N + 1, "a LambdaLR was at work that TrainerShim was not given"),
        ("scaler", "scaler", N + 1, "a GradScaler was at work that TrainerShim was not given"),
        ("sampler", "data order", N + 1, "a DataLoader was at work that TrainerShim was not given"),
        ("seed", "seed", 0, "from the clock"),
    ],
)
def test_what_is_forgotten_is_named(tmp_path, forget, likely, first, words):
    straight, resumed = straight_and_resumed(tmp_path, *(["--forget", forget] if forget else []))
    verdict = traces.compare(straight, resumed, resume_step=N)
    assert (verdict.outcome, verdict.likely) == ("differs" if forget else "bitwise", likely), verdict
    assert verdict.first_step is None or first <= verdict.first_step <= first + 2, verdict
    assert words in verdict.because
    assert straight.last == resumed.last == 2 * N
    assert len({step.loss for step in straight.steps.values()}) > N  # something was trained at all
    assert straight.steps[1].scale is None or straight.steps[1].scale != straight.steps[2 * N].scale


def test_on_another_number_of_workers_it_is_within_tolerance_and_says_so(tmp_path):
    straight, resumed = straight_and_resumed(tmp_path / "right", "--dropout", "0", "--precise", worlds=(2, 1))
    verdict = traces.compare(straight, resumed, resume_step=N, same_world=False)
    assert verdict.outcome == "within noise", verdict
    assert "bit for bit is not promised" in verdict.because
    assert straight.digests[N] == resumed.digests[N]
    straight, resumed = straight_and_resumed(tmp_path / "wrong", "--dropout", "0", "--precise", "--sum", worlds=(2, 1))
    verdict = traces.compare(straight, resumed, resume_step=N, same_world=False)
    assert (verdict.outcome, verdict.likely) == ("differs", "loss scaling"), verdict


# --- made-up traces ---------------------------------------------------------------------------------------------------


def made_up(losses, *, lr=None, rng="r", roles=None, weights="w"):
    steps = {
        k: traces.Step(loss=loss, lr=[[lr or "0x1p-3"]], scale=None, rng={"torch": f"{rng}{k}"}, samples=12 * k)
        for k, loss in enumerate(losses, start=1)
    }
    digests = {0: ("w0", "o0"), N: ("wn", "on"), 2 * N: (weights, "o")}
    return traces.Trace(roles=roles or {}, steps=steps, digests=digests)


BASE = [2.0 - 0.1 * k for k in range(2 * N)]


def wobble(scale):
    return [loss + scale * (-1) ** k for k, loss in enumerate(BASE)]


def test_noise_of_the_job_itself_is_no_fault_and_more_than_that_is():
    straight, second = made_up(BASE), made_up(wobble(1e-4), weights="x")
    close, far = made_up(wobble(2e-4), weights="y"), made_up(wobble(1e-2), weights="y")
    assert traces.compare(straight, close, resume_step=N, second=second).outcome == "within noise"
    assert traces.compare(straight, far, resume_step=N, second=second).outcome == "differs"
    # A job that repeats itself has no noise to hide in.
    assert traces.compare(straight, close, resume_step=N, second=made_up(BASE)).outcome == "differs"
    # Other seeds are no noise either.
    reseeded = made_up(wobble(1e-1), rng="s")
    assert traces.compare(straight, close, resume_step=N, second=reseeded).outcome == "differs"


def test_equal_losses_over_unequal_weights_are_not_bitwise():
    verdict = traces.compare(made_up(BASE), made_up(BASE, weights="other"), resume_step=N)
    assert (verdict.outcome, verdict.first_step, verdict.differs) == ("differs", 2 * N, ["weights"])


def test_nan_is_equal_to_nan_and_to_nothing_else():
    broken = [*BASE[:-1], float("nan")]
    assert traces.compare(made_up(broken), made_up(broken), resume_step=N).outcome == "bitwise"
    assert traces.compare(made_up(BASE), made_up(broken), resume_step=N).outcome == "differs"


@pytest.mark.parametrize(
    "at, roles, likely",
    [
        (N + 1, {"dataloader": 1}, "data order"),
        (N + 2, {"optimizer": 0, "scheduler": 1, "scaler": 1}, "optimizer"),
        (N + 2, {"optimizer": 1, "scheduler": 1, "scaler": 1}, "optimizer"),
        (N + 4, {"optimizer": 1, "scheduler": 1, "scaler": 1}, "data order"),
        (2, {}, "nondeterminism"),
    ],
)
def test_where_it_begins_to_differ_says_what_it_is(at, roles, likely):
    losses = [loss + (0.3 if k + 1 >= at else 0.0) for k, loss in enumerate(BASE)]
    verdict = traces.compare(made_up(BASE), made_up(losses, roles=roles), resume_step=N)
    assert (verdict.first_step, verdict.likely) == (at, likely)


def test_state_that_is_put_back_wrongly_is_named():
    resumed = made_up(wobble(0.1)[:0] or BASE)
    resumed.digests[N] = ("wn", "other")
    assert traces.compare(made_up(BASE), resumed, resume_step=N).likely == "optimizer"
    resumed.digests[N] = ("other", "on")
    assert traces.compare(made_up(BASE), resumed, resume_step=N).likely == "model"


def test_random_numbers_that_part_first_are_named():
    losses = [loss + (0.3 if k + 1 >= N + 4 else 0.0) for k, loss in enumerate(BASE)]
    resumed = made_up(losses, roles={"optimizer": 1, "scheduler": 1, "scaler": 1, "dataloader": 1})
    for k in range(N + 2, 2 * N + 1):
        resumed.steps[k] = dataclasses.replace(resumed.steps[k], rng={"torch": "other"})
    verdict = traces.compare(made_up(BASE), resumed, resume_step=N)
    assert verdict.likely == "random numbers"
    assert f"step {N + 2}" in verdict.because


def test_a_schedule_that_depends_on_the_number_of_workers_is_found():
    verdict = traces.compare(made_up(BASE), made_up(BASE, lr="0x1p-4"), resume_step=N, same_world=False)
    assert (verdict.outcome, verdict.likely) == ("differs", "nondeterminism")
    late = made_up(wobble(1e-6))
    for k in range(1, N + 1):
        late.steps[k] = made_up(BASE).steps[k]
    late.steps[N + 1] = dataclasses.replace(late.steps[N + 1], lr=[["0x1p-4"]])
    assert traces.compare(made_up(BASE), late, resume_step=N, same_world=False).likely == "scheduler"


def test_the_picture_shows_both_curves_and_survives_gaps():
    text = curves.svg([1.0, None, 0.5, float("nan")], [1.0, 0.9, 0.6, 0.2], resume_step=2, title="a < b")
    assert text.count("<polyline") == 3
    assert "a &lt; b" in text
    assert "nan" not in text
    assert curves.svg([], [], resume_step=1, title="nothing").startswith("<svg")
