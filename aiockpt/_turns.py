"""Jobs that run one after the other, in the order in which they were given.

Each job is a task of its own that waits for the one before it. So a job runs in the
context of whoever gave it (log records and traces carry the right step), and one that
hangs can be cancelled without losing those behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ._log import log

__all__ = ["Turns"]


UNWIND_SECONDS = 1.0
"""How long cancelled jobs may take to end."""


class Turns:
    """One queue of jobs. Used on the loop's thread only.

    Args:
        name: of whoever's jobs they are, for tasks and the log.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return bool(self._tasks)

    def put(self, job: Callable[[], Awaitable[object]]) -> None:
        """Run `job` after those given before; its errors are logged."""
        before = self._tasks[-1] if self._tasks else None
        task = asyncio.get_running_loop().create_task(_run(before, job), name=f"aiockpt {self.name}")
        self._tasks.append(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s failed: %s", self.name, error, exc_info=error)

    async def idle(self) -> None:
        """Wait until nothing is left to do."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self, seconds: float | None) -> bool:
        """Wait so long, then cancel what is left; returns whether there was anything left."""
        late: set[asyncio.Task[Any]] = set(self._tasks)
        if late:
            _, late = await asyncio.wait(late, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=UNWIND_SECONDS)
        return bool(late)


async def _run(before: asyncio.Task[None] | None, job: Callable[[], Awaitable[object]]) -> None:
    if before is not None:
        await asyncio.wait([before])
        before = None  # or a long queue would keep every task that has ended
    await job()
