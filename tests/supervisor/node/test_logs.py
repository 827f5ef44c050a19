"""Logs that are cut while they are written, and attempts that are forgotten."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ckptd.node import logs
from ckptd.node.logs import Rules

KIB = 1024
SMALL = Rules(max_size=64 * KIB, keep=2, keep_attempts=3)


def on_disk(directory):
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))


def test_a_log_within_its_size_is_left_alone(tmp_path):
    log = tmp_path / "rank0.out"
    log.write_bytes(b"x" * 64 * KIB)
    assert logs.trim(str(log), SMALL) == 0
    assert logs.trim(str(log), Rules(max_size=None)) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.out"]


def test_a_log_that_is_too_large_becomes_the_newest_piece_and_the_oldest_goes(tmp_path):
    log = tmp_path / "rank0.out"
    for piece in (b"a", b"b", b"c", b"d"):
        with log.open("ab") as file:
            file.write(piece * 65 * KIB)
        logs.trim(str(log), SMALL)
    assert log.read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.out", "rank0.out.1", "rank0.out.2"]
    for name, piece in (("rank0.out.1", b"d"), ("rank0.out.2", b"c")):
        first, _, rest = (tmp_path / name).read_bytes().partition(b"\n")
        assert first == b"[ckptd: 1024 bytes before this were thrown away: logs.max_size]"
        assert rest == piece * 64 * KIB


@pytest.mark.parametrize("append", [True, False])
def test_a_rank_that_prints_without_end_and_without_a_newline_does_not_fill_the_disk(tmp_path, append):
    """One whose file is not open for appending leaves holes: its size grows, what it takes up does not."""
    log, total = tmp_path / "rank0.out", 64 << 20
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)
    writer = (
        f"import os; fd = os.open({str(log)!r}, {flags}); [os.write(fd, b'x' * 65536) for _ in range({total >> 16})]"
    )
    process = subprocess.Popen([sys.executable, "-c", writer])
    most = 0
    try:
        while process.poll() is None:
            logs.trim_all([str(log)], Rules(max_size=1 << 20, keep=2))
            most = max(most, on_disk(tmp_path))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    logs.trim_all([str(log)], Rules(max_size=1 << 20, keep=2))
    assert on_disk(tmp_path) <= 4 << 20
    assert most < total
    assert logs.tail(str(log)).endswith("x" * 1000)


def test_every_line_is_in_one_piece_or_the_next(tmp_path):
    """Nothing is lost or told twice where pieces are kept for all of it."""
    log, count = tmp_path / "rank0.err", 20_000
    writer = (
        f"import os; fd = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        f"for i in range({count}): os.write(fd, b'line %d\\n' % i)"
    )
    process = subprocess.Popen([sys.executable, "-c", writer])
    rules = Rules(max_size=64 * KIB, keep=100)
    lost = 0
    try:
        while process.poll() is None:
            lost += logs.trim(str(log), rules)
    finally:
        process.kill()
        process.wait()
    pieces = sorted(tmp_path.iterdir(), key=lambda p: -int(p.suffix[1:]) if p.suffix != ".err" else 0)
    told = [int(n) for piece in pieces for n in re.findall(r"^line (\d+)\n", piece.read_text(), re.MULTILINE)]
    assert told == sorted(set(told))
    assert len(pieces) > 1
    # A line that is written between the last look at the end and the cut is lost.
    assert len(told) >= count - lost - len(pieces) * 20


def test_the_end_of_a_log_that_was_cut_a_moment_ago_is_told_from_the_piece_before(tmp_path):
    log = tmp_path / "rank0.err"
    (tmp_path / "rank0.err.1").write_text("old\nTraceback:\n")
    log.write_text("ValueError: bad\n")
    assert logs.tail(str(log)) == "old\nTraceback:\nValueError: bad\n"
    assert logs.tail(str(log), 16) == "ValueError: bad\n"
    assert logs.tail(str(tmp_path / "rank7.err")) == ""


def test_a_log_is_cut_even_where_its_copy_cannot_be_written(tmp_path):
    log = tmp_path / "rank0.out"
    log.write_bytes(b"x" * 100 * KIB)
    (tmp_path / "rank0.out.1").symlink_to("/dev/full")
    assert logs.trim(str(log), Rules(max_size=64 * KIB, keep=1)) == 100 * KIB
    assert log.stat().st_size == 0


def test_what_cannot_be_cut_is_told(tmp_path):
    log = tmp_path / "rank0.out"
    log.mkdir()
    assert logs.trim_all([str(log), str(tmp_path / "none")], Rules(max_size=0)).keys() == {str(log)}


def test_the_oldest_attempts_are_forgotten_and_never_one_in_use(tmp_path):
    for name in ("0001", "0002", "0003", "0004", "0005", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.out").write_text("x")
    assert logs.forget_attempts(str(tmp_path), SMALL, in_use={1}) == [2]
    assert sorted(os.listdir(tmp_path)) == ["0001", "0003", "0004", "0005", "notes"]
    assert logs.forget_attempts(str(tmp_path), Rules(keep_attempts=None), in_use=()) == []
    assert logs.forget_attempts(str(tmp_path / "none"), SMALL, in_use=()) == []
    assert logs.forget_attempts(str(tmp_path), Rules(keep_attempts=1), in_use=()) == [1, 3, 4]
