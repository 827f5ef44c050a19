"""How often does the job fail now, if the rate may have changed: a bad node, a bad push, and back again?

A bank of models of one rate. The first forgets nothing: it is the Gamma posterior. Each of the others forgets failures
and exposure with a half-life, down to one failure's worth of what the first believes. Each predicts: the probability
that it gave to what then happened (exposure without a failure, then a failure) is what its weight is multiplied by.
Rates are per device-second and half-lives in device-seconds, so an M of one world size holds for any other; half-lives
are multiples of the long-run mean exposure between two failures, so a job of minutes and one of months adapt alike.

Between failures a forgetting model follows da/dx = -l (a - a0), db/dx = 1 - l (b - b0), whose hazard a/b is integrated in
closed form: how often anybody looks does not change the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

HALF_LIVES = (20.0, 6.0, 2.0, 0.1)
"""Of the models that forget, in long-run mean exposures between failures."""
PRIOR_WEIGHTS = (0.8, 0.08, 0.06, 0.04, 0.02)
"""Of the model that forgets nothing, then of those that forget."""
SHARE = 0.03
"""Part of the weights that is handed out afresh at each failure: none of the models is ever ruled out for good."""
FLOORS = (2.0, 1.0, 1.0, 0.02)
"""Failures' worth of the long-run rate that each of them never forgets."""
LEAST_SHAPE = 1e-3
HEARD = 0.05
"""Weight from which on a model's doubts count."""

_LN2 = math.log(2)


class Model(NamedTuple):
    """A Gamma(a, b) belief about the rate, as of the newest failure. `b` in device-seconds."""

    a: float
    b: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Regimes:
    """The bank as of the newest failure."""

    models: tuple[Model, ...]
    """First the one that forgets nothing; then one for each of `HALF_LIVES`."""


class Rate(NamedTuple):
    """A belief about the failure rate per device-second, and who holds it."""

    mean: float
    long_run: float
    """What the model that forgets nothing believes."""
    memory: float
    """Weight of that model: near 0 where the newest failures came at another rate than the earlier ones."""
    models: list[Model]

    @property
    def variance(self) -> float:
        """Of the belief, by the models that carry it: those of little weight are allowed to believe odd things."""
        heard = [m for m in self.models if m.weight >= HEARD]
        whole = sum(m.weight for m in heard)
        mean = sum(m.weight * (m.a / m.b) for m in heard) / whole
        second = sum(m.weight * (m.a / m.b) * ((m.a + 1) / m.b) for m in heard) / whole
        return max(second - mean * mean, 0.0)


def begin(failures: float, device_s: float) -> Regimes:
    """The bank before anything was seen: a prior of `failures` in `device_s` device-seconds."""
    a = max(failures, LEAST_SHAPE)
    b = max(device_s, 1.0)
    forgetting = (Model(*_floor(a, b, f), w) for f, w in zip(FLOORS, PRIOR_WEIGHTS[1:], strict=True))
    return Regimes(models=(Model(a, b, PRIOR_WEIGHTS[0]), *forgetting))


def failed(regimes: Regimes, exposure: float) -> Regimes:
    """The bank after a failure that came `exposure` device-seconds after the one before."""
    passed = _after(regimes, exposure)
    hazards = [m.weight * m.a / m.b for m in passed]
    total = math.fsum(hazards)
    if not total > 0:
        hazards, total = list(PRIOR_WEIGHTS), 1.0
    return Regimes(
        models=tuple(
            Model(m.a + 1.0, m.b, (1 - SHARE) * h / total + SHARE * p)
            for m, h, p in zip(passed, hazards, PRIOR_WEIGHTS, strict=True)
        )
    )


def rate(regimes: Regimes, exposure: float) -> Rate:
    """What is believed `exposure` device-seconds after the newest failure, none having come since."""
    models = _after(regimes, exposure)
    mean = sum([weight * a / b for a, b, weight in models])
    a, b, memory = models[0]
    return Rate(mean, a / b, memory, models)


def _floor(a: float, b: float, failures: float) -> tuple[float, float]:
    """What a forgetting model falls back to: the long-run rate, held with the confidence of so many failures."""
    a0 = min(failures, a)
    return a0, a0 * b / a


def _after(regimes: Regimes, exposure: float) -> list[Model]:
    """The models after more exposure without a failure, weights normalised."""
    x = max(exposure, 0.0)
    a, b, weight = regimes.models[0]
    log_weights = [math.log(weight) - a * math.log1p(x / b)]  # the Gamma's own predictive: (b / (b + x))^a
    aged = [(a, b + x)]
    mean_exposure = b / a
    for (a_j, b_j, w_j), half_life, floor in zip(regimes.models[1:], HALF_LIVES, FLOORS, strict=True):
        a0, b0 = _floor(a, b, floor)
        forget = _LN2 / (half_life * mean_exposure)
        gone = -math.expm1(-forget * x)
        kept = 1.0 - gone
        over = a_j - a0
        limit = b0 + 1.0 / forget  # where b goes if no failure comes
        below = b_j - limit
        now = b_j * kept + limit * gone
        # The integral of (a0 + over u) / (limit + below u) over exposure, with u = exp(-forget x), by partial fractions.
        hazard = a0 / limit * x
        spread = below / limit
        if abs(spread) > 1e-9:
            hazard += (over / below - a0 / limit) / forget * math.log(b_j / now)
        else:
            hazard += over / limit * gone / forget
        log_weights.append(math.log(w_j) - hazard)
        aged.append((a0 + over * kept, now))
    top = max(log_weights)
    weights = [math.exp(w - top) for w in log_weights]
    total = math.fsum(weights)
    return [Model(a, b, w / total) for (a, b), w in zip(aged, weights, strict=True)]
