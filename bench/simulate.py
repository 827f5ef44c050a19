"""How near does ckptd's interval come to the best there is, on simulated failures, and how fast is the simulator?

    python bench/simulate.py [--seeds 40]

54 days of a job that fails as often as Llama 3's did (419 times on 16,384 GPUs), R = 10 min, C = U = 15 s and 60 s: regret of
ckptd's policy, as a share of the waste of an oracle, from priors that are right and wrong; on a rate that is fivefold for two
days; and on Weibull gaps against the best fixed interval found afterwards. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from ckptd import failure_times
from ckptd.core.policy import Policy
from ckptd.simulate import Job, Production, follow
from ckptd.simulate_compare import compare

DAY = 86_400.0
MTBF = 54 * DAY / 419
DEVICES = 16_384


def cases():
    """(name, source, failures of the prior per those of the truth, whether there is an oracle, aim)."""
    steady = failure_times.exponential(MTBF, 54 * DAY)
    right = 50_000 * 3600.0
    yield "steady rate, default prior", steady, right, True, 0.01
    yield "steady rate, prior's M ten times too long", steady, MTBF * DEVICES * 10, True, 0.03
    yield "steady rate, prior's M ten times too short", steady, MTBF * DEVICES / 10, True, 0.03
    yield "five times the rate for two days", failure_times.surges(MTBF, 5, 2 * DAY, 54 * DAY), right, True, 0.05
    yield "Weibull gaps, shape 0.7", failure_times.weibull(MTBF, 0.7, 54 * DAY), right, False, 0.03


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    options = parser.parse_args()
    rows = []
    for stall in (15.0, 60.0):
        job = Job(devices=DEVICES, stall_s=stall, restart_s=600.0, upload_s=stall)
        for name, source, prior, oracle, aim in cases():
            policy = Policy(prior_device_seconds=prior)
            found = compare(source, job, policy, seeds=options.seeds, fixed_s=3600.0, vendor_mtbf_s=None, oracle=oracle)
            by_name = {score.name: score for score in found.scores}
            ours, best = by_name["ckptd"], by_name[found.reference]
            rows.append({"case": name, "stall_s": stall, "against": found.reference, "best_waste": best.waste,
                         "regret": ours.regret, "regret_ci": ours.regret_ci, "aim": aim})  # fmt: skip
            print(
                f"C {stall:3.0f} s  {name:42} {best.waste:7.2%} {ours.regret:7.2%} ± {ours.regret_ci:.2%}  (aim {aim:.0%})",
                flush=True,
            )
    job = Job(devices=DEVICES, stall_s=15.0, restart_s=600.0, upload_s=15.0)
    policy = Policy()
    trace = failure_times.exponential(MTBF, 1000 * DAY)(random.Random(0))
    begun, cpu = time.perf_counter(), time.process_time()
    outcome = follow(trace, job, policy, Production(policy, DEVICES))
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"1,000 days, {outcome.failures} failures, {outcome.saves} saves: {wall:.1f} s, {cpu:.1f} s of processor time"
    )
    print(json.dumps({"seeds": options.seeds, "rows": rows, "days_1000_s": wall, "days_1000_cpu_s": cpu}))


if __name__ == "__main__":
    main()
