"""Workers in this process: in the caller's line, or in a thread beside it."""

from __future__ import annotations

from typing import Any

from .._threads import Lane, offload
from . import Job, Worker

__all__ = ["InlineWorker", "ThreadWorker"]


class ThreadWorker(Worker):
    """The target is copied; the savefun runs in a thread while the caller goes on."""

    async def run(self, job: Job) -> Any:
        """Call the job in a thread."""
        return await offload(job, lane=Lane.USER)


class InlineWorker(ThreadWorker):
    """Nothing is copied, and the caller waits for the savefun; the loop does not, it is in a thread, too."""

    copies = False
