"""Whatever is in a file: rows, or words that say what to do, and never anything else."""

from datetime import UTC

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.sitelog import Log, summarize
from ckptd.errors import UsageError
from ckptd.sitelogs import importing
from ckptd.sitelogs.reading import Options

CSV = b"time,kind,cause,end,down_time\n2026-03-01 10:00,start,,,\n2026-03-02 10:00,failure,gpu,2026-03-02 11:00,60\n"
COUNTS = b"name,gpus,first,last,failures\na,8,2026-03-01,2026-04-01,3\n"
JOBS = (
    b"JobID|JobName|State|Start|End|Elapsed|NNodes\n"
    b"1|a|FAILED|2026-03-01T00:00:00|2026-03-01T02:00:00|02:00:00|2\n"
    b"2|b|RUNNING|2026-03-01T00:00:00|Unknown|02:00:00|2\n"
)
BITS = [
    b"|", b",", b'"', b"\n", b"\r", b"Unknown", b"-1", b"9" * 30, b"nan", b"inf", b"1e400", b"\xff", b"\0", b"0001-01-01 00:00",
    b"9999-12-31 23:59", b"-", b"[", b"2026-03-29 02:30", b"\xe2\x80\xa8", b"failure", b"start", b";", b"|#", b"", b" ",
]  # fmt: skip


@given(
    data=st.sampled_from([CSV, COUNTS, JOBS]),
    changes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.sampled_from(BITS)), max_size=8),
    devices=st.sampled_from([None, 8.0]),
    zone=st.sampled_from([None, UTC]),
)
def test_no_file_is_too_strange(data, changes, devices, zone):
    for at, length, bit in changes:
        data = data[:at] + bit + data[at + length :]
    options = Options(source="f", zone=zone, devices=devices, devices_per_node=4.0 if devices is None else None)
    try:
        parsed = importing.read(data, options)
    except UsageError as error:
        assert str(error)
        return
    if parsed is None:
        return
    assert len(parsed.rows) <= parsed.read
    found = summarize(Log(name="l", form=parsed.form, devices=devices), parsed.rows)
    assert 0 <= found.exposure_device_s < 1e25
    assert found.counted <= found.failures


def test_three_files_of_three_kinds():
    options = Options(source="f", zone=UTC, devices=8.0)
    forms = [parsed.form for data in (CSV, COUNTS, JOBS) if (parsed := importing.read(data, options)) is not None]
    assert forms == ["events", "counts", "jobs"]
