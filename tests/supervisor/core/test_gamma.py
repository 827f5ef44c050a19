import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.gamma import gamma_quantile

QUANTILES = [
    # shape, 5 %, 95 %: computed with mpmath at 40 digits
    (0.01, 4.46553501891e-131, 0.003362623998075),
    (0.5, 0.00196607000001, 1.920729410347),
    (1, 0.05129329438755, 2.995732273554),
    (1.5, 0.1759231588746, 3.907363951626),
    (2, 0.3553615106987, 4.743864518391),
    (5, 1.97014956806, 9.153519026638),
    (20, 13.25465159835, 27.87923963944),
    (100, 84.13927721831, 116.9971344462),
    (420, 386.8685456854, 454.2683367645),
    (1e4, 9836.0851108552, 10165.051911966),
    (1e5, 99480.420746789, 100520.71628157),
]


@pytest.mark.parametrize(("shape", "low", "high"), QUANTILES)
def test_gamma_quantiles(shape, low, high):
    assert gamma_quantile(0.05, shape) == pytest.approx(low, rel=1e-9)
    assert gamma_quantile(0.95, shape) == pytest.approx(high, rel=1e-9)


@given(st.floats(1e-3, 1e5))
def test_gamma_quantiles_are_ordered(shape):
    low, high = gamma_quantile(0.05, shape), gamma_quantile(0.95, shape)
    assert 0 <= low < high < math.inf
    assert low <= shape <= high or shape < 1  # the mean of a very skewed variable may lie outside


@pytest.mark.parametrize(("p", "shape"), [(0, 1), (1, 1), (0.5, 0), (0.5, math.inf), (math.nan, 1)])
def test_gamma_quantile_refuses_nonsense(p, shape):
    with pytest.raises(ValueError, match="no quantile"):
        gamma_quantile(p, shape)
