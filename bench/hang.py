"""From a rank that stops stepping to the first step after the restart: where that time goes.

    python bench/hang.py --hangs 5 --floor 5

The floor of the detector (`hang.floor`, 30 s by default) is most of it; the rest is what ckptd adds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

JOB = Path(__file__).with_name("restart_job.py")
PARTS = ("detect_s", "stop_s", "wait_s", "launch_s", "init_s", "restore_s", "first_step_s", "total_s")


def rows(ledger: Path, query: str) -> list[tuple]:
    if not ledger.exists():
        return []
    connection = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=10)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []  # it is being made just now
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--floor", type=float, default=5.0, help="hang.floor, seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-", ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        trace, ledger = place / "trace", place / "run" / "ledger.db"
        trace.touch()
        (place / "job.yaml").write_text(
            yaml.safe_dump(
                {
                    "name": "bench",
                    "command": [str(JOB), "--trace", str(trace)],
                    "run_dir": str(place / "run"),
                    "cluster": {"devices_per_node": 2},
                    "checkpoint": {"interval": {"steps": 20}, "tiers": [{"name": "disk", "path": str(place / "ckpt")}]},
                    "hang": {"floor": f"{options.floor:g}s"},
                    "web": {"listen": None},
                }
            )
        )
        daemon = subprocess.Popen(
            [sys.executable, "-m", "ckptd", "run", str(place / "job.yaml")],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for number in range(options.hangs):
                deadline = time.monotonic() + 120
                while len(rows(ledger, "SELECT 1 FROM events WHERE kind = 'first_step'")) <= number:
                    if time.monotonic() > deadline:
                        raise SystemExit("the job does not train")
                    time.sleep(0.05)
                time.sleep(3.0)
                started = rows(
                    ledger, "SELECT data FROM events WHERE kind = 'workers_started' ORDER BY id DESC LIMIT 1"
                )
                os.kill(json.loads(started[0][0])["workers"]["1"]["pid"], signal.SIGSTOP)
                while len(rows(ledger, "SELECT 1 FROM events WHERE kind = 'restarted'")) <= number:
                    time.sleep(0.05)
            found = rows(ledger, f"SELECT {', '.join(PARTS)} FROM restarts")
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=60)
    table = {part: [row[i] for row in found] for i, part in enumerate(PARTS)}
    for part, values in table.items():
        print(f"{part:14} median {statistics.median(values):7.3f} s   min {min(values):7.3f}   max {max(values):7.3f}")
    beyond = [total - options.floor for total in table["total_s"]]
    print(f"beyond the floor of {options.floor:g} s: median {statistics.median(beyond):.3f} s")
    print(json.dumps({"floor_s": options.floor, **{part: statistics.median(v) for part, v in table.items()}}))


if __name__ == "__main__":
    main()
