"""The heartbeat page and the report file, with real readers in real processes."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from ckptd_shim import contract
from ckptd_shim.pulse import PulseWriter, ReportWriter, read_pulse_file


def test_a_page_says_what_was_beaten(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    writer = PulseWriter(path)
    before = time.monotonic()
    writer.beat(7, 448, 1.25, 0.5)
    pulse = read_pulse_file(path)
    assert pulse is not None
    assert (pulse.pid, pulse.step, pulse.samples, pulse.loss, pulse.step_s) == (os.getpid(), 7, 448, 1.25, 0.5)
    assert before <= pulse.beat <= time.monotonic()
    assert os.stat(path).st_size == contract.PULSE_SIZE
    assert os.stat(path).st_blocks * 512 >= contract.PULSE_SIZE  # its block is there before a full disk can be
    writer.beat(8, 512)
    pulse = read_pulse_file(path)
    assert pulse is not None
    assert (pulse.loss, pulse.step_s) == (None, None)


def test_a_phase_is_a_beat_and_keeps_the_counters(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    writer = PulseWriter(path)
    writer.beat(7, 448, 1.25, 0.5)
    first = read_pulse_file(path)
    for phase in contract.Phase:
        writer.phase(phase)
        pulse = read_pulse_file(path)
        assert pulse is not None
        assert (pulse.phase, pulse.step, pulse.samples, pulse.loss, pulse.step_s) == (phase, 7, 448, 1.25, 0.5)
        assert pulse.beat > first.beat
    writer.beat(8, 512)
    assert read_pulse_file(path).phase == contract.Phase.END


def test_no_path_no_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = PulseWriter(None)
    writer.phase(contract.Phase.STEP)
    writer.beat(1, 2, 3.0)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_after_close_the_last_reading_stays(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    writer = PulseWriter(path)
    writer.beat(7, 448)
    writer.close()
    writer.close()
    writer.beat(8, 512)
    writer.phase(contract.Phase.END)
    assert read_pulse_file(path).step == 7


def test_the_next_writer_of_a_process_goes_on_and_another_process_begins_afresh(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    code = f"from ckptd_shim.pulse import PulseWriter; w = PulseWriter({path!r}); w.beat(90, 91); w.phase(7)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    other = read_pulse_file(path)
    assert (other.step, other.phase) == (90, contract.Phase.END)
    first = PulseWriter(path)
    mine = read_pulse_file(path)
    assert (mine.pid, mine.step, mine.samples, mine.phase) == (os.getpid(), 0, 0, contract.Phase.IMPORT)
    first.phase(contract.Phase.RESTORE)
    first.beat(5, 50, 2.0)
    PulseWriter(path)
    again = read_pulse_file(path)
    assert (again.step, again.samples, again.loss, again.phase) == (5, 50, 2.0, contract.Phase.RESTORE)


def test_a_page_left_inside_an_update_is_unreadable_until_the_next_writer(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    PulseWriter(path).beat(7, 448)
    with open(path, "r+b") as file:
        file.seek(8)
        seq = int.from_bytes(file.read(8), "little")
        file.seek(8)
        file.write((seq + 1).to_bytes(8, "little"))
    assert read_pulse_file(path) is None
    PulseWriter(path)
    assert read_pulse_file(path).step == 0


@pytest.mark.parametrize("content", [None, b"", b"short", bytes(4096), b"x" * 4096])
def test_what_is_no_page_reads_as_none(tmp_path, content):
    path = tmp_path / "page"
    if content is not None:
        path.write_bytes(content)
    assert read_pulse_file(path) is None


def test_a_reader_never_sees_half_an_update(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    code = f"""
import os
from ckptd_shim.pulse import PulseWriter
w = PulseWriter({path!r})
w.beat(0, 0, 0.0, 0.0)
os.write(1, b"x")
i = 0
while os.getppid() == {os.getpid()}:
    i += 1
    w.beat(i, i, float(i), float(i))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(1) == b"x"
        seen, last, deadline = set(), 0, time.monotonic() + 10
        while len(seen) < 2000 and time.monotonic() < deadline:  # on a busy core the two take long turns
            pulse = read_pulse_file(path)
            if pulse is None:  # preempted inside an update: the reader gave up, and said so
                continue
            assert pulse.step == pulse.samples == pulse.loss == pulse.step_s
            assert pulse.step >= last
            last = pulse.step
            seen.add(last)
        assert len(seen) >= 3
    finally:
        process.kill()
        process.communicate()


def test_many_threads_may_beat(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    writer = PulseWriter(path)

    def work(which):
        for i in range(2000):
            writer.beat(which, which, float(which)) if i % 2 else writer.phase(contract.Phase.STEP)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pulse = read_pulse_file(path)
    assert pulse is not None
    assert pulse.step == pulse.samples == pulse.loss


def test_a_beat_costs_microseconds(tmp_path):
    writer = PulseWriter(str(tmp_path / "rank0.pulse"))
    best = math.inf
    for _ in range(20):
        begun = time.perf_counter()
        for i in range(500):
            writer.beat(i, i, 1.0, 0.1)
        best = min(best, (time.perf_counter() - begun) / 500)
    assert best < 20e-6


def test_a_page_that_cannot_be_made_says_which(tmp_path):
    path = str(tmp_path / "missing" / "rank0.pulse")
    with pytest.raises(FileNotFoundError, match=r"missing/rank0\.pulse"):
        PulseWriter(path)


def test_a_full_disk_shows_at_the_start_and_not_as_a_bus_error(tmp_path):
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
from ckptd_shim.pulse import PulseWriter
try:
    PulseWriter({str(tmp_path / "p")!r})
except OSError as e:
    print(type(e).__name__, e.filename)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"OSError {tmp_path}/p\n"


def test_reading_needs_no_torch(tmp_path):
    path = str(tmp_path / "rank0.pulse")
    PulseWriter(path).beat(3, 4)
    code = f"import sys; from ckptd_shim.pulse import read_pulse_file as r; print(r({path!r}).step, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3 False\n"


# --- report file ----------------------------------------------------------------------------------------------------


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def test_a_line_an_event(tmp_path):
    path = str(tmp_path / "report.jsonl")
    writer = ReportWriter(path)
    before = time.monotonic()
    writer.write(contract.Report.INITIALISED, world_size=3)
    writer.write(
        contract.Report.RESTORED,
        step=5,
        path=None,
        loss=math.nan,
        more=[math.inf, {"x": -math.inf}],
        odd={1},
        text="a\nb",
    )
    first, second = lines(path)
    assert first["kind"] == "initialised"
    assert before <= first["mono"] <= second["mono"] <= time.monotonic()
    assert first["world_size"] == 3
    del second["mono"]
    assert second == {
        "kind": "restored",
        "step": 5,
        "path": None,
        "loss": None,
        "more": [None, {"x": None}],
        "odd": "{1}",
        "text": "a\nb",
    }
    writer.close()
    writer.close()
    writer.write(contract.Report.FINISHED)
    assert len(lines(path)) == 2


def test_two_writers_append(tmp_path):
    path = str(tmp_path / "report.jsonl")
    one, two = ReportWriter(path), ReportWriter(path)
    for i in range(100):
        one.write(contract.Report.SAVE_STAGED, step=i)
        two.write(contract.Report.SAVE_COMMITTED, step=i)
    assert [(line["kind"], line["step"]) for line in lines(path)] == [
        pair for i in range(100) for pair in (("save_staged", i), ("save_committed", i))
    ]


def test_no_path_no_report(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = ReportWriter(None)
    writer.write(contract.Report.FINISHED, step=1)
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_place_that_is_not_there_is_told_once_and_used_once_it_is(tmp_path, capsys):
    path = tmp_path / "later" / "report.jsonl"
    writer = ReportWriter(str(path))
    writer.write(contract.Report.FIRST_STEP, step=1)
    writer.write(contract.Report.FIRST_STEP, step=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(path) in err
    path.parent.mkdir()
    writer.write(contract.Report.FIRST_STEP, step=3)
    assert [line["step"] for line in lines(path)] == [3]


def test_a_full_disk_does_not_raise_and_spoils_one_line_at_most(tmp_path, capsys):
    path = str(tmp_path / "report.jsonl")
    writer = ReportWriter(path)
    writer.write(contract.Report.FIRST_STEP, step=1)
    size = os.stat(path).st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        writer.write(contract.Report.FIRST_STEP, step=2)
        writer.write(contract.Report.FIRST_STEP, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    writer.write(contract.Report.FIRST_STEP, step=4)
    with open(path) as file:
        texts = file.read().splitlines()
    assert len(texts) == 3
    assert json.loads(texts[0])["step"] == 1
    assert json.loads(texts[2])["step"] == 4
    assert capsys.readouterr().err.count("\n") == 1
