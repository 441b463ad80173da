"""A loop on a thread of its own, and the calls that other threads make there.

A thread that calls waits on a bare lock, not on an `Event` or a `Future`: those take
locks of their own in Python, and a signal handler that saves (it runs inside the wait)
could find them taken by the very thread it interrupted.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from .._log import log
from ..errors import UsageError

__all__ = ["Bridge", "Make"]

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]


GRACE_SECONDS: Final = 1.0
"""How long calls of other threads may go on once the bridge closes."""

JOIN_SECONDS: Final = 2.0
"""How long closing waits for the thread; one that is stuck ends by itself when it can."""


class Bridge:
    """An event loop in a daemon thread.

    Attributes:
        what: whose bridge it is, for messages.
        limit: seconds that an interrupted call may take to end; None: as long as it takes.
        overdue: an interrupted call did not end within `limit`.
    """

    def __init__(self, what: str, *, limit: float | None = None) -> None:
        self.what = what
        self.limit = limit
        self.overdue = False
        self._pid = os.getpid()
        # Reentrant: a signal handler may call while its own thread is inside `submit`.
        self._lock = threading.RLock()
        self._closing = False
        self._winding = False
        # Not `new_event_loop`: whatever policy or patch the application has is not meant for us.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=_turn, args=(self._loop,), name="aiockpt-sync", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    @property
    def thread(self) -> int:
        """The loop's thread."""
        return self._thread.ident or 0

    @property
    def here(self) -> bool:
        """Whether the caller is on the loop's thread."""
        return threading.get_ident() == self._thread.ident and not self.foreign

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, where the thread does not exist."""
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        """Whether no call is taken any more."""
        return self._closing

    def check(self) -> None:
        """Refuse what could never end.

        Raises:
            UsageError: this is a forked child, or the loop's own thread.
        """
        if self.foreign:
            raise UsageError(f"this {self.what} belongs to the parent process; make another one in the child")
        if self.here:
            raise UsageError(f"called on the thread that the {self.what} runs on: it would wait for itself")

    def run(
        self,
        make: Make[T],
        *,
        timeout: float | None = None,
        patient: bool = False,
        gone: Callable[[], T] | None = None,
    ) -> T:
        """Run a coroutine on the loop; returns when it has ended, with its result or its error.

        Interrupted (Ctrl-C, or whatever a signal handler raises) or late, it is cancelled
        and waited for first.

        Args:
            make: makes the coroutine; called on the loop's thread, in a copy of the caller's context.
            timeout: seconds.
            patient: do not cancel it when interrupted; the interrupt is raised afterwards, or when
                another one comes.
            gone: called instead, on the caller's thread, if the bridge closes first.

        Raises:
            TimeoutError: it took longer. (An outcome that just made it goes first.)
            UsageError: not from here, or the bridge was closed before it had ended.
        """
        self.check()
        call = _Call(self._loop, make)
        interrupt: BaseException | None = None
        taken = late = False
        try:
            taken = self._hand_over(call)
            late = taken and not call.wait(timeout)
        except BaseException as error:
            interrupt = error
        try:
            if interrupt is not None or late:
                self._end(call, patient=patient)
            if interrupt is not None:
                call.annotate(interrupt)
                raise interrupt
            if taken and not call.cut_off(late=late):
                return call.outcome()
            if gone is not None:
                return gone()
            when = "was closed while this call ran" if taken else "is closed"
            raise UsageError(f"the {self.what} {when}")
        finally:
            interrupt = None  # its traceback holds this frame

    def _hand_over(self, call: _Call[Any]) -> bool:
        """Give it to the loop, unless that closes."""
        with self._lock:
            if not self._closing:
                call.submit()
            return not self._closing

    def _end(self, call: _Call[Any], *, patient: bool) -> None:
        """Wait for a call that is given up. A further interrupt ends the wait of the patient only."""
        limit = None if patient else self.limit
        deadline = None if limit is None else time.monotonic() + limit
        asked = patient
        while True:
            try:
                if not asked:
                    call.cancel()
                    asked = True
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self.overdue = not call.wait(left) or self.overdue
                return
            except BaseException:  # one more Ctrl-C; the first one is raised in the end
                if patient:
                    return

    def ask(self, look: Callable[[], T]) -> T:
        """Call a quick function on the loop's thread, where nothing changes under its eyes."""

        async def there() -> T:
            return look()

        if self.here or (self.closed and not self.foreign):
            return look()
        return self.run(there)

    def background(self, make: Make[None]) -> bool:
        """Start a coroutine nobody waits for; returns whether it was taken."""
        return not self.foreign and self._hand_over(_Call(self._loop, make))

    def close(self) -> None:
        """End calls that still run, the loop and the thread; any number of times."""
        self.wind_down(None)
        self._thread.join(JOIN_SECONDS)

    def wind_down(self, finish: Make[None] | None) -> None:
        """As `close`, without waiting; `finish` is awaited before."""
        if self.foreign:
            return
        try:
            self._loop.call_soon_threadsafe(self._start_winding, finish)
        except RuntimeError:  # the loop is closed
            return

    def _start_winding(self, finish: Make[None] | None) -> None:
        if not self._winding:
            self._winding = True
            self._winder = self._loop.create_task(self._wind(finish))

    async def _wind(self, finish: Make[None] | None) -> None:
        if finish is not None:
            try:
                await finish()
            except Exception as error:
                log.error("closing what nobody closed failed: %s", error)
        with self._lock:
            self._closing = True
        await asyncio.sleep(0)  # what was handed over before begins now
        me = {asyncio.current_task()}
        if calls := asyncio.all_tasks() - me:
            await asyncio.wait(calls, timeout=GRACE_SECONDS)
        while calls := asyncio.all_tasks() - me:
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """The life of the thread. It knows nothing of the bridge, which may be collected meanwhile."""
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Call(Generic[T]):
    """One coroutine on the loop, and the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Make[T]) -> None:
        self._loop = loop
        self._make: Make[T] | None = make
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def submit(self) -> None:
        """Hand it over to the loop."""
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if not self._ended:
            self._task = self._loop.create_task(self._run(), context=self._context)
            self._task.add_done_callback(self._end)

    async def _run(self) -> None:
        make, self._make = self._make, None
        assert make is not None
        try:
            self._value = await make()
        except BaseException as error:
            # Everything: a SystemExit from a user's state_dict() would end the loop, not the caller.
            self._error = error

    def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None and task.cancelled():  # before its first step
            self._error = asyncio.CancelledError()
        self._ended = True
        self._running.release()

    def cancel(self) -> None:
        """Ask it to end; `wait` tells when it has."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed: it has ended, or never began
            if not self._ended:
                self._error = asyncio.CancelledError()
                self._end(None)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._ended:  # it was interrupted before it was handed over
            self._error = asyncio.CancelledError()
            self._end(None)

    def wait(self, timeout: float | None) -> bool:
        """Wait until it has ended; returns whether it has."""
        if self._ended:
            return True
        seconds = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        return self._running.acquire(timeout=seconds)

    def cut_off(self, *, late: bool) -> bool:
        """Whether it was cancelled, though not by its caller for being `late`.

        Raises:
            TimeoutError: it was late, and did not just make it.
        """
        cancelled = isinstance(self._error, asyncio.CancelledError)
        if late and (cancelled or not self._ended):
            raise TimeoutError("it takes longer than that, and goes on")
        return cancelled

    def outcome(self) -> T:
        """Its result, or its error as it was raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._value  # type: ignore[return-value]
        finally:
            del error  # its traceback holds this frame

    def annotate(self, interrupt: BaseException) -> None:
        """Tell an error that the caller will not receive by itself."""
        if not self._ended:
            interrupt.add_note("The call did not end in time; a thread may still be inside it.")
        elif self._error is not None and not isinstance(self._error, asyncio.CancelledError):
            interrupt.add_note(f"The call had failed by then: {self._error!r}")
