"""A reloader that starts and ends with its application."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import anyio

from aiockpt import Reloader
from aiockpt._log import log
from aiockpt._threads import OWNER, abandon_busy
from aiockpt.errors import DrainTimeoutError

__all__ = ["lifespan"]

GRACE: Final = 1.0
"""Seconds for what is left to do once stuck threads are given up."""
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(reloader: Reloader[Any], inner: Lifespan | None = None, *, timeout: float = 60.0) -> Lifespan:
    """A lifespan for Starlette or FastAPI, around the application's own.

    The reloader is entered first and left last. Nothing waits for the first version: the
    server answers at once, `/aiockpt/ready` with 503 until there is one. At the end requests
    under way are waited for, as long as the reloader's `drain_timeout` says. Neither Ctrl-C
    nor a cancelled scope cuts that short.

    Args:
        reloader: not entered yet.
        inner: the application's own lifespan; the state it yields is the application's.
        timeout: seconds after which the end goes on without the reloader: a thread of it may
            be stuck in a disk. That is logged.

    Returns:
        What goes into `Starlette(lifespan=)` or `FastAPI(lifespan=)`.
    """

    @asynccontextmanager
    async def around(app: Any) -> AsyncIterator[Any]:
        mark = OWNER.set(reloader)  # its thread calls are known as its own
        try:
            await reloader.__aenter__()
        finally:
            OWNER.reset(mark)
        try:
            if inner is None:
                yield None
            else:
                async with inner(app) as state:
                    yield state
        finally:
            await _leave(reloader, timeout)

    return around


async def _leave(reloader: Reloader[Any], timeout: float) -> None:
    """End the reloader, whatever happens to the task that waits for it.

    A task of its own: a thread that is stuck keeps its task from ending, not this one.
    """
    loop = asyncio.get_running_loop()
    mark = OWNER.set(reloader)
    leaving = loop.create_task(reloader.__aexit__(*sys.exc_info()), name="aiockpt reloader's end")
    OWNER.reset(mark)
    cancelled = await _wait(leaving, timeout)
    if not leaving.done():
        # Else the loop would wait for these threads when it is closed, for good.
        stuck = ", ".join(abandon_busy(owner=reloader)) or "none"
        log.error(
            "%s: the reloader did not end within %g s: threads %s", reloader.catalog.store.url, timeout, stuck
        )
        leaving.cancel()
        cancelled = cancelled or await _wait(leaving, GRACE)
    if leaving.done() and not leaving.cancelled():
        with contextlib.suppress(DrainTimeoutError):  # told above
            leaving.result()
    if cancelled is not None:
        raise cancelled


async def _wait(task: asyncio.Task[None], seconds: float) -> asyncio.CancelledError | None:
    """Wait for a task for so long; returns a cancellation that came meanwhile."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    cancelled: asyncio.CancelledError | None = None
    # The scope is for frameworks whose own is cancelled: each wait would end at once.
    with anyio.CancelScope(shield=True):
        while not task.done() and loop.time() < deadline:
            try:
                await asyncio.wait([task], timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled
