"""When must a run begin to stop, so that it has saved before its time is over?"""

from __future__ import annotations

from typing import Final

from ckptd.core.estimates import Estimate

MARGIN_S: Final = 30.0
"""For stopping and leaving, and for a scheduler that counts otherwise."""
UNKNOWN_SAVE_S: Final = 20.0
"""What a save is believed to take before one was seen."""
CAUTION: Final = 3.0
"""Times the usual: a save that comes too late is worth nothing."""
MOST_OF_ALL: Final = 0.5
"""However dear saves are, half of the time is for training."""


def stop_before_s(estimate: Estimate, *, stop_grace_s: float, whole_s: float) -> float:
    """How long before the end a stop is to be asked for, seconds.

    Three times what a save takes from its start to its commit (C + U), three steps until all ranks have agreed on one,
    `restart.stop_grace`, and a margin; but no more than half of `whole_s`, the time that there was in all.
    """
    known = estimate.stall_s is not None and estimate.upload_s is not None
    save_s = (estimate.stall_s or 0.0) + (estimate.upload_s or 0.0) if known else UNKNOWN_SAVE_S
    wanted = CAUTION * (save_s + (estimate.step_s or 0.0)) + stop_grace_s + MARGIN_S
    return min(wanted, MOST_OF_ALL * whole_s)
