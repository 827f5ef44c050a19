"""A run whose slow tier is S3, over HTTP that fails: training does not notice, and goes on from there when the disks are gone."""

from __future__ import annotations

import logging
import shutil
import signal
import uuid

import pytest
from faulty_proxy import FaultyProxy

from ckptd.core import events as ev

pytest.importorskip("s3fs", reason="no s3fs here")
moto = pytest.importorskip("moto.server", reason="no moto here")
pytestmark = pytest.mark.system


@pytest.fixture
def s3(monkeypatch):
    """A proxy before a server that has one bucket, and the environment that leads there."""
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    try:
        with FaultyProxy(running.get_host_and_port()) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            proxy.bucket = f"bucket-{uuid.uuid4()}"
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(proxy.bucket)
            yield proxy
    finally:
        running.stop()


@pytest.mark.timeout(400)
def test_training_goes_on_whatever_the_store_does_and_resumes_from_it(make_job, s3, tmp_path):
    disk = tmp_path / "disk"
    job = make_job(
        "--steps", "100000", "--pause", "0.05", devices=1,
        checkpoint={"interval": {"steps": 10}, "tiers": [
            {"name": "disk", "path": str(disk), "keep_last": 3},
            {"name": "far", "url": f"s3://{s3.bucket}/ckptd", "keep_last": 2, "promote": 1},
        ]},
    )  # fmt: skip
    # It takes what is sent and does not answer: the copy stands, and no step waits for it.
    s3.inject("stall", r"PUT .*__\d", times=1000)
    job.start()
    job.wait_until(lambda: s3.hit["stall"] >= 1, "an upload stands still")
    committed = max(e.step for e in job.of(ev.SaveCommitted))
    job.wait_for(ev.SaveCommitted, lambda e: e.step >= committed + 30)
    assert not job.of(ev.CheckpointCopied)
    # It comes back, and forbids everything: that is said in words that name the object and the reason.
    s3.inject("status", r"PUT ", code=403, times=10_000)
    s3.faults.reverse()
    s3.release.set()
    failed = job.wait_for(ev.CopyFailed)
    assert failed.error.startswith(f"s3://{s3.bucket}/ckptd/job/step_"), failed
    assert "to order" in failed.error or "denied" in failed.error.lower() or "forbidden" in failed.error.lower(), failed
    s3.clear()
    copied = job.wait_for(ev.CheckpointCopied)
    assert copied.tier == "far"
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()
    last = job.of(ev.SaveCommitted)[-1]
    assert job.of(ev.CheckpointCopied)[-1].step == last.step, job.output()

    shutil.rmtree(disk)
    job.start()
    resumed = job.wait_for(ev.AttemptLaunched, lambda e: e.attempt == 2).resume
    assert (resumed["step"], resumed["tier"], resumed["fetched_from"]["tier"]) == (last.step, "disk", "far")
    assert job.wait_for(ev.FirstStep, lambda e: e.attempt == 2).step == last.step + 1
    job.close()
