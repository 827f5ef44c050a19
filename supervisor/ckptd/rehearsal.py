"""The daemon's scheduled drills: one at a time, in a process of their own beside the run, at the lowest priority."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable

from ckptd.core import events
from ckptd.link import Message

log = logging.getLogger(__name__)

LONGEST_S = 6 * 3600.0
"""A drill that takes longer is ended: on a machine as busy as that it shows nothing."""
STOP_PATIENCE_S = 30.0


class Rehearsal:
    """The drill that is under way, if any.

    Args:
        run_dir: of the run.
        done: told what became of it.
        now: the run's clock.
    """

    def __init__(self, *, run_dir: str, done: Callable[[events.Drilled], None], now: Callable[[], float]) -> None:
        self._run_dir = run_dir
        self._done = done
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self.holding: str | None = None
        """The checkpoint that is being read, which is not to be deleted."""

    def start(self, tier: str | None) -> None:
        """Begin, unless one is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(tier))

    async def close(self) -> None:
        """End the one that is under way, and everything that it started."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, tier: str | None) -> None:
        said: Message = {}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ckptd.drills.restore", self._run_dir, *([tier] if tier else []),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(LONGEST_S):
                errors = asyncio.create_task(_last_words(process.stderr))
                assert process.stdout is not None
                async for line in process.stdout:
                    with contextlib.suppress(ValueError):
                        said = json.loads(line)
                    self.holding = said.get("holding", self.holding)
                words = await errors
                status = await process.wait()
            if "ok" not in said:
                said = {"tier": tier or "", "problem": f"the drill ended with status {status}: {words}"}
        except TimeoutError:
            said = {"tier": tier or "", "problem": f"the drill took more than {LONGEST_S / 3600:.0f} hours"}
        except OSError as error:
            said = {"tier": tier or "", "problem": f"the drill could not be run: {error}"}
        finally:
            await _end(process)
            self.holding = None
        self._done(events.Drilled(t=self._now(), source="schedule", **said))


async def _last_words(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    tail = b""
    while data := await stream.read(65536):
        tail = (tail + data)[-2000:]
    return tail.decode(errors="replace").strip().rpartition("\n")[2]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have a drill stop its scratch run, which it does on SIGINT, and itself; then make it."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_PATIENCE_S)
