"""The per-rank file gives back exactly what was put in, and never anything but data."""
# ruff: noqa: NPY002  scripts draw from NumPy's global generator

import collections
import contextlib
import math
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd_shim import extras
from ckptd_shim.errors import CheckpointError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.integers(-(2**90), 2**90),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text())), inner),
        st.sets(st.one_of(st.integers(), st.text())),
    ),
    max_leaves=20,
)


def through(tree):
    return extras.loads(bytearray(b"".join(extras.dump(tree))))


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and all(map(same, a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(trees)
@settings(deadline=None, max_examples=150)
def test_any_tree_of_plain_values_comes_back_with_its_types(tree):
    assert same(through(tree), tree)


def test_states_of_random_generators_come_back(tmp_path):
    extras.write(
        tmp_path / "x",
        extras.dump({"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}),
    )
    expected = [random.random(), np.random.rand(), torch.rand(3)]
    saved = extras.read(tmp_path / "x")
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    assert expected[:2] == [random.random(), np.random.rand()]
    assert torch.equal(expected[2], torch.rand(3))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool,
     torch.complex64, torch.float8_e4m3fn],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors_of_every_dtype(dtype, shape):
    bits = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randn(shape) * 3
    tensor = bits.to(dtype)
    back = through(tensor)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).contiguous().view(torch.uint8))


def test_a_strided_view_and_a_conjugate():
    x = torch.randn(4, 6)
    assert torch.equal(through(x.t()[1:4:2]), x.t()[1:4:2])
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(through(z.conj()), z.conj())
    assert not through(torch.ones(2, requires_grad=True)).requires_grad


def test_numpy_arrays_and_scalars():
    array = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    back = through([array, np.float32(1.5), np.bool_(True), np.int64(-3), np.array("ab")])
    assert np.array_equal(back[0], array)
    assert back[0].dtype == array.dtype
    assert back[0].flags.writeable
    assert [type(v) for v in back[1:4]] == [np.float32, np.bool_, np.int64]
    assert back[4] == np.array("ab")


def test_values_of_schedulers_and_modules():
    module = torch.nn.BatchNorm1d(2)
    state = module.state_dict()
    back = through(
        {
            "milestones": collections.Counter({3: 2}),
            "module": state,
            "q": collections.deque([1], 3),
            "s": torch.Size([2]),
        }
    )
    assert back["milestones"] == collections.Counter({3: 2})
    assert isinstance(back["milestones"], collections.Counter)
    assert back["module"]._metadata == state._metadata
    assert back["q"].maxlen == 3
    assert isinstance(back["s"], torch.Size)


def test_floats_that_json_does_not_know():
    back = through([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), lambda: 1, np.array([Thing()]), torch.ones(2).to_sparse(), True.__class__])
def test_what_it_cannot_hold_is_named_with_its_place(value):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        extras.dump({"a": [0, value]})


def test_a_subclass_is_not_quietly_made_its_base():
    class Special(dict):
        pass

    with pytest.raises(TypeError, match="Special"):
        extras.dump({"x": Special()})


def example():
    return b"".join(extras.dump({"a": [1, torch.arange(10.0), b"xyz"], "b": {"c": (2.5, "text")}, "n": np.ones(3)}))


@pytest.mark.parametrize("keep", [0, 4, 8, 15, 16, 40, 120, -1])
def test_a_truncated_file_says_so(tmp_path, keep):
    (tmp_path / "x").write_bytes(example()[:keep])
    with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
        extras.read(tmp_path / "x")


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        extras.read(tmp_path / "x")


@given(st.integers(0, 10**9), st.integers(1, 255))
@settings(deadline=None, max_examples=400)
def test_a_flipped_byte_gives_data_or_a_checkpoint_error(position, flip):
    data = bytearray(example())
    data[position % len(data)] ^= flip
    with contextlib.suppress(CheckpointError):
        extras.loads(data)


def test_the_file_is_not_overwritten(tmp_path):
    extras.write(tmp_path / "x", extras.dump(1))
    with pytest.raises(FileExistsError):
        extras.write(tmp_path / "x", extras.dump(2))
    assert os.listdir(tmp_path) == ["x"]
