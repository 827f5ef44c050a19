"""What a terminal is given to show: nothing that a job says may steer it."""

from __future__ import annotations

import pytest

from ckptd.cli import _text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[31mloss\x1b[0m is \x1b[1;38;5;9mNaN\x1b[K", "loss is NaN"),
        ("\x1b]0;a title\x07done\x1b]8;;http://x\x1b\\", "done"),
        ("10%\r20%\x00\x07 \x9b2J", "10%\\r20%\\x00\\x07 \\x9b2J"),
        ("\x1bc, \x1b", "\\x1bc, \\x1b"),
        ("line\n\tnext: größer ☃", "line\n\tnext: größer ☃"),
    ],
)
def test_what_steers_a_terminal_is_left_out_or_escaped(said, shown):
    assert _text.printable(said) == shown
