"""Retention in the background: one pass at a time, after commits, drained at the end.

Deleting can take longer than writing. It must not hold up the next save, and two passes
at once would get in each other's way: so there is one task, which makes another pass when
a commit came meanwhile, or when a grace time is over.
"""

from __future__ import annotations

import asyncio

from ._retention import Retention
from .policies import Keep
from .policies.keep import KeepAll

__all__ = ["Housekeeping"]


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
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="aiockpt retention")

    async def _run(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                await self.retention.apply(self._keep, self.run_id)
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

    async def close(self) -> None:
        """Finish what is under way and begin nothing new."""
        if self._timer is not None:
            self._timer.cancel()
        await self.drain()
        self._closed = True
