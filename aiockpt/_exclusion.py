"""Training threads and staging keep out of each other's way.

A thread that changes the state says so by `with saver.mutating():`. Reading (from the
capture until `staged`) and mutating exclude each other: a thread waits at the `with`
until no save reads; a save waits, without blocking the loop, until no thread mutates.
A save that waits goes before threads that come later, or a tight training loop would
never let it in.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from .errors import UsageError


class Exclusion:
    """Many readers on the loop's thread, many mutators on others; never both."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reading = 0
        self._mutators: dict[int, int] = {}
        """How deep each thread is in `mutating`."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @contextlib.contextmanager
    def mutating(self, loop_thread: int) -> Iterator[None]:
        """Keep saves out while the body runs; waits for those that read.

        Raises:
            UsageError: on the loop's own thread while a save reads: it would wait for itself.
        """
        me = threading.get_ident()
        with self._changed:
            while me not in self._mutators and (self._reading or self._waiting):
                if me == loop_thread:
                    raise UsageError(
                        "saver.mutating() on the loop's thread while a save still reads the state: "
                        "await it first (`await saver.stage(...)`)"
                    )
                self._changed.wait()
            self._mutators[me] = self._mutators.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._mutators[me] -= 1
                if not self._mutators[me]:
                    del self._mutators[me]
                self._let_readers_in()

    def try_read(self) -> bool:
        """Begin to read unless a thread mutates, or an earlier save waits for one."""
        with self._changed:
            if self._mutators or self._waiting:
                return False
            self._reading += 1
            return True

    async def read(self) -> None:
        """Begin to read as soon as no thread mutates; in the order of the calls."""
        if self.try_read():
            return
        loop = asyncio.get_running_loop()
        entry = (loop, loop.create_future())
        with self._changed:
            self._waiting.append(entry)
            self._let_readers_in()  # the thread may have left since
        read = 0
        try:
            await entry[1]
            read = 1
        finally:
            # At once: in between, a thread that waits to mutate could slip in.
            with self._changed:
                self._waiting.remove(entry)
                self._reading += read
                self._changed.notify_all()

    def end_read(self) -> None:
        """The state is no longer read."""
        with self._changed:
            self._reading -= 1
            self._changed.notify_all()

    def _let_readers_in(self) -> None:
        self._changed.notify_all()
        if self._mutators:
            return
        # They stay in the list, and so keep later mutators out, until they have come in.
        for loop, future in self._waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
