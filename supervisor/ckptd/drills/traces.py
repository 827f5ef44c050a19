"""Do two traces tell of the same training, and where they do not, what was most likely forgotten?

A trace is what `ckptd_shim.trace` wrote. Reading aside, this is arithmetic. What is forgotten shows in a certain way:

- before the interruption already: the script takes its seeds from the clock, or computes nothing twice alike;
- in a learning rate or a loss scale: the scheduler, the scaler;
- in the first loss after the resume, which only weights and data make: the data order, or random numbers;
- in the second, which is the first that the optimizer's update made: optimizer, scheduler or scaler;
- later still: whatever moves slowly. Data order and random numbers are looked at first.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Outcome = Literal["bitwise", "within noise", "differs"]

NOISE_FACTOR: Final = 3.0
"""A resumed run may differ from the straight one this many times as much as a second straight one does."""
TOLERANCE: Final = 1e-3
"""Relative difference of a loss that a change of the number of workers may make where no random number is drawn."""
FLUCTUATIONS: Final = 4.0
"""And where random numbers are drawn: so many standard deviations of the loss from one step to the next."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, as it was traced."""

    loss: float | None
    lr: list[list[str]]
    scale: float | None
    rng: dict[str, str]
    samples: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run, or two halves of one."""

    roles: dict[str, int] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    """`role: class` of what trained and was not handed to the shim."""
    steps: dict[int, Step] = field(default_factory=dict)
    digests: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(weights, optimizers) after a step."""

    @property
    def last(self) -> int:
        """The last step, 0 if there was none."""
        return max(self.steps, default=0)

    def losses(self) -> list[float | None]:
        """The loss of each step from 1 on."""
        return [self.steps[step].loss if step in self.steps else None for step in range(1, self.last + 1)]


def read(path: str | os.PathLike[str]) -> Trace:
    """Read what the shim wrote; of a step that was traced twice the last counts. An absent file is an empty trace."""
    trace = Trace()
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except FileNotFoundError:
        return trace
    for line in lines:
        if line["kind"] == "begin":
            trace.roles.update(line["roles"])
        elif line["kind"] == "digest":
            trace.digests[line["step"]] = line["weights"], line["optimizer"]
            trace.unseen[:] = line["unseen"]
        elif line["kind"] == "step":
            trace.steps[line["step"]] = Step(
                loss=None if line["loss"] is None else float.fromhex(line["loss"]), lr=line["lr"], scale=line["scale"],
                rng=line["rng"], samples=line["samples"],
            )  # fmt: skip
    return trace


def joined(first: Trace, second: Trace, at: int) -> Trace:
    """`first` up to step `at`, `second` after it: its digest at `at` is that of the state that was put back."""
    return Trace(
        roles=second.roles,
        unseen=second.unseen,
        steps={k: v for k, v in first.steps.items() if k <= at} | {k: v for k, v in second.steps.items() if k > at},
        digests={k: v for k, v in first.digests.items() if k < at} | second.digests,
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the comparison came to."""

    outcome: Outcome
    first_step: int | None = None
    """The first step that differs."""
    differs: list[str] = field(default_factory=list)
    """What differs at it."""
    likely: str | None = None
    """The likeliest thing that was forgotten: `scheduler`, `scaler`, `optimizer`, `data order`, `random numbers`,
    `seed`, `model`, `loss scaling` or `nondeterminism`."""
    because: str = ""
    largest: float = 0.0
    """The largest relative difference between two losses."""


def compare(
    straight: Trace, resumed: Trace, *, resume_step: int, second: Trace | None = None, same_world: bool = True
) -> Verdict:
    """Judge a resumed run by an uninterrupted one.

    Args:
        straight: the uninterrupted run.
        resumed: the interrupted one, joined at `resume_step`.
        resume_step: after this step it was interrupted.
        second: another uninterrupted run, if there is one: how much the job differs from itself.
        same_world: whether it went on with as many workers.
    """
    found = first_difference(straight, resumed)
    if found is None:
        return Verdict(
            outcome="bitwise", because="every loss, the weights and the optimizer state are equal, bit for bit"
        )
    step, what = found
    largest = max((_relative(a, b) for a, b in _pairs(straight, resumed, 1)), default=0.0)
    if not same_world:
        return _other_world(straight, resumed, found, resume_step=resume_step, largest=largest)
    if second is not None and (reason := _within_noise(straight, resumed, second, resume_step)):
        return Verdict(outcome="within noise", first_step=step, differs=what, because=reason, largest=largest)
    likely, because = suspect(straight, resumed, resume_step)
    return Verdict(
        outcome="differs", first_step=step, differs=what, likely=likely, because=because, largest=largest
    )  # fmt: skip


def may_be_noise(straight: Trace, resumed: Trace) -> bool:
    """Whether a job that does not compute the same twice could look like this: other settings or seeds are no noise."""
    drawn = _first_random_difference(straight, resumed)
    if straight.digests.get(0) != resumed.digests.get(0) or (drawn is not None and drawn[0] <= 1):
        return False
    settled = {"learning rate", "loss scale", "samples seen", "the step itself"}
    return not any(settled & set(_differences(straight, resumed, step)) for step in straight.steps)


def first_difference(left: Trace, right: Trace) -> tuple[int, list[str]] | None:
    """The first step at which loss, learning rate, loss scale, weights or optimizer state differ, and which; or None."""
    for step in range(max(left.last, right.last) + 1):
        what = _differences(left, right, step)
        if what:
            return step, what
    return None


def _differences(left: Trace, right: Trace, step: int) -> list[str]:
    what = []
    a, b = left.steps.get(step), right.steps.get(step)
    if step and (a is None or b is None):
        return ["the step itself"]
    if a is not None and b is not None:
        if not _same(a.loss, b.loss):
            what.append("loss")
        if a.lr != b.lr:
            what.append("learning rate")
        if not _same(a.scale, b.scale):
            what.append("loss scale")
        if a.samples != b.samples:
            what.append("samples seen")
    if step in left.digests and step in right.digests:
        pairs = zip(("weights", "optimizer state"), left.digests[step], right.digests[step], strict=True)
        what += [name for name, one, other in pairs if one != other]
    return what


# --- which is the likeliest ---------------------------------------------------------------------------------------------


def suspect(straight: Trace, resumed: Trace, resume_step: int) -> tuple[str, str]:
    """(what was most likely forgotten, why that is likely) of two runs that differ."""
    found = first_difference(straight, resumed)
    assert found is not None
    step, what = found
    drawn = _first_random_difference(straight, resumed)
    if step == 0:
        return "seed", "the runs began with different weights: the script seeds from the clock, or not at all"
    if step < resume_step or (step == resume_step and "loss" in what):
        return _before(step, drawn)
    if step == resume_step:
        name = "model" if "weights" in what else "optimizer"
        return name, f"what was put back at step {step} is not what was saved: {', '.join(what)}"
    return _after(resumed, (step, what), resume_step=resume_step, drawn=drawn)


def _before(step: int, drawn: tuple[int, str] | None) -> tuple[str, str]:
    if drawn is not None and drawn[0] <= step:
        why = f"random numbers ({drawn[1]}) differ from step {drawn[0]} on, before any interruption: they are seeded"
        return "seed", f"{why} from the clock, or not at all"
    why = f"the runs differ from step {step} on, before any interruption and with equal weights and random numbers"
    return "nondeterminism", f"{why}: the data order is not seeded, or a computation does not repeat itself"


def _after(
    resumed: Trace, found: tuple[int, list[str]], *, resume_step: int, drawn: tuple[int, str] | None
) -> tuple[str, str]:
    step, what = found
    jump = f"the runs part at step {step}, the resume was at {resume_step}"
    unseen = {role: name for role, _, name in (each.partition(": ") for each in resumed.unseen)}

    def forgotten(role: str) -> str:
        if role in unseen:
            return f"; a {unseen[role]} was at work that TrainerShim was not given"
        return "" if resumed.roles.get(role, 0) else f"; TrainerShim was given no {role}"

    if "learning rate" in what:
        return "scheduler", f"{jump}, in the learning rate{forgotten('scheduler')}"
    if "loss scale" in what:
        return "scaler", f"{jump}, in the loss scale{forgotten('scaler')}"
    if step == resume_step + 1 and "loss" in what:
        if drawn is not None and drawn[0] <= step and "dataloader" not in unseen:
            return "random numbers", f"{jump}, and so do the random numbers ({drawn[1]}): something draws or seeds anew"
        why = f"{jump}, in a loss that only the weights, which were put back, and the samples make"
        return "data order", f"{why}{forgotten('dataloader')}"
    for role in ("optimizer", "scaler", "scheduler"):
        if role in unseen:
            return role, f"{jump}, and the first loss after it was equal: the updates differ{forgotten(role)}"
    if step <= resume_step + 2:
        missing = [role for role in ("optimizer", "scaler", "scheduler") if not resumed.roles.get(role, 0)]
        likely = missing[0] if missing else "optimizer"
        return likely, f"{jump}, and the first loss after it was equal: the updates differ{forgotten(likely)}"
    if drawn is not None and drawn[0] <= step:
        return "random numbers", f"{jump}, after the random numbers ({drawn[1]}) did at step {drawn[0]}"
    return "data order", f"{jump}, slowly: the samples came in another order, or state is kept that was not handed over"


def _first_random_difference(left: Trace, right: Trace) -> tuple[int, str] | None:
    for step in range(1, min(left.last, right.last) + 1):
        a, b = left.steps[step].rng, right.steps[step].rng
        names = [name for name in a if name in b and a[name] != b[name]]
        if names:
            return step, ", ".join(names)
    return None


# --- how much is too much -----------------------------------------------------------------------------------------------


def _within_noise(straight: Trace, resumed: Trace, second: Trace, resume_step: int) -> str | None:
    """Why the difference is no more than the job's own noise; None: it is."""
    if first_difference(straight, second) is None:
        return None  # the job repeats itself exactly
    if not may_be_noise(straight, second) or not may_be_noise(straight, resumed):
        return None
    noise = [abs(a - b) for a, b in _pairs(straight, second, resume_step + 1)]
    differences = [abs(a - b) for a, b in _pairs(straight, resumed, resume_step + 1)]
    if not noise or len(noise) != len(differences) or not all(map(math.isfinite, differences)):
        return None
    usual, here = _rms(noise), _rms(differences)
    if here > NOISE_FACTOR * usual or max(differences) > 2 * NOISE_FACTOR * max(noise):
        return None
    return f"losses differ by {here:.3g} (root mean square), between two uninterrupted runs by {usual:.3g}"


def _other_world(
    straight: Trace, resumed: Trace, found: tuple[int, list[str]], *, resume_step: int, largest: float
) -> Verdict:
    """With another number of workers sums are taken in another order, and random numbers begin anew."""
    step, what = found

    def differs(likely: str, because: str) -> Verdict:
        return Verdict(
            outcome="differs", first_step=step, differs=what, likely=likely, because=because, largest=largest
        )  # fmt: skip

    if step <= resume_step:
        return differs(*suspect(straight, resumed, resume_step))
    for each in sorted(straight.steps):
        gone = {"learning rate", "samples seen", "the step itself"} & set(_differences(straight, resumed, each))
        if gone:
            name = "scheduler" if "learning rate" in gone else "data order"
            why = f"{', '.join(sorted(gone))} at step {each} must not depend on the number of workers"
            return differs(name, why)
    drawing = len({tuple(sorted(step.rng.items())) for step in straight.steps.values()}) > 1
    if drawing:
        losses = [a for a, _ in _pairs(straight, straight, 1)]
        usual = statistics.pstdev([b - a for a, b in itertools.pairwise(losses)]) if len(losses) > 2 else 0.0
        limit = f"{FLUCTUATIONS:g} times the {usual:.3g} by which the loss moves from step to step"
    else:
        usual, limit = 0.0, f"{TOLERANCE:g} of the loss"
    for i, (a, b) in enumerate(_pairs(straight, resumed, resume_step + 1)):
        near = abs(a - b) <= FLUCTUATIONS * usual if drawing else _relative(a, b) <= TOLERANCE
        if not near and i == 0:
            why = f"with the weights that were saved the first loss differs by more than {limit}: other samples made it"
            return differs("data order", why)
        if not near:
            why = (
                f"losses differ by more than {limit} from step {resume_step + 1 + i} on, the first did not: the update "
            )
            return differs("loss scaling", f"{why}depends on how many workers and micro-batches share a batch")
    why = (
        f"weights and optimizer state were put back bit for bit, schedule and samples are the same, and losses differ by "
        f"less than {limit}; after a change of the number of workers bit for bit is not promised"
    )
    return Verdict(outcome="within noise", first_step=step, differs=what, because=why, largest=largest)


def _pairs(left: Trace, right: Trace, start: int) -> list[tuple[float, float]]:
    """Both losses of each step from `start` on where both are known."""
    found = []
    for step in range(start, min(left.last, right.last) + 1):
        a, b = left.steps[step].loss, right.steps[step].loss
        if a is not None and b is not None:
            found.append((a, b))
    return found


def _same(left: float | None, right: float | None) -> bool:
    return left == right or (left is not None and right is not None and math.isnan(left) and math.isnan(right))


def _relative(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    return abs(left - right) / max(abs(left), abs(right))


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def as_json(verdict: Verdict, straight: Trace, resumed: Trace) -> dict[str, Any]:
    """The verdict and both curves as one JSON object."""
    return {
        "verdict": verdict.outcome,
        "first_step": verdict.first_step,
        "differs": verdict.differs,
        "likely": verdict.likely,
        "because": verdict.because,
        "largest_relative_difference": verdict.largest,
        "losses": {"straight": _finite(straight.losses()), "resumed": _finite(resumed.losses())},
    }


def _finite(values: list[float | None]) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]
