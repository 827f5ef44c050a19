"""`ckptd prove` on real jobs: a sound one passes, a forgetful one is told what it forgets; ends that are none are told apart."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ckptd.cli import main
from ckptd.core import events as ev
from system.harness import Job

SCRIPT = Path(__file__).parent / "forgetful.py"
pytestmark = pytest.mark.timeout(400)


def prove(job: Job, *args: str) -> tuple[int, dict[str, object], str]:
    done = job.ckptd("prove", str(job.path), "--json", *args, timeout=380)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_a_job_whose_worker_is_killed_resumes_bit_for_bit(make_job, tmp_path):
    job = make_job("--workers", "1", script=SCRIPT, batch={"micro": 3})
    curve, kept = tmp_path / "curve.svg", tmp_path / "kept"
    status, found, errors = prove(job, "--steps", "6", "--kill", "--curve", str(curve), "--directory", str(kept))
    assert (status, found.get("verdict")) == (0, "bitwise"), errors
    assert (found["worlds"], found["killed"], found["resume_step"], found["first_step"]) == ([2, 2], True, 6, None)
    losses = found["losses"]
    assert losses["straight"] == losses["resumed"]
    assert len(set(losses["straight"])) == 12
    # The proof is worth something only if it was interrupted: two attempts, the second from step 6.
    assert sorted(path.name for path in (kept / "resumed" / "run" / "attempts").iterdir()) == ["0001", "0002"]
    assert (
        json.loads((kept / "resumed" / "run" / "attempts" / "0002" / "launch.json").read_text())["resume"]["step"] == 6
    )
    assert len(ET.parse(curve).findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
    assert not job.run_dir.exists()  # the job's own directories are left alone
    assert not job.tier.exists()


def test_a_forgotten_scheduler_is_named_and_the_status_is_1(make_job):
    job = make_job("--forget", "scheduler", script=SCRIPT, devices=1)
    done = job.ckptd("prove", str(job.path), "--steps", "5", timeout=380)
    assert done.returncode == 1, done.stderr
    assert "DIFFERS" in done.stdout
    assert "likeliest cause: scheduler" in done.stdout
    assert "first difference at step 6" in done.stdout


def test_fewer_workers_are_compared_within_a_tolerance(make_job):
    job = make_job("--dropout", "0", "--precise", script=SCRIPT)
    status, found, errors = prove(job, "--steps", "5", "--worlds", "2,1")
    assert (status, found.get("verdict")) == (0, "within noise"), (found, errors)
    assert found["worlds"] == [2, 1]


def test_a_job_that_ends_too_soon_proves_nothing(make_job):
    job = make_job("--steps", "4", script=SCRIPT, devices=1)
    status, found, errors = prove(job, "--steps", "5")
    assert (status, found) == (1, {})
    assert "finished" in errors
    assert "give --steps a smaller number" in errors


@pytest.mark.parametrize(
    "args, words",
    [
        (["--steps", "1"], "2 at least"),
        (["--worlds", "2"], "two numbers"),
        (["--worlds", "2,5"], "does not divide the global batch of 12"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_runs(tmp_path, capsys, args, words):
    job = Job(tmp_path, script=SCRIPT)
    assert main(["prove", str(job.path), *args]) == 64
    assert words in capsys.readouterr().err


def test_an_end_without_one_step_is_no_end_of_training(make_job):
    job = make_job("--steps", "0", script=SCRIPT, devices=1)
    assert job.run() == 1
    ended = job.of(ev.RunEnded)[-1]
    assert (ended.outcome, ended.exit_status) == ("ended early", 1)
    assert "without one new step" in ended.detail
    assert job.status()["outcome"]["outcome"] == "ended early"


def test_a_dataset_smaller_than_a_batch_is_tried_once(make_job):
    job = make_job("--samples", "5", script=SCRIPT, devices=1)
    assert job.run() == 1
    assert len(job.of(ev.AttemptLaunched)) == 1
    ended = job.of(ev.RunEnded)[-1]
    assert "no restart cures this" in ended.detail
    assert "the dataset has 5 samples, fewer than one global batch of 12" in ended.detail
