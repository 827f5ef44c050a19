"""Two daemons, a killed daemon, a taken port, odd names, a wrong clock, rubbish in the control file: training goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd.core import events as ev
from ckptd.node import processes
from ckptd_shim import contract
from system.harness import PATIENCE_S, TRAIN

pytestmark = pytest.mark.system


def test_one_daemon_at_a_time_and_the_next_one_adopts_what_a_killed_one_left(make_job, reference):
    job = make_job("--steps", "120", "--pause", "0.04")
    first = job.start()
    job.wait_for(ev.SaveCommitted)
    workers = job.workers()

    refused = job.ckptd("run", str(job.path))
    assert refused.returncode == 64
    assert f"process {first.pid}" in refused.stderr
    assert f"ckptd stop {job.run_dir}" in refused.stderr
    assert len(job.of(ev.DaemonStarted)) == 1

    first.kill()
    first.wait()
    stale = job.run_dir / "ckptd.sock"
    assert stale.is_socket(), "left by the killed daemon, for the next one to replace"
    job.start()
    job.wait_for(ev.AgentConnected, lambda e: e.running == 1)
    assert job.wait() == 0, job.output()
    assert job.workers() == workers
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1]
    assert job.of(ev.Interrupted) == []
    assert job.losses() == reference(120)
    assert not stale.exists()


def test_a_taken_port_is_said_before_anything_starts(make_job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = make_job(web={"listen": f"127.0.0.1:{port}"})
        assert job.run() == 78
    said = job.output()
    assert f"web.listen: 127.0.0.1:{port} cannot be listened on: Address already in use" in said
    assert "name another port in job.yaml" in said
    assert "Traceback" not in said
    assert job.events() == []
    assert not (job.run_dir / "agent-local.json").exists()
    done = job.ckptd("status", str(job.run_dir), "--json")
    assert (done.returncode, done.stdout) == (64, "")
    assert "was never started" in done.stderr


def test_names_with_spaces_and_any_letters_and_a_path_longer_than_a_socket_may_have(make_job, tmp_path):
    directory = tmp_path / "ein Verzeichnis, größer ☃" / ("d" * 120)
    directory.mkdir(parents=True)
    script = directory / "mein skript.py"
    script.write_text(TRAIN.read_text())
    job = make_job("--steps", "100000", "--pause", "0.05", devices=1, script=script, run_dir=str(directory / "mein lauf"),
                   checkpoint={"tiers": [{"name": "disk", "path": str(directory / "die Stände")}]})  # fmt: skip
    job.run_dir = directory / "mein lauf"
    job.start()
    job.wait_for(ev.FirstStep)
    assert job.status()["daemon"]["pid"] == job.process.pid
    assert job.ckptd("save", str(job.run_dir)).returncode == 0
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75, job.output()
    assert "die Stände" in job.ckptd("checkpoints", str(job.run_dir)).stdout


def test_a_shell_that_closed_every_stream_runs_it_all_the_same(make_job):
    job = make_job("--steps", "20")
    job.process = subprocess.Popen(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-m", "ckptd", "run", str(job.path)],
        start_new_session=True,
    )
    assert job.wait() == 0, job.story()
    assert job.of(ev.RunEnded)[-1].outcome == "finished"


def test_a_tier_that_cannot_be_written_is_said_before_anything_starts(make_job, tmp_path):
    (tmp_path / "file").write_text("")
    job = make_job(checkpoint={"tiers": [{"name": "disk", "path": f"{tmp_path}/file/ckpt"}]})
    assert job.run() == 78
    assert f"checkpoints cannot be written to {tmp_path}/file/ckpt/job: Not a directory" in job.output()
    assert job.events() == []
    assert not (job.run_dir / "agent-local.json").exists()


@pytest.mark.parametrize("daemon", ["alive", "killed"])
def test_a_run_directory_removed_under_its_run_ends_it_with_its_state_saved(make_job, reference, daemon):
    job = make_job("--steps", "200", "--pause", "0.04")
    job.start()
    committed = job.wait_for(ev.SaveCommitted)
    workers = job.workers()
    if daemon == "killed":
        job.process.kill()
        job.process.wait()
    shutil.rmtree(job.run_dir, ignore_errors=True)  # a file that is made meanwhile may keep it
    shutil.rmtree(job.run_dir, ignore_errors=True)
    if daemon == "alive":
        assert job.wait() == 75, job.output()
        assert f"the run directory {job.run_dir} was removed or replaced while the run lives" in job.output()
        assert not job.run_dir.exists()
    job.wait_until(lambda: not any(map(processes.identify, workers.values())), "the workers are gone")
    shutil.rmtree(job.run_dir, ignore_errors=True)

    assert job.run() == 0, job.output()
    (launched,) = job.of(ev.AttemptLaunched)
    assert launched.resume["step"] > committed.step, "saved when the directory was seen to be gone"
    assert "of an earlier run named 'job'" in job.output()
    assert job.losses() == reference(200)


SET_BACK = """
import os, time
_real, _begun = time.time, time.monotonic()
time.time = lambda: _real() - (3600.0 if time.monotonic() - _begun > float(os.environ["SET_BACK_AFTER"]) else 0.0)
"""


def test_a_wall_clock_that_goes_back_an_hour_moves_labels_and_nothing_else(make_job, tmp_path):
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SET_BACK)
    job = make_job("--steps", "60", "--pause", "0.03", "--fault", "kill:35:0:1", devices=1)
    begun = time.monotonic()
    job.start(env={"PYTHONPATH": str(tmp_path / "clock"), "SET_BACK_AFTER": "3"})
    assert job.wait() == 0, job.output()
    took = time.monotonic() - begun
    events = job.events()
    labels = [e.at for e in events]
    assert max(labels) - labels[-1] > 3000, "the clock was not set back in this test"
    status = job.status()
    goodput = status["goodput"]
    assert 0 < goodput["wall_s"] < took
    assert sum(goodput["seconds_by_phase"].values()) == pytest.approx(goodput["wall_s"], abs=1e-6)
    assert min(goodput["seconds_by_phase"].values()) >= 0
    restarted = job.of(ev.Restarted)
    assert len(restarted) == 1
    assert 0 < restarted[0].total_s < took
    for save in job.of(ev.SaveCommitted):
        assert 0 <= save.stall_s <= save.upload_s < took
    estimates = status["estimates"]
    assert 0 < estimates["restart_s"] < took
    assert 0 < estimates["stall_s"] < took
    assert estimates["mtbf_s"] > 0


def test_a_control_file_that_makes_no_sense_is_noted_and_passed_over(make_job):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=1, checkpoint={"interval": {"steps": 100000}})
    job.start()
    job.wait_for(ev.FirstStep)
    control = job.run_dir / contract.CONTROL_FILE
    assert job.ckptd("save", str(job.run_dir)).returncode == 0
    good = json.loads(control.read_bytes())
    documents = {
        "is not JSON": b"\x00\xff rubbish",
        "lacks": b"{}",
        "should be an object": b"[1, 2]",
        "it is for attempt 7": json.dumps({**good, "attempt": 7, "seq": good["seq"] + 1}).encode(),
        "is not above": json.dumps({**good, "seq": 1, "stop_after_save": True}).encode(),
        "makes no sense": json.dumps({**good, "seq": good["seq"] + 1, "interval_s": -1.0}).encode(),
    }
    for why, data in documents.items():
        contract.write_atomically(control, data)
        noted = job.wait_for(ev.Noted, lambda e, why=why: why in e.what)
        assert noted.what.startswith("the control file was ignored")
        assert noted.level == "warning"
    before = job.status()["step"]
    job.wait_until(lambda: job.status()["step"] > before, "training goes on")
    assert job.ckptd("save", str(job.run_dir)).returncode == 0, "the daemon's next word counts again"
    assert job.ckptd("stop", str(job.run_dir)).returncode == 0
    assert job.wait() == 75
    assert [e.attempt for e in job.of(ev.AttemptLaunched)] == [1]


STATUS_KEYS = {
    "name", "state", "attempt", "step", "samples_seen", "world_size", "devices_healthy", "last_committed", "interval",
    "estimates", "failures", "restarts", "goodput", "last_interruption",
}  # fmt: skip
INNER_KEYS = {
    "last_committed": {"step", "tier", "at", "path"},
    "interval": {"seconds", "steps", "formula", "clamped_by"},
    "estimates": {"mtbf_s", "mtbf_low_s", "mtbf_high_s", "stall_s", "restart_s", "upload_s", "step_s", "waste"},
    "goodput": {"ratio", "seconds_by_phase", "wall_s"},
    "last_interruption": {"cause", "severity", "node", "rank", "lost_steps", "detail"},
}
METRICS = {
    "ckptd_build_info": (), "ckptd_run_state": ("state",), "ckptd_goodput_ratio": (), "ckptd_phase_seconds": ("phase",),
    "ckptd_interruptions_total": ("cause", "severity"), "ckptd_restarts_total": ("kind",),
    "ckptd_restart_seconds_bucket": ("le",), "ckptd_restart_phase_seconds": ("phase",),
    "ckptd_checkpoints_total": ("tier", "result"), "ckptd_checkpoint_stall_seconds_bucket": ("le",),
    "ckptd_checkpoint_commit_seconds_bucket": ("tier", "le"),
    "ckptd_checkpoint_last_commit_timestamp_seconds": ("tier",), "ckptd_checkpoint_bytes": ("tier",),
    "ckptd_mtbf_seconds": ("bound",), "ckptd_interval_seconds": (), "ckptd_interval_steps": (),
    "ckptd_waste_ratio": ("term",), "ckptd_step": (), "ckptd_step_seconds": (), "ckptd_samples_total": (),
    "ckptd_world_size": (), "ckptd_devices": ("state",), "ckptd_lost_steps_total": (),
    "ckptd_last_heartbeat_timestamp_seconds": (), "ckptd_guard_rejections_total": (),
}  # fmt: skip
PHASES = [
    "productive",
    "checkpoint_stall",
    "wasted_progress",
    "detect",
    "stop",
    "wait_for_devices",
    "launch",
    "init",
    "restore",
    "first_step",
    "startup",
    "drain",
    "other",
]


class Watch:
    """Asks a page over and over: which answers it gave, in order."""

    def __init__(self, url):
        self.answers = []
        self._url = url
        self._answered, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        assert self._answered.wait(PATIENCE_S), "no answer"  # what it says before anything happens is the first
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self):
        while not self._over.is_set():
            answer = page(self._url)
            if answer not in self.answers[-1:]:
                self.answers.append(answer)
                self._answered.set()
            self._over.wait(0.01)


def page(url):
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_what_the_pages_show_after_a_kill_and_a_save(make_job):
    job = make_job(
        "--steps", "100000", "--pause", "0.02", checkpoint={"interval": "auto", "min_interval": "500ms",
        "max_interval": "1s"}, web={"listen": "127.0.0.1:0"},
    )  # fmt: skip
    job.start()
    job.wait_until(lambda: "http://" in job.output(), "it says where its pages are")
    base = "http://" + job.output().partition("http://")[2].split("/")[0]
    ready, healthy = page(f"{base}/-/ready"), page(f"{base}/-/healthy")
    assert (ready[0], healthy[0]) == (503, 200), "alive, and not training yet"
    job.wait_for(ev.SaveCommitted)
    assert page(f"{base}/-/ready") == (200, "training\n")
    with Watch(f"{base}/-/ready") as watch:
        os.kill(job.workers()[1], signal.SIGKILL)
        job.wait_for(ev.Restarted)
        job.wait_until(lambda: watch.answers[-1] == (200, "training\n"), "ready again")
    assert watch.answers[0][0] == 200
    assert {code for code, _ in watch.answers[1:-1]} == {503}, watch.answers
    assert page(f"{base}/-/healthy")[0] == 200
    job.wait_for(ev.SaveCommitted, lambda e: e.attempt == 2)
    job.wait_for(ev.IntervalDecided, lambda e: e.interval_s)
    job.wait_until(lambda: job.status()["estimates"]["waste"] is not None, "what the model expects")
    job.wait_until(lambda: job.status()["interval"]["steps"] is not None, "a step's time")
    job.wait_until(lambda: job.status()["heartbeat_at"] is not None, "a heartbeat")

    status = json.loads(page(f"{base}/api/status")[1])
    assert status.keys() >= STATUS_KEYS
    for name, keys in INNER_KEYS.items():
        assert status[name].keys() >= keys, name
    assert set(status["goodput"]["seconds_by_phase"]) == set(PHASES)
    assert (status["last_interruption"]["cause"], status["last_interruption"]["rank"]) == ("signal", 1)

    samples = {}
    for family in text_string_to_metric_families(page(f"{base}/metrics")[1]):
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    for name, labels in METRICS.items():
        assert name in samples, f"{name} is missing"
        for sample in samples[name]:
            assert set(labels) <= set(sample.labels), name
    assert {s.labels["phase"] for s in samples["ckptd_phase_seconds"]} == set(PHASES)
    assert {s.labels["bound"] for s in samples["ckptd_mtbf_seconds"]} == {"mean", "low", "high"}
    assert {s.labels["term"] for s in samples["ckptd_waste_ratio"]} == {"save", "rework", "restart"}
    assert [(s.labels, s.value) for s in samples["ckptd_interruptions_total"]] == [
        ({"cause": "signal", "severity": "process"}, 1.0)
    ]
    assert samples["ckptd_restart_seconds_count"][0].value == 1
    assert samples["ckptd_restart_seconds_sum"][0].value == pytest.approx(
        sum(s.value for s in samples["ckptd_restart_phase_seconds"])
    )
    assert sum(s.value for s in samples["ckptd_run_state"]) == 1
    committed = {s.labels["result"]: s.value for s in samples["ckptd_checkpoints_total"]}
    assert committed["committed"] >= 2
    assert samples["ckptd_step"][0].value > 0
    assert samples["ckptd_checkpoint_bytes"][0].value > 1000
    assert abs(samples["ckptd_last_heartbeat_timestamp_seconds"][0].value - time.time()) < 10

    told = json.loads(page(f"{base}/api/overview")[1])
    (interruption,) = told["interruptions"]
    assert (interruption["cause"], interruption["rank"], interruption["attempt"]) == ("signal", 1, 1)
    assert told["restarts"]["newest"][0]["total_s"] == pytest.approx(samples["ckptd_restart_seconds_sum"][0].value)
    assert told["checkpoints"]["disk"]["committed"] >= committed["committed"]
    spent = told["timeline"]["seconds_by_phase"]
    assert sum(map(sum, spent.values())) == pytest.approx(told["wall_s"], rel=1e-3)
    assert sum(spent["wasted_progress"]) == pytest.approx(
        status["last_interruption"]["lost_seconds"], rel=1e-3, abs=1e-3
    )
    report = job.directory / "report.html"
    assert job.ckptd("report", str(job.run_dir), "-o", str(report)).returncode == 0
    assert interruption["detail"] in report.read_text()

    for address, code in (("/", 200), ("/static/page.js", 200), ("/nothing", 404)):
        assert page(base + address)[0] == code
    assert job.ckptd("stop", str(job.run_dir), "--now").returncode == 0
    assert job.wait() == 75
    with pytest.raises(OSError, match="refused"):
        page(f"{base}/-/healthy")
