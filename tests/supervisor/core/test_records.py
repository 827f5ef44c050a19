"""A record that is changed is the one that `dataclasses.replace` would give."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from ckptd.core.policy import Policy
from ckptd.core.records import replace
from ckptd.core.state import Node, RunState, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    value: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (RunState(policy=Policy(name="a"), nodes={"n": Node(connected=True)}, t=3.0), {"t": 4.0, "status": Status.WAITING}),
        (RunState(attempt=7), {}),
        (Node(devices=(1, 2)), {"lost": True, "gone_t": None}),
        (Alone(value=[1]), {"value": [2]}),
    ],
)  # fmt: skip
def test_as_the_standard_library_does(record, changes):
    before = dataclasses.asdict(record)
    found = replace(record, **changes)
    assert found == dataclasses.replace(record, **changes)
    assert type(found) is type(record)
    assert dataclasses.asdict(record) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(found, dataclasses.fields(found)[0].name, 1.0)


def test_a_field_that_there_is_not():
    with pytest.raises(KeyError):
        replace(Node(), conected=True)
