"""Which x does a Gamma variable stay below with probability p?"""

from __future__ import annotations

import functools
import math
import statistics


@functools.lru_cache(maxsize=256)
def gamma_quantile(p: float, shape: float) -> float:
    """The x with P(shape, x) = p for a Gamma variable of scale 1; relative error below 1e-6 for shapes up to 1e5.

    Newton's method on log P as a function of log x: that is concave and rises, so it converges from any start, and for
    small x it is a straight line, which serves shapes far below 1.

    Raises:
        ValueError: `p` is not inside (0, 1) or `shape` is not above zero.
    """
    if not (0 < p < 1 and 0 < shape < math.inf):
        raise ValueError(f"no quantile {p!r} of a Gamma variable of shape {shape!r}")
    log_x = (math.log(p) + math.lgamma(shape + 1)) / shape
    if shape >= 1:  # Wilson and Hilferty 1931
        z = statistics.NormalDist().inv_cdf(p)
        root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
        if root > 0:
            log_x = max(log_x, math.log(shape) + 3 * math.log(root))
    for _ in range(100):
        log_cdf, slope = _log_cdf(shape, log_x)
        move = (math.log(p) - log_cdf) / slope
        log_x += move
        if abs(move) < 1e-12:
            break
    return math.exp(log_x) if log_x > -700 else 0.0


def _log_cdf(shape: float, log_x: float) -> tuple[float, float]:
    """(log P(shape, x), its derivative in log x): by the series below the mean, by Lentz's continued fraction above."""
    x = math.exp(log_x)
    log_density = shape * log_x - x - math.lgamma(shape)  # of log x
    if x < shape + 1:
        term = total = 1 / shape
        n = shape
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        log_cdf = log_density + math.log(total)
        return log_cdf, 1 / total
    tiny = 1e-300
    b = x + 1 - shape
    c = 1 / tiny
    d = 1 / b
    h = d
    for i in range(1, 1_000_000):
        a = -i * (i - shape)
        b += 2
        d = 1 / (a * d + b or tiny)
        c = b + a / c or tiny
        h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    upper = math.exp(log_density) * h
    log_cdf = math.log1p(-min(upper, 1 - 1e-16))
    return log_cdf, math.exp(log_density - log_cdf)
