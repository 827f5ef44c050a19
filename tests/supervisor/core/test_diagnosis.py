import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import decisions
from ckptd.core.diagnosis import Exit, diagnose

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36262. "
    "This is typically caused by a remote worker crashing."
)
RESET = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:231: Connection reset by peer"
)
TIMED_OUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv"
NCCL_GONE = "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error"
NO_CLIENTS = "Timed out after 61 seconds waiting for clients. 1/2 clients joined."


def raised(rank, type_, message, *, mono=0.0, bases=(), order=0, t=0.0, node="n0", file="/job/train.py", **values):
    traceback = (
        f'Traceback (most recent call last):\n  File "{file}", line 14, in <module>\n    work()\n{type_}: {message}\n'
    )
    error = {"type": type_, "mro": [type_, *bases], "message": message, "traceback": traceback, "at": 0, "mono": mono}
    return Exit(rank=rank, node=node, exitcode=1, order=order, t=t, error=error, **values)


def peer_error(rank, message=CLOSED, **values):
    return raised(rank, "RuntimeError", message, bases=["Exception"], **values)


def victim(rank, **values):
    return Exit(**{"rank": rank, "node": "n0", "exitcode": -15, "order": 9, "t": 9.0, "killed_by_us": True, **values})


def find(*exits, requested_stop=False, **keywords):
    return diagnose(exits, requested_stop=requested_stop, **keywords)


# --- one rank


@pytest.mark.parametrize(
    ("code", "name", "hint"),
    [(-9, "SIGKILL", ""), (-11, "SIGSEGV", ""), (-7, "SIGBUS", "/dev/shm"), (-15, "SIGTERM", "sent from outside")],
)
def test_signals_have_names(code, name, hint):
    found = find(Exit(rank=1, node="n0", exitcode=code), victim(0))
    assert (found.cause, found.severity, found.rank, found.node) == ("signal", "process", 1, "n0")
    assert name in found.detail
    assert hint in found.detail
    assert "memory" not in found.detail


def test_out_of_memory_is_said_only_with_evidence():
    found = find(Exit(rank=1, exitcode=-9), oom_killed=True)
    assert found.cause == "signal"
    assert "SIGKILL" in found.detail
    assert "probably out of memory" in found.detail
    assert "memory" not in find(Exit(rank=1, exitcode=-11), oom_killed=True).detail


def test_real_time_signals_have_no_name():
    assert "signal 250" in find(Exit(rank=1, exitcode=-250)).detail


def test_exit_status():
    found = find(Exit(rank=2, exitcode=3, stderr_tail="one\ntwo\n"), victim(0))
    assert (found.cause, found.severity, found.rank) == ("exit_status", "process", 2)
    assert "status 3" in found.detail
    assert found.message == "one\ntwo"


def test_exception_with_its_last_words():
    found = find(raised(1, "ValueError", "bad batch at step 3\nsecond line"), victim(0))
    assert (found.cause, found.severity, found.rank, found.confidence) == ("exception", "process", 1, "high")
    assert found.detail == "rank 1: ValueError: bad batch at step 3"
    assert found.message.endswith("ValueError: bad batch at step 3\nsecond line")
    assert "/job/train.py" in found.message


def test_a_long_traceback_is_cut_to_its_end():
    exit_ = raised(0, "ValueError", "x")
    exit_.error["traceback"] = "\n".join(f"line {i}" for i in range(500)) + "\nValueError: x"
    message = find(exit_).message
    assert len(message.split("\n")) <= 13
    assert "line 499" in message
    assert "line 100\n" not in message


def test_exception_read_off_standard_error():
    tail = (
        "some warning\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/job/train.py", line 3, in <module>\n[rank1]:     step()\n'
        "[rank1]: my.pkg.BadBatch: number 7\n"
    )
    found = find(Exit(rank=1, exitcode=1, stderr_tail=tail), victim(0))
    assert (found.cause, found.detail) == ("exception", "rank 1: my.pkg.BadBatch: number 7")
    assert "some warning" not in found.message


def test_only_the_last_traceback_of_a_chain_counts():
    tail = (
        "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2\nTypeError: no\n'
    )
    assert find(Exit(exitcode=1, stderr_tail=tail)).detail == "rank 0: TypeError: no"


@pytest.mark.parametrize(
    ("type_", "bases", "message", "cause", "severity"),
    [
        ("torch.OutOfMemoryError", ["RuntimeError"], "CUDA out of memory. Tried to allocate 2 GiB", "cuda_oom", "process"),
        ("RuntimeError", [], "CUDA error: out of memory", "cuda_oom", "process"),
        ("torch.AcceleratorError", [], "CUDA error: uncorrectable ECC error encountered", "device_error", "device"),
        ("ckptd_shim.checkpoint.CheckpointMismatch", ["ckptd_shim.checkpoint.CheckpointError"], "shape", "script_differs", "code"),
        ("my.Own", ["ckptd_shim.checkpoint.CheckpointError"], "digest", "resume_error", "code"),
        ("ckptd_shim.errors.SetupError", ["ValueError"], "the dataset has 5 samples", "setup_error", "code"),
        ("ModuleNotFoundError", ["ImportError"], "No module named 'x'", "exception", "code"),
        ("SyntaxError", [], "invalid syntax", "exception", "code"),
        ("torch.distributed.DistNetworkError", ["RuntimeError"], "failed to bind, EADDRINUSE, Address already in use", "launch", "launch"),
        ("RendezvousTimeoutError", [], "", "launch", "launch"),
        ("torch.distributed.DistStoreError", ["RuntimeError"], NO_CLIENTS, "launch", "launch"),
    ],
)  # fmt: skip
def test_what_exceptions_mean(type_, bases, message, cause, severity):
    found = find(raised(0, type_, message, bases=bases))
    assert (found.cause, found.severity) == (cause, severity)


def test_a_script_that_differs_is_told_with_the_first_difference():
    text = (
        "/c/step_9 was saved by a script that differs from this one:\n  - scheduler 0: was 400, is 60\n  - x\nBuild it."
    )
    found = find(raised(0, "ckptd_shim.errors.CheckpointMismatch", text))
    assert found.detail.endswith("differs from this one: - scheduler 0: was 400, is 60")
    assert found.cause in decisions.INCURABLE


def test_a_port_that_a_running_job_finds_taken_is_its_own_failure():
    assert find(raised(0, "OSError", "Address already in use", step=7)).cause == "exception"


@pytest.mark.parametrize(
    "exit_",
    [
        Exit(exitcode=2, stderr_tail="/v/bin/python: can't open file '/job/trian.py': [Errno 2] No such file or directory\n"),
        Exit(exitcode=1, stderr_tail="/v/bin/python3.11: No module named trian\n"),
        raised(0, "builtins.FileNotFoundError", "'trian.py'", file="<frozen runpy>"),
        raised(0, "ImportError", "No module named trian", file="/usr/lib/python3.11/runpy.py"),
    ],
)  # fmt: skip
def test_script_not_found(exit_):
    found = find(exit_)
    assert (found.cause, found.severity) == ("script_not_found", "code")
    assert "trian" in found.detail


def test_a_file_that_the_script_misses_is_an_exception():
    found = find(raised(0, "FileNotFoundError", "data.bin"))
    assert (found.cause, found.severity) == ("exception", "process")


# --- who was it


def test_a_killed_rank_explains_its_peers_errors():
    found = find(
        peer_error(0, RESET, mono=99.9, order=0, t=50.0),
        Exit(rank=1, node="n0", exitcode=-9, order=1, t=50.1),
        victim(2),
    )
    assert (found.cause, found.rank, found.confidence) == ("signal", 1, "high")


@pytest.mark.parametrize("message", [CLOSED, RESET, NCCL_GONE, TIMED_OUT, NO_CLIENTS])
def test_connection_errors_are_consequences_of_an_exception(message):
    """Rank 0 is first by a hair in every record, and still only says that rank 1 is gone."""
    found = find(
        peer_error(0, message, mono=10.0, order=0, t=50.0), raised(1, "ValueError", "bad", mono=10.01, order=1, t=50.2)
    )
    assert (found.cause, found.rank) == ("exception", 1)


def test_peers_without_error_files_are_consequences_too():
    tail = f'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: {CLOSED}\n'
    found = find(
        Exit(rank=0, exitcode=1, order=0, t=1.0, stderr_tail=tail), Exit(rank=1, exitcode=3, order=1, t=1.1), victim(2)
    )
    assert (found.cause, found.rank) == ("exit_status", 1)


def test_a_watchdog_abort_is_a_consequence_and_a_crash_is_not():
    tail = "[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    abort = Exit(rank=0, exitcode=-6, order=0, t=1.0, stderr_tail=tail)
    assert find(abort, Exit(rank=1, exitcode=-11, order=1, t=2.0)).rank == 1
    assert find(Exit(rank=0, exitcode=-11, order=0, t=1.0, stderr_tail=tail), peer_error(1, order=1, t=2.0)).rank == 0
    assert find(abort).cause == "collective_timeout"


def test_leaving_early_with_status_0():
    found = find(
        peer_error(0, order=0, t=3.0), Exit(rank=1, node="n0", exitcode=0, order=1, t=3.1, step=3), peer_error(2, t=3.0)
    )
    assert (found.cause, found.severity, found.rank) == ("early_exit", "process", 1)
    assert "rank 1 ended early with status 0" in found.detail
    assert "3" in found.detail


def test_a_rank_that_was_done_does_not_explain_an_exception():
    found = find(Exit(rank=0, exitcode=0, order=0, t=1.0), raised(1, "ValueError", "at the end", order=1, t=1.5))
    assert (found.cause, found.rank) == ("exception", 1)


def test_all_ranks_leaving_early():
    found = find(Exit(rank=0, exitcode=0), Exit(rank=1, exitcode=0, order=1))
    assert found.cause == "early_exit"
    assert "every rank" in found.detail


def test_the_exceptions_own_time_beats_the_order_of_death():
    """Rank 1 raised first and died last: its exit handlers took their time."""
    found = find(
        raised(0, "ValueError", "second", mono=102.0, order=0, t=12.1),
        raised(1, "KeyError", "first", mono=100.0, order=1, t=15.0),
    )
    assert found.rank == 1


def test_monotonic_clocks_of_two_hosts_are_not_compared():
    found = find(
        raised(0, "ValueError", "second", mono=5.0, node="n0", t=30.0),
        raised(1, "KeyError", "first", mono=90_000.0, node="n1", t=20.0),
    )
    assert (found.rank, found.node) == (1, "n1")


def test_order_of_death_decides_between_deaths():
    assert find(Exit(rank=0, exitcode=3, order=1, t=2.0), Exit(rank=1, exitcode=-9, order=0, t=1.0)).rank == 1
    assert find(Exit(rank=0, exitcode=3, order=1), Exit(rank=1, exitcode=-9, order=0)).rank == 1


def test_victims_are_no_causes():
    killed = victim(0, order=0, t=0.0, exitcode=-9)
    assert find(killed, Exit(rank=1, exitcode=3, order=1, t=5.0)).rank == 1
    found = find(killed, victim(1))
    assert (found.cause, found.rank, found.confidence) == ("unknown", None, "low")


def test_a_victim_that_had_failed_before_is_shown():
    hung_at_exit = dataclasses.replace(raised(1, "ValueError", "bad batch"), killed_by_us=True, exitcode=-9)
    found = find(victim(0), hung_at_exit)
    assert (found.cause, found.rank) == ("unknown", None)
    assert "bad batch" in found.message
    assert "rank 1" in found.detail
    torn_down = dataclasses.replace(peer_error(1), killed_by_us=True)
    assert find(victim(0), torn_down).message == ""


def test_a_terminated_rank_comes_after_one_that_failed():
    assert find(Exit(rank=0, exitcode=-15, order=0, t=1.0), Exit(rank=1, exitcode=3, order=1, t=1.2)).rank == 1
    assert find(Exit(rank=0, exitcode=-15, order=1, t=1.2), peer_error(1, order=0, t=1.0)).rank == 0


def test_a_death_long_after_is_no_explanation():
    found = find(peer_error(0, order=0, t=10.0, mono=10.0), Exit(rank=1, exitcode=-9, order=1, t=100.0))
    assert (found.cause, found.rank, found.confidence) == ("connection_lost", 0, "low")


def test_only_connection_errors_name_nobody_for_sure():
    found = find(peer_error(0, t=1.0), peer_error(1, t=1.1))
    assert (found.cause, found.confidence) == ("connection_lost", "low")
    found = find(peer_error(0, TIMED_OUT, t=1.0), peer_error(1, TIMED_OUT, t=1.1))
    assert (found.cause, found.confidence) == ("collective_timeout", "low")


def test_a_data_server_that_hangs_up_is_no_peer():
    found = find(
        raised(1, "requests.exceptions.ConnectionError", "Connection refused", bases=["OSError"], t=2.0, order=1),
        peer_error(0, t=1.9),
    )
    assert (found.cause, found.rank) == ("exception", 1)


# --- what is known from elsewhere


def test_a_lost_agent_is_the_cause():
    found = find(peer_error(0), agent_lost=True, node="n1")
    assert (found.cause, found.severity, found.node, found.rank) == ("agent_lost", "node", "n1", None)
    assert find(agent_lost=True).cause == "agent_lost"


def test_a_requested_stop_explains_signals_and_broken_connections():
    exits = [Exit(rank=0, exitcode=0), Exit(rank=1, exitcode=-15), peer_error(2), victim(3)]
    assert find(*exits, requested_stop=True).cause == "requested_stop"
    assert find(*exits, raised(4, "ValueError", "x"), requested_stop=True).rank == 4


def test_no_evidence():
    assert find().cause == "unknown"
    assert find(Exit(rank=0)).cause == "unknown"


def test_evidence_travels_as_json():
    exit_ = raised(1, "ValueError", "x", mono=1.0, t=2.0)
    data = json.loads(json.dumps(dataclasses.asdict(exit_)))
    assert Exit.from_json(data | {"from_the_future": 1}) == exit_
    assert Exit.from_json({"rank": 3, "exitcode": 1}) == Exit(rank=3, exitcode=1)


texts = st.sampled_from(
    ["", CLOSED, TIMED_OUT, NO_CLIENTS, "CUDA out of memory", "Traceback (most recent call last):\n", "x"]
)
errors = st.none() | st.fixed_dictionaries(
    {}, optional={"type": texts, "mro": st.lists(texts), "message": texts, "traceback": texts, "mono": st.none() | st.floats()}
)  # fmt: skip


@given(
    st.lists(
        st.builds(
            Exit,
            rank=st.integers(0, 7),
            exitcode=st.none() | st.integers(-70, 255),
            order=st.integers(0, 7),
            t=st.floats(0, 100),
            killed_by_us=st.booleans(),
            error=errors,
            stderr_tail=texts,
        ),
        max_size=8,
        unique_by=lambda e: e.rank,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_evidence_gets_a_diagnosis_and_no_victim_is_blamed(exits, requested_stop, oom_killed):
    found = diagnose(exits, requested_stop=requested_stop, oom_killed=oom_killed)
    assert found.cause
    assert found.detail
    if found.rank is not None:
        assert not next(e for e in exits if e.rank == found.rank).killed_by_us
