"""The loop on which this process's DCP saves and loads run.

DCP calls from threads that block, so the work is done on a loop in a thread of its own.
There is one a process: it begins with the first save or load, ends with the last one
that uses it, and never keeps the interpreter alive. A forked child makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from aiockpt.errors import UsageError
from aiockpt.sync._bridge import Bridge

__all__ = ["Lease", "Outcome"]

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]


class _Machine:
    """The bridge of this process, and how many use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bridge: Bridge | None = None
        self.users = 0


_machine = _Machine()


def _forget() -> None:
    # In a forked child the thread does not exist, and the lock may have been held.
    _machine.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


class Lease:
    """The right to use this process's loop; `close` it."""

    def __init__(self) -> None:
        with _machine.lock:
            if _machine.bridge is None:
                _machine.bridge = Bridge("DCP adapter")
            _machine.bridge.check()
            _machine.users += 1
            self._bridge = _machine.bridge
        self._closed = False

    def run(self, make: Make[T]) -> T:
        """Run a coroutine on the loop, and wait for it.

        Raises:
            UsageError: the caller is on the loop's thread, or in a forked child.
        """
        return self._bridge.run(make)

    def start(self, make: Make[T]) -> Outcome[T]:
        """Begin to run a coroutine on the loop.

        Raises:
            UsageError: as for `run`.
        """
        self._bridge.check()
        outcome: Outcome[T] = Outcome()
        if not self._bridge.background(lambda: outcome.follow(make)):
            raise UsageError("the loop of the DCP adapter is closed")
        return outcome

    def close(self, last: Make[None] | None = None) -> None:
        """Give the loop back without waiting; any number of times.

        Args:
            last: run on it before.
        """
        if self._closed or self._bridge.foreign:
            return
        self._closed = True
        with _machine.lock:
            _machine.users -= 1
            end = _machine.users == 0
            if end:
                _machine.bridge = None
        if end:
            self._bridge.wind_down(last)
        elif last is not None:
            self._bridge.background(last)


class Outcome(Generic[T]):
    """What DCP wants of a future: it begins at once, and `wait` raises what went wrong."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def follow(self, make: Make[T]) -> None:
        """Run it, on the loop."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            self._future.set_result(await make())
        except asyncio.CancelledError:
            self._future.set_exception(UsageError("it was interrupted"))
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._task = None  # a task that knows its outcome, which knows the task

    def wait(self) -> T:
        """Wait for the end; interrupted, the work is cancelled and waited for first.

        Raises:
            CheckpointError: it failed.
        """
        try:
            concurrent.futures.wait([self._future])
        except BaseException:
            task, loop = self._task, self._loop
            if task is not None and loop is not None:
                loop.call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([self._future])
            raise
        return self._future.result()

    def value(self) -> T:
        """What came of it; waits like `wait`."""
        return self.wait()

    def then(self, call: Callable[[bool], None]) -> None:
        """Call something quick once it has ended, with whether it failed."""
        self._future.add_done_callback(lambda future: call(future.exception() is not None))

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()
