"""Retention in the background: one pass at a time, after commits, drained at the end.

Deleting can take longer than writing. It must not hold up the next save, and two passes
at once would get in each other's way: so there is one task, which makes another pass when
a commit came meanwhile, or when a grace time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from ._log import log
from ._retention import Retention
from .policies import Keep
from .policies.keep import KeepAll

__all__ = ["Housekeeping"]


UNWIND_TRIES = 5
"""How often, once a second, threads are written off until a pass has unwound."""


class Housekeeping:
    """Runs the retention of one saver.

    Args:
        retention: plans and deletes.
        keep: the policy.
    """

    def __init__(self, retention: Retention, keep: Keep) -> None:
        self.retention = retention
        self.run_id = ""
        self._keep = keep
        self._idle = isinstance(keep, KeepAll)
        self._wanted = False
        self._closed = False
        self._paused = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def committed(self, name: str) -> None:
        """A checkpoint was committed: see what may go now; returns at once."""
        self.retention.committed(name)
        self._kick()

    def _kick(self) -> None:
        if self._idle or self._closed:
            return
        self._wanted = True
        if self._task is None and not self._paused:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="aiockpt retention")

    async def _run(self) -> None:
        try:
            while self._wanted and not self._paused:
                self._wanted = False
                await self.retention.apply(self._keep, self.run_id)
        except Exception as error:  # the policy's, most of the time
            log.error("retention failed, the next commit tries again: %s", error, exc_info=error)
        finally:
            self._task = None
        self._come_back()

    def _come_back(self) -> None:
        """What only the grace time protects goes when it is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left = self.retention.grace_left()
        if left > 0 and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(left + 0.001, self._kick)

    async def drain(self) -> None:
        """Wait until the pass under way is over; a grace time is not waited for."""
        while self._task is not None:
            await asyncio.wait({self._task})

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """While the body runs nothing is deleted."""
        self._paused += 1
        try:
            await self.drain()
            yield
        finally:
            self._paused -= 1
            if self._wanted:
                self._kick()

    async def close(self, deadline: float | None, abandon: Callable[[], object]) -> bool:
        """Finish what is under way, at most until `deadline`, and begin nothing new.

        Args:
            deadline: on the monotonic clock; None waits for ever.
            abandon: writes off the threads that are stuck in a call of the pass.

        Returns:
            Whether the pass was late, and so was given up.
        """
        if self._timer is not None:
            self._timer.cancel()
        task = self._task
        if task is not None:
            await asyncio.wait(
                {task}, timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        self._closed = True
        if task is None or task.done():
            return False
        for _ in range(UNWIND_TRIES):
            task.cancel()
            _, stuck = await asyncio.wait({task}, timeout=1.0)
            if not stuck:
                break
            abandon()
        return True
