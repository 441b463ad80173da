"""`save_on_error=`: the user's last word when the body of a saver raised."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

__all__ = ["OnError", "note_failure", "run_on_error"]

UNWIND_SECONDS = 1.0
"""How long a cancelled hook may take to end."""

OnError = Callable[[BaseException], object]
"""Gets what the body raised; an awaitable that it returns is awaited."""


async def run_on_error(hook: OnError, body: BaseException, seconds: float | None) -> None:
    """Call the hook; whatever goes wrong with it is a note on the body's exception.

    Args:
        hook: the user's.
        body: what the body raised; it is on its way and must stay what it is.
        seconds: how long the hook may take.
    """
    if isinstance(body, GeneratorExit):
        return  # nothing may be awaited while a coroutine is closed
    try:
        outcome = hook(body)
        if inspect.isawaitable(outcome):
            await finish_on_error(outcome, body, seconds)
    except (Exception, asyncio.CancelledError) as error:
        note_failure(body, error)


async def finish_on_error(outcome: Awaitable[object], body: BaseException, seconds: float | None) -> None:
    """Await what the hook returned; as `run_on_error`."""
    # A task of its own: whoever waits here does so under a shield, where no timeout could strike.
    task = asyncio.ensure_future(outcome)
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=UNWIND_SECONDS)
        note_failure(body, TimeoutError(f"it did not end within {seconds:g} s and was cancelled"))
    elif task.cancelled():
        note_failure(body, asyncio.CancelledError("it was cancelled"))
    elif (error := task.exception()) is not None:
        note_failure(body, error)


def note_failure(body: BaseException, error: BaseException) -> None:
    """Tell on the body's exception that the hook failed."""
    if error is not body:
        body.add_note(f"save_on_error failed: {type(error).__name__}: {error}")
