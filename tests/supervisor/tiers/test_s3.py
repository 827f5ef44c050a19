"""S3 over real HTTP, and over HTTP that fails: a copy is whole or is not there, is tried again, and says what is wrong."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid

import pytest
from checkpoints import commit
from faulty_proxy import FaultyProxy

from ckptd.node import promote, retire
from ckptd.node.inuse import InUse
from ckptd.node.inventory import Question, inventory
from ckptd.node.promote import Promoter
from ckptd.node.tiers import Tier
from ckptd.tiers import Crew, NoSuchFile, StoreError, copy_checkpoint, objects, open_store, verify
from ckptd_shim.contract import COMMITTED

pytest.importorskip("s3fs", reason="no s3fs here")
moto = pytest.importorskip("moto.server", reason="no moto here")

NAME = "step_000000010.a0001"
FILES = 2
SIZE = 11 << 20
PATIENCE_S = 60.0
UPLOAD = r"PUT .*(partNumber|__\d)"


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    yield running.get_host_and_port()
    running.stop()


@pytest.fixture
def proxy(server, monkeypatch):
    """S3 behind a proxy; its bucket is of this test alone."""
    with FaultyProxy(server) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setattr(objects, "PART", 5 << 20)  # the least that S3 takes: these files go up in two parts
        running.bucket = f"bucket-{uuid.uuid4()}"
        filesystem().mkdir(running.bucket)
        yield running


def filesystem():
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "memory" / "job", 10, 1, size=SIZE, files=FILES)
    return open_store(str(tmp_path / "memory" / "job"))


@pytest.fixture
def far(proxy):
    return open_store(f"s3://{proxy.bucket}/prefix/job")


def test_a_copy_goes_up_in_parts_comes_back_whole_and_is_deleted(proxy, source, far, tmp_path):
    assert far.names() == []
    done = copy_checkpoint(source, far, NAME)
    assert done.bytes == FILES * SIZE
    assert sum("partNumber=2" in line for line in proxy.seen) == FILES
    puts = [line for line in proxy.seen if re.match(r"PUT|POST", line)]
    assert COMMITTED in puts[-1], "COMMITTED was not the last thing written"
    assert far.names() == [NAME]
    assert verify(far, NAME).step == 10
    assert copy_checkpoint(source, far, NAME).moved == 0
    back = open_store(str(tmp_path / "back"))
    copy_checkpoint(far, back, NAME)
    assert back.sizes(NAME) == source.sizes(NAME) == far.sizes(NAME)
    far.delete(NAME)
    assert far.names() == []
    with pytest.raises(NoSuchFile):
        far.marker(NAME)


@pytest.mark.parametrize(
    ("fault", "match", "options"),
    [
        ("status", UPLOAD, {"code": 503, "times": 2}),
        ("status", UPLOAD, {"code": 500, "times": 2}),
        ("reset", UPLOAD, {"times": 1}),
        ("half", r"GET .*__\d", {"times": 1}),
        ("slow", UPLOAD, {"rate": 30_000_000, "times": 2}),
    ],
)
def test_what_passes_is_ridden_out(proxy, source, far, fault, match, options):
    """In one try or the next: a fault costs no more than the file that it hit."""
    proxy.inject(fault, match, **options)
    for _ in range(3):
        try:
            copy_checkpoint(source, far, NAME)
            break
        except StoreError as error:
            assert proxy.url not in str(error) or "s3://" in str(error), "it does not say which object"
            with pytest.raises(NoSuchFile):
                far.marker(NAME)
    assert proxy.hit[fault] >= 1, "nothing was put in"
    verify(far, NAME)


def test_a_store_that_forbids_says_so_and_has_nothing_that_looks_committed(proxy, source, far):
    proxy.inject("status", UPLOAD, code=403, times=1000)
    with pytest.raises(
        StoreError, match=rf"s3://{proxy.bucket}/prefix/job/{NAME}/.*([Dd]enied|[Ff]orbidden|to order)"
    ) as caught:
        copy_checkpoint(source, far, NAME)
    assert len(str(caught.value)) < 400
    proxy.clear()
    with pytest.raises(NoSuchFile):
        far.marker(NAME)
    copy_checkpoint(source, far, NAME)
    verify(far, NAME)


def uploads(proxy):
    """Keys of uploads that were begun and are not over: they are paid for, and no listing shows them."""
    found = filesystem().call_s3("list_multipart_uploads", Bucket=proxy.bucket).get("Uploads", [])
    return sorted(each["Key"] for each in found)


def test_an_upload_that_fails_or_is_killed_half_way_leaves_no_parts_that_nobody_sees(proxy, source, far):
    proxy.inject("status", r"PUT .*partNumber=2", code=403, times=1)
    with pytest.raises(StoreError):
        copy_checkpoint(source, far, NAME)
    assert uploads(proxy) == []
    # One that was killed could not take back what it had begun: the next copy does, and so does a deletion.
    fs = filesystem()
    others = [f"elsewhere/{NAME}/__0_0.distcp", f"prefix/job/{NAME}0/__0_0.distcp"]
    for key in (f"prefix/job/{NAME}/__0_0.distcp", *others):
        fs.call_s3("create_multipart_upload", Bucket=proxy.bucket, Key=key)
    copy_checkpoint(source, far, NAME)
    assert uploads(proxy) == others, "what is not of this copy is none of its business"
    fs.call_s3("create_multipart_upload", Bucket=proxy.bucket, Key=f"prefix/job/{NAME}/__0_0.distcp")
    far.delete(NAME)
    assert uploads(proxy) == others


@pytest.fixture
def promoting(monkeypatch):
    monkeypatch.setattr(promote, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(promote, "DRAIN_RETRY_S", 0.05)
    made = []

    def start(tiers, **options):
        events, news = [], threading.Condition()

        def tell(kind, **data):
            with news:
                events.append((kind, data))
                news.notify_all()

        def wait_for(kind, tier, where=lambda _data: True):
            def found():
                return next((d for k, d in events if (k, d["tier"]) == (kind, tier) and where(d)), None)

            with news:
                assert news.wait_for(found, PATIENCE_S), events
                return found()

        promoter = Promoter(tiers=tiers, run_id="r", crew=Crew(), in_use=InUse(), tell=tell, **options)
        made.append(promoter)
        return promoter, wait_for

    yield start
    for promoter in made:
        promoter.close()


@pytest.fixture
def place(tmp_path, proxy):
    return [
        Tier(name="memory", directory=str(tmp_path / "memory" / "job")),
        Tier(name="disk", directory=str(tmp_path / "disk" / "job")),
        Tier(name="far", directory=f"s3://{proxy.bucket}/prefix/job", keep_last=1),
    ]


def test_an_upload_that_stalls_delays_no_other_tier_and_is_made_when_the_store_comes_back(proxy, place, promoting):
    proxy.inject("stall", UPLOAD, times=1000)
    promoter, wait_for = promoting(place, stall_s=1.0)
    for sequence in (1, 2):
        commit(place[0], 10 * sequence, sequence, size=600_000, files=FILES)
        promoter.committed(sequence)
        wait_for("checkpoint_copied", "disk", lambda d, now=sequence: d["sequence"] == now)
    assert "no progress" in wait_for("copy_failed", "far")["error"]
    proxy.clear()
    wait_for("checkpoint_copied", "far", lambda d: d["step"] == 20)
    assert verify(place[2].store(), "step_000000020.a0001").sequence == 2


def test_when_the_host_is_lost_the_run_goes_on_from_s3_through_faults(proxy, place, promoting, tmp_path):
    """Everything is copied, the disks are gone, and the store answers badly now and then while it is fetched."""
    commit(place[0], 10, 1, size=600_000, files=FILES)
    promoter, wait_for = promoting(place)
    wait_for("checkpoint_copied", "far")
    commit(place[0], 20, 2, size=600_000, files=FILES)
    promoter.committed(2)
    assert promoter.drain(PATIENCE_S) == []
    gone = retire.prune(place[2], retire.Holdings(run_id="r"))
    assert [item.step for item in gone] == [10]
    fs = filesystem()
    assert {path.split("/")[3] for path in fs.find(f"{proxy.bucket}/prefix")} == {"step_000000020.a0001"}
    for tier in place[:2]:
        os.rename(tier.directory, f"{tier.directory}.away")
    proxy.inject("status", r"GET .*__0", code=503, times=2)
    proxy.inject("half", r"GET .*__1", times=1)
    answer = inventory(Question(tiers=place, run_id="r", expected={"memory": 2, "disk": 2, "far": 2}))
    assert answer["chosen"] is not None, answer
    assert (answer["chosen"]["step"], answer["chosen"]["tier"]) == (20, "memory")
    assert answer["chosen"]["fetched_from"]["tier"] == "far"
    verify(place[0].store(), "step_000000020.a0001")


def test_a_store_that_cannot_be_reached_is_waited_for_and_is_not_taken_for_an_empty_one(proxy, place, promoting):
    begun = time.monotonic()
    commit(place[0], 10, 1, size=1000)
    promoter, _ = promoting(place)
    assert promoter.drain(PATIENCE_S) == []
    for tier in place[:2]:
        os.rename(tier.directory, f"{tier.directory}.away")
    proxy.inject("status", "", code=403, times=10_000)
    answer = inventory(Question(tiers=place, run_id="r"))
    assert answer["chosen"] is None
    assert "tier 'far' cannot be read: s3://" in answer["problem"]
    proxy.clear()
    assert inventory(Question(tiers=place, run_id="r"))["chosen"]["step"] == 10
    assert time.monotonic() - begun < PATIENCE_S
