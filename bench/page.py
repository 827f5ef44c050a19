"""What does the live page cost a daemon whose run is a month old?

    python bench/page.py

Makes a run of 30 days with 1,000 interruptions and a step report a minute, lets an event loop of this process turn a timer
of 10 ms, and asks for the page's document as a browser does: the first look folds the whole ledger, later ones what is
new. Prints how long they took, on the wall's
clock and the CPU's, how large the document is, and how late the timer was without and with the page.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from made_up_run import thirty_days

from ckptd import status
from ckptd.core import events as ev
from ckptd.ledger import Ledger
from ckptd.web import live


def with_minutes(events):
    """The events, and between them a report of progress every minute, as the daemon of a real run records them."""
    previous = events[0]
    for event in events:
        t = previous.t + 60.0
        while t < event.t and previous.attempt is not None:
            yield ev.Progress(t=t, at=previous.at + t - previous.t, attempt=previous.attempt, step_s=2.0)
            t += 60.0
        yield event
        previous = event


async def lateness(work):
    """Seconds by which a timer of 10 ms was late while `work` went on in another thread."""
    late = []
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        late.append(time.perf_counter() - before - 0.01)
    return sorted(late)


def said(late):
    return {
        "median_ms": 1e3 * late[len(late) // 2],
        "p99_ms": 1e3 * late[int(0.99 * len(late))],
        "worst_ms": 1e3 * late[-1],
    }


def main() -> None:
    run = thirty_days()
    history = list(with_minutes(run.events))
    seconds = {}
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "ledger.db")
        with Ledger.open(path) as ledger:
            ledger.append_many(history)
        overview = live.LiveOverview(path, lambda: status.document(run.picture, t=run.t))

        def look(name):
            before, cpu = time.perf_counter(), time.thread_time()
            overview.body()
            seconds[name] = {"wall": time.perf_counter() - before, "cpu": time.thread_time() - cpu}

        quiet = asyncio.run(lateness(lambda: time.sleep(3.0)))
        first = asyncio.run(lateness(lambda: look("first look")))
        time.sleep(live.FRESH_S)
        look("later look")
        body = overview.body()
    result = {
        "events": len(history), "seconds": seconds, "bytes": len(body), "packed": len(gzip.compress(body, 4)),
        "timer_alone": said(quiet), "timer_during_first_look": said(first),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
