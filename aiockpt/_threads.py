"""The only door to threads: `offload` runs a call in a lane, `settle` awaits a call that hops.

Both keep one promise that `asyncio.to_thread`, `anyio.to_thread` and a bare aiofiles
call do not keep: when they return, for whatever reason, no thread is inside the call
any more. A caller that is cancelled therefore may reuse the memory and close the
descriptor the call was using. A call that was handed over runs exactly once, even when
its caller was cancelled before a thread took it up: clean-up needs no luck.

Lanes keep calls of different weight apart: bulk I/O never makes a lock or `latest` wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import anyio

from aiockpt._lanes import OWNER, LaneExecutor
from aiockpt.errors import DrainTimeoutError

__all__ = ["OWNER", "Lane", "LaneExecutor", "abandon_busy", "executor", "offload", "settle", "trim"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lane(enum.Enum):
    """Which threads a call may use; the value is how many of them there are at most."""

    STAGE = ("stage", 1)
    """Copies from the state into blocks: one thread, it is memory-bound."""
    BULK = ("bulk", 4)
    """Reads, writes and hashes of whole blocks."""
    CONTROL = ("control", 2)
    """Small calls that must not queue behind bulk I/O: locks, leases, `latest`."""
    USER = ("user", 4)
    """Functions of the user's, which may take as long as they like."""


_lanes: dict[Lane, LaneExecutor] = {}


def executor(lane: Lane) -> LaneExecutor:
    """The process's executor for `lane`, made on first use; fits aiofiles' `executor=`."""
    found = _lanes.get(lane)
    if found is None:
        name, size = lane.value
        found = _lanes.setdefault(lane, LaneExecutor(f"aiockpt-{name}", size))  # of two makers one wins
    return found


def trim() -> None:
    """End the idle threads of all lanes now instead of after half a second."""
    for lane in list(_lanes.values()):
        lane.trim()


def abandon_busy(busy_for: float = 0.0, *, owner: object = None) -> list[str]:
    """Write off the threads that have been in one call for `busy_for` seconds.

    For a drain that ran into its time limit: a thread stuck in the kernel cannot be
    ended, but its lane gets its size back and whoever waits for it a `DrainTimeoutError`,
    cancelled or not. The thread goes on using what its call was given: see to it first
    that none of that is used again (`BlockPool.write_off`).

    Args:
        busy_for: seconds.
        owner: only calls made while `OWNER` was this object; None for all.

    Returns:
        The names of these threads.
    """
    return [name for lane in list(_lanes.values()) for name in lane.abandon(busy_for, owner=owner)]


async def offload(
    fn: Callable[[*Ts], T],
    *args: *Ts,
    lane: Lane = Lane.BULK,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Run `fn(*args)` in a thread of `lane`, with a copy of the caller's context variables.

    When the caller is cancelled (natively, repeatedly, by a timeout or an anyio scope),
    the call still runs to its end and only then the cancellation goes on. The one
    exception is a thread that was written off by `abandon_busy`.

    Args:
        fn: the blocking call.
        *args: its arguments.
        lane: which threads may run it.
        undo: called in the same lane with the result if the caller was cancelled and
            cannot receive it, so that an opened thing can be closed again.

    Raises:
        DrainTimeoutError: the thread is stuck and still inside `fn`.
        BaseException: whatever `fn` raised. After a cancellation it becomes a note on
            the CancelledError.
    """
    call = partial(_run, contextvars.copy_context(), partial(fn, *args))
    future: asyncio.Future[T] = asyncio.wrap_future(executor(lane).submit(call))
    del call, fn, args  # the frame lives as long as a traceback does
    try:
        cancelled = await _ended(future)
        if cancelled is None:
            return future.result()
        await _drop(cancelled, future, undo and (lambda result: offload(undo, result, lane=lane)))
        raise cancelled
    finally:
        cancelled = None
        del future  # it holds the error, whose traceback holds this frame


async def settle(aw: Awaitable[T], *, undo: Callable[[T], Awaitable[object]] | None = None) -> T:
    """Await something that hops to a thread, with the promise `offload` gives.

    Steps the awaitable here instead of wrapping it in a task: `asyncio.run` cancels all
    tasks when it ends, and an inner task would leave its thread behind just then.

    Args:
        aw: an aiofiles call, or anything else that ends without outside help.
        undo: awaited with the result if the caller was cancelled.
    """
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    cancelled: asyncio.CancelledError | None = None
    steps = aw.__await__()
    del aw
    try:
        while not outcome.done():
            waited = _step(steps, outcome)
            if not outcome.done():
                cancelled = await _ended(waited, cancelled)
            del waited  # it holds the error, whose traceback holds this frame
        if cancelled is None:
            return outcome.result()
        await _drop(cancelled, outcome, undo)
        raise cancelled
    finally:
        cancelled = None
        del outcome, steps


def _step(steps: Generator[Any, Any, T], outcome: asyncio.Future[T]) -> asyncio.Future[Any] | None:
    """Run the awaitable up to its next wait, which is returned, or to its end."""
    try:
        return next(steps)  # type: ignore[no-any-return]
    except StopIteration as stop:
        outcome.set_result(stop.value)
    except asyncio.CancelledError:
        raise  # its own future was cancelled: there is nothing to wait for
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        del steps, outcome
    return None


def _run(context: contextvars.Context, call: Callable[[], T]) -> T:
    try:
        return context.run(call)
    except StopIteration as error:  # a future refuses it, and its waiter would wait for ever
        raise RuntimeError("a call in a thread raised StopIteration") from error
    finally:
        del context, call


async def _ended(
    future: asyncio.Future[Any] | None, cancelled: asyncio.CancelledError | None = None
) -> asyncio.CancelledError | None:
    """Wait until `future` is done, cancelled or not; returns the first cancellation, if any."""
    try:
        if cancelled is None:
            try:
                # Like a shield, `wait` never cancels what it waits for.
                await (asyncio.sleep(0) if future is None else asyncio.wait({future}))
                return None
            except asyncio.CancelledError as error:
                cancelled = error
        # Without the scope a cancelled anyio scope around us would cancel each new wait at once.
        with anyio.CancelScope(shield=True):
            while future is not None and not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:  # a second native cancel: it tells nothing new
                    continue
        return cancelled
    finally:
        cancelled = None


async def _drop(
    cancelled: asyncio.CancelledError,
    future: asyncio.Future[T],
    undo: Callable[[T], Awaitable[object]] | None,
) -> None:
    """Take notice of an outcome that nobody will receive."""
    if future.cancelled():
        return
    error = future.exception()
    if isinstance(error, DrainTimeoutError):
        raise error  # more than a cancellation: the thread is still inside
    if error is not None:
        cancelled.add_note(f"The call had failed by then: {error!r}")
    elif undo is not None:
        with anyio.CancelScope(shield=True):
            try:
                await undo(future.result())
            except asyncio.CancelledError:
                pass  # `undo` has run; the first cancellation is raised by our caller
            except Exception as failed:
                cancelled.add_note(f"Undoing the call failed: {failed!r}")
