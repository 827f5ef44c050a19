"""What does the daemon cost while all is well?

    python bench/daemon_idle.py [--seconds 60] [--windows 3]

Starts a small job with one worker and looks at the daemon's process from outside: its share of a core (user and system
time of all its threads over wall-clock), its resident memory, and whether it has torch in it. The node agent, which
does have torch, is shown beside it. Prints a table and a JSON line. Aim: 0.3 % of a core, 70 MB, no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from jobs import training

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1000


def has_torch(pid: int) -> bool:
    return "/torch/" in Path(f"/proc/{pid}/maps").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="wall-clock of one window")
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args()
    with training() as run:
        agent = json.loads((run.run_dir / "agent-local.json").read_text())["pid"]
        pids = {"daemon": run.daemon, "agent": agent}
        shares: dict[str, list[float]] = {name: [] for name in pids}
        for _ in range(options.windows):
            before, begun = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
            time.sleep(options.seconds)
            wall = time.monotonic() - begun
            for name, pid in pids.items():
                shares[name].append((cpu_seconds(pid) - before[name]) / wall)
        result = {
            name: {
                "cpu_percent": [round(100 * share, 3) for share in shares[name]],
                "cpu_percent_median": round(100 * statistics.median(shares[name]), 3),
                "rss_mb": round(resident_mb(pid), 1),
                "torch": has_torch(pid),
                "threads": len(os.listdir(f"/proc/{pid}/task")),
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            }
            for name, pid in pids.items()
        }
    print(
        f"{'':8} {'% of a core':>12} {'lowest':>8} {'highest':>8} {'RSS MB':>8} {'torch':>6} {'threads':>8} {'fds':>5}"
    )
    for name, row in result.items():
        print(
            f"{name:8} {row['cpu_percent_median']:12.3f} {min(row['cpu_percent']):8.3f} {max(row['cpu_percent']):8.3f} "
            f"{row['rss_mb']:8.1f} {row['torch']!s:>6} {row['threads']:8} {row['descriptors']:5}"
        )
    print(json.dumps({"bench": "daemon_idle", "seconds": options.seconds, **result}))


if __name__ == "__main__":
    main()
