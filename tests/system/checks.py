"""What must hold of every run, whatever was done to it."""

from __future__ import annotations

from collections import Counter

from ckptd.core import events as ev
from ckptd.node import processes
from ckptd.node.processes import Process
from ckptd_shim.contract import COMMITTED, Marker
from system.harness import Job


def assert_told_once(job: Job) -> None:
    """No event of an attempt is in the ledger twice, none that must be there is missing, and none is out of order."""
    events = job.events()
    launched = {e.attempt: list(e.placement) for e in events if isinstance(e, ev.AttemptLaunched)}
    assert list(launched) == list(range(1, len(launched) + 1)), job.story()
    once = (ev.WorkersInitialised, ev.StateRestored, ev.FirstStep, ev.Interrupted)
    counts = Counter((type(e).__name__, e.attempt) for e in events if isinstance(e, once))
    once_a_node = (ev.WorkersStarted, ev.WorkersFinished, ev.AttemptEnded)
    counts += Counter((type(e).__name__, e.attempt, e.node) for e in events if isinstance(e, once_a_node))
    # A node that was lost may say later how it went there.
    counts += Counter((type(e).__name__, e.attempt, e.detail) for e in events if isinstance(e, ev.FailureDetected))
    assert not {key: n for key, n in counts.items() if n > 1}, job.story()
    lost = {e.node for e in events if isinstance(e, ev.NodeLost)}
    for attempt, nodes in launched.items():
        for node in nodes:  # one that was lost may never have come back to tell
            ended = counts["AttemptEnded", attempt, node]
            assert ended == 1 or node in lost, f"attempt {attempt} on {node}\n{job.story()}"
    assert len([e for e in events if isinstance(e, ev.RunEnded)]) == 1, job.story()
    for kind in (ev.SaveStaged, ev.SaveCommitted):
        saves = [(e.attempt, e.step) for e in events if isinstance(e, kind)]
        assert len(saves) == len(set(saves)), job.story()
    committed = [e for e in events if isinstance(e, ev.SaveCommitted)]
    if lost:  # what such a node has to tell comes late
        committed.sort(key=lambda e: e.attempt or 0)
    sequences = [e.sequence for e in committed]
    assert sequences == sorted(set(sequences)), job.story()


def assert_same_losses(job: Job, reference: dict[int, str]) -> None:
    """Every step that was trained, as often as it was, had the loss of the uninterrupted run, to the last bit."""
    lines = [line.partition(" ") for line in job.losses_path.read_text().splitlines()]
    whole = [(int(step), loss) for step, _, loss in lines if loss]
    wrong = [(step, loss, reference[step]) for step, loss in whole if loss != reference[step]]
    assert not wrong, f"{len(wrong)} of {len(whole)} steps differ, the first: {wrong[:3]}\n{job.story()}"
    assert {step for step, _ in whole} == set(reference)


def alive(job: Job, attempt: int) -> list[int]:
    """Pids of an attempt's workers that live."""
    started = [e for e in job.of(ev.WorkersStarted) if e.attempt == attempt]
    workers = [w for e in started for w in e.workers.values()]
    return [w["pid"] for w in workers if processes.alive(Process(w["pid"], w["start_time"]))]


def newest_on_disk(job: Job, *, before: int) -> Marker | None:
    """The newest commit of the attempts below `before`."""
    markers = [Marker.read(path / COMMITTED) for path in job.commits()]
    return max((m for m in markers if m.attempt < before), key=lambda m: m.sequence, default=None)
