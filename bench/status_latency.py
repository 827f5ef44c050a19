"""How long does `ckptd status` take, start to end, with a live daemon?

    python bench/status_latency.py [--runs 15]

Beside it, in the same run and in turn with it, what no Python command can do without: an interpreter that does nothing,
and one that imports click. Prints a table and a JSON line. Aim: 0.4 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from jobs import training


def seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with training() as run:
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "python -c 'import click'": [sys.executable, "-c", "import click"],
            "ckptd status": [sys.executable, "-m", "ckptd", "status", str(run.run_dir)],
            "ckptd status --json": [sys.executable, "-m", "ckptd", "status", str(run.run_dir), "--json"],
        }
        took: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.runs + 1):
            for name, command in commands.items():
                took[name].append(seconds(command))
    took = {name: each[1:] for name, each in took.items()}  # the first warms the page cache
    print(f"{'':26} {'median':>8} {'lowest':>8} {'highest':>8}  (ms, {options.runs} runs)")
    for name, each in took.items():
        print(f"{name:26} {1e3 * statistics.median(each):8.0f} {1e3 * min(each):8.0f} {1e3 * max(each):8.0f}")
    medians = {name: round(statistics.median(each), 4) for name, each in took.items()}
    print(json.dumps({"bench": "status_latency", "runs": options.runs, "median_s": medians}))


if __name__ == "__main__":
    main()
