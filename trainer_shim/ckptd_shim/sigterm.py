"""What does SIGTERM do to a training script? It asks for a save and a stop, at a step on which all ranks agree."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType


class Sigterm:
    """Turns SIGTERM into a wish to stop at the next agreed step, where the script has no handler of its own."""

    def __init__(self) -> None:
        self.asked = False
        self._pid = os.getpid()

    @classmethod
    def install(cls) -> Self | None:
        """Take SIGTERM over; None where this is not the main thread or somebody else has a handler."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return None
        handler = cls()
        signal.signal(signal.SIGTERM, handler)
        return handler

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, a loader's worker perhaps: it must die of the signal as ever.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True

    def remove(self) -> None:
        """Give SIGTERM back."""
        if signal.getsignal(signal.SIGTERM) is self and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
