"""What does ckptd do when things break? Runs the example job, breaks it twice, and checks that it was put right.

`make demo`, or `python examples/demo.py [--keep]` with ckptd installed. Uses nothing but the standard library and the
command `ckptd`. The exit status is 0 only if everything that is told here really happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

JOB = pathlib.Path(__file__).resolve().parent / "stdlib_gpt"
CKPTD = [sys.executable, "-m", "ckptd"]
TIME_LIMIT_S = 420.0
POLL_S = 0.2
STEPS_BEFORE_KILL = 50
STEPS_BEFORE_BAD_DEVICE = 100
BOLD = "\033[1m" if sys.stdout.isatty() else ""
RESET = "\033[0m" if sys.stdout.isatty() else ""

Event = dict[str, Any]


class DemoFailed(Exception):
    """Something that should have happened did not."""


def say(text: str) -> None:
    # The line of `ckptd run` lives at the bottom of a terminal: write over it, it comes back by itself.
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}{BOLD}>>> {text}{RESET}", flush=True)


class Run:
    """The `ckptd run` that is shown, seen through its ledger."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.process = subprocess.Popen([*CKPTD, "run", "job.yaml"], cwd=directory)
        self.deadline = time.monotonic() + TIME_LIMIT_S

    def events(self) -> list[Event]:
        """Everything that has happened, oldest first; empty while there is no ledger yet."""
        path = self.run_dir / "ledger.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as ledger:
            try:
                rows = ledger.execute("select attempt, kind, rank, data from events order by id").fetchall()
            except sqlite3.OperationalError:  # its tables are being made
                return []
        return [{"attempt": a, "kind": k, "rank": r, **json.loads(data)} for a, k, r, data in rows]

    def wait_for(self, what: str, kind: str, **wanted: Any) -> Event:
        """The first event of a kind that has these values; `step=` means at least that step."""
        while True:
            over = self.process.poll() is not None
            for event in self.events():
                if event["kind"] == kind and all(
                    event[key] >= value if key == "step" else event[key] == value for key, value in wanted.items()
                ):
                    return event
            if over:
                raise DemoFailed(f"ckptd ended with status {self.process.returncode} before {what}")
            self.wait_a_moment(what)

    def wait_a_moment(self, what: str) -> None:
        if time.monotonic() > self.deadline:
            raise DemoFailed(f"waited {TIME_LIMIT_S:.0f} s in all, and still no {what}")
        time.sleep(POLL_S)

    def wait_for_unsaved_steps(self, count: int) -> None:
        """Until so many steps are complete that no checkpoint holds."""
        while (status := self.status())["step"] < status["last_committed"]["step"] + count:
            self.wait_a_moment("steps since the newest checkpoint")

    def status(self) -> dict[str, Any]:
        answer = subprocess.run([*CKPTD, "status", "--json", self.run_dir], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise DemoFailed(f"`ckptd status` ended with status {answer.returncode}: {answer.stderr}")
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    def processes(self) -> Iterator[tuple[int, str]]:
        """(pid, what it is) of everything that lives and has the run's id in its environment."""
        ids = {event["policy"]["run_id"] for event in self.events() if event["kind"] == "daemon_started"}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    if any(f"CKPTD_RUN_ID={run_id}".encode() in environment for run_id in ids):
                        yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def end(self) -> None:
        """Leave nothing running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # Only a daemon that had to be killed leaves any; an agent may start one more while we look.
        while left := list(self.processes()):
            for pid, _ in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def show(run: Run) -> None:
    """The story, with the faults in it."""
    say("a small GPT starts to learn Python's standard library on 2 workers; ckptd measures what a save costs")
    workers = run.wait_for("the first workers", "workers_started", attempt=1)["workers"]
    first = run.wait_for("a first checkpoint", "save_committed", attempt=1)
    say(f"the first checkpoint is committed, at step {first['step']}: from now on the interval is derived")
    run.wait_for("more checkpoints", "save_committed", attempt=1, step=max(STEPS_BEFORE_KILL, first["step"] + 1))
    run.wait_for_unsaved_steps(2)

    pid = workers["1"]["pid"]
    say(f"FAULT 1: kill -9 {pid}, which is rank 1 of 2")
    os.kill(pid, signal.SIGKILL)
    relaunch = run.wait_for("a relaunch", "attempt_launched", attempt=2)
    say(f"both workers are launched again, from the newest committed checkpoint: step {relaunch['resume']['step']}")
    run.wait_for("the first step after the restart", "first_step", attempt=2)
    run.wait_for("a checkpoint of the second attempt", "save_committed", attempt=2, step=STEPS_BEFORE_BAD_DEVICE)

    say("FAULT 2: device 1 is reported unhealthy (the job's health.command prints its index)")
    (run.directory / "unhealthy").write_text("1\n")
    relaunch = run.wait_for("a relaunch on what is left", "attempt_launched", attempt=3)
    say(f"one worker goes on from step {relaunch['resume']['step']}, with the same global batch in more pieces")
    run.wait_for("the first step on one worker", "first_step", attempt=3)
    while run.process.poll() is None:
        run.wait_a_moment("end of training")


def check(run: Run) -> None:
    """Is all of it true? Raises DemoFailed with the first thing that is not."""
    events = run.events()
    status = run.status()
    of: dict[str, list[Event]] = {}
    for event in events:
        of.setdefault(event["kind"], []).append(event)
    launches = {event["attempt"]: event for event in of["attempt_launched"]}
    saves, ends = of["save_committed"], of["interrupted"]
    newest = {attempt: max(s["step"] for s in saves if s["attempt"] == attempt) for attempt in (1, 2)}
    logs = "".join((run.run_dir / "attempts" / f"{n:04d}" / "rank0.out").read_text() for n in (1, 2, 3))
    losses = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): validation loss ([\d.]+)", logs)]
    lost = ends[0]["lost_steps"]
    left = list(run.processes())
    (begun_at, begun), (ended_at, ended) = losses[0], losses[-1]
    for true, what in (
        (run.process.returncode == 0, "ckptd run ended with status 0"),
        (status["outcome"]["outcome"] == "finished", f"training finished at step {status['step']}"),
        (sorted(launches) == [1, 2, 3] and len(ends) == 2, "three attempts, and two interruptions between them"),
        ("SIGKILL" in ends[0]["detail"] and not ends[0]["planned"], f"the first was found to be: {ends[0]['detail']}"),
        (launches[2]["resume"]["step"] == newest[1], f"training resumed at {newest[1]}, the newest committed step"),
        (lost > 0, f"{lost} steps that no checkpoint held were trained again"),
        (ends[1]["planned"] and ends[1]["lost_steps"] == 0, "the bad device cost no step: its workers saved first"),
        (launches[3]["resume"]["step"] == newest[2], f"training resumed at {newest[2]}, which they had saved"),
        ([launches[n]["world_size"] for n in (1, 2, 3)] == [2, 2, 1], "the worlds were of 2, 2 and 1 workers"),
        (len({s["samples"] / s["step"] for s in saves}) == 1, "every step of every attempt took the same 24 samples"),
        (begun_at == 0 and begun > 5.0, f"validation loss at the start: {begun:.2f}"),
        (ended_at == status["step"] and ended < 3.2, f"validation loss at the end: {ended:.2f}"),
        (not left, "no process is left" if not left else f"no process is left, but these are: {left}"),
    ):
        say(f"{'  ok' if true else 'NOT SO'}  {what}")
        if not true:
            raise DemoFailed(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the run directory, to look at")
    keep = parser.parse_args().keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-demo-"))
    begun = time.monotonic()
    run: Run | None = None
    try:
        shutil.copytree(JOB, directory, dirs_exist_ok=True)
        run = Run(directory)
        show(run)
        check(run)
        say(f"all of it happened, in {time.monotonic() - begun:.0f} s")
        return 0
    except DemoFailed as error:
        say(f"the demo FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if run is not None:
            run.end()
        if keep:
            say(f"kept: {directory} (try `ckptd events {directory}/run`, `ckptd checkpoints {directory}/run`)")
        else:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
