"""The handle of a save: its phases as awaitables.

`planned`, `staged`, `written`, `committed` are reached in this order, or the save fails
and every later phase raises its error. A phase once reached never turns into an error.
Any number of tasks may wait, any number of times; a wait that is cancelled ends only
itself. The wait that belongs to the call (`await saver.stage(...)` and its kin) is the
saver's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ._pipeline import Progress
from ._threads import settle
from .checkpoint import Checkpoint
from .errors import CheckpointError, UsageError

__all__ = ["Event", "PendingSave", "Phase"]


class Phase(enum.IntEnum):
    """How far a save has come."""

    CALLED = 0
    """Captured; waiting for admission."""
    PLANNED = 1
    """Admitted; leaves, shards and sizes are known."""
    STAGED = 2
    """An independent copy of every leaf exists: the state may change."""
    WRITTEN = 3
    """All bytes are in the store and flushed; not visible yet."""
    COMMITTED = 4
    """The manifest is durable: a crash cannot lose it."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to a save: a new phase, or bytes moved."""

    step: int
    phase: Phase
    staged: int
    """Bytes staged so far."""
    written: int
    """Bytes written so far."""
    total: int
    """Bytes there are; 0 before `planned`."""
    error: CheckpointError | None = None
    """Set on the last event of a save that failed."""


def _too_late() -> bool:
    return False


class PendingSave(Awaitable[Checkpoint]):
    """One save, from its call to its commit. Made by a saver, never by hand.

    `await pending` is `await pending.committed()`.

    Attributes:
        step: the step it saves.
        save_id: names this save for ever.
        progress: bytes staged, written and in total.
        capture_seconds: how long the call itself took, which is all the loop stood still.
        blocked_seconds: how long the save has kept its caller so far: the call, and the waits
            until the state may change.
    """

    def __init__(self, step: int, save_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.step = step
        self.save_id = save_id
        self.progress = Progress(notify=self._wake)
        self.capture_seconds = 0.0
        self.blocked_seconds = 0.0
        self._label = f"step {step}"
        self._facts: dict[str, Any] = {"step": step}
        """What errors know of it."""
        self._arguments = f"..., step={step}"
        """Of the call, for messages."""
        self._loop = loop
        self._phase = Phase.CALLED
        self._called = time.perf_counter()
        self._seconds: dict[Phase, float] = {}
        self._error: CheckpointError | None = None
        self._traceback: TracebackType | None = None
        self._checkpoint: Checkpoint | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._ended = asyncio.Event()
        self._reported = False
        self._canceller: Callable[[], bool] = _too_late
        self._as_task: asyncio.Task[Checkpoint] | None = None

    def __repr__(self) -> str:
        how = f"failed: {self._error}" if self._error else self._phase.name.lower()
        return f"<{type(self).__name__} {self._label} {self.save_id[:8]} {how}>"

    @property
    def phase(self) -> Phase:
        """The last phase it reached."""
        return self._phase

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Seconds from the call to each phase reached so far."""
        return dict(self._seconds)

    async def planned(self) -> None:
        """Wait until sizes are known and nothing stands against the save."""
        await self._reached(Phase.PLANNED)

    async def staged(self) -> None:
        """Wait until the state may change."""
        await self._reached(Phase.STAGED)

    async def written(self) -> None:
        """Wait until all bytes are flushed to stable storage (not yet visible)."""
        await self._reached(Phase.WRITTEN)

    async def committed(self) -> Checkpoint:
        """Wait until a crash cannot lose it.

        Raises:
            CheckpointError: the save failed; nothing of it is visible.
        """
        await self._reached(Phase.COMMITTED)
        assert self._checkpoint is not None
        return self._checkpoint

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        return self.committed().__await__()

    def as_task(self) -> asyncio.Task[Checkpoint]:
        """A task that waits for `committed`, for `asyncio.wait` and its kin.

        Cancelling it ends that wait; the save goes on.
        """
        self._check_loop()
        if self._as_task is None:
            name = f"aiockpt wait for {self._label}"
            self._as_task = self._loop.create_task(self.committed(), name=name)
        return self._as_task

    def done(self) -> bool:
        """Whether it has committed or failed."""
        return self._checkpoint is not None or self._error is not None

    def exception(self) -> CheckpointError | None:
        """The error of a failed save (which counts as reported then), None if it committed.

        Raises:
            UsageError: it is not done.
        """
        if not self.done():
            raise UsageError(f"the save of {self._label} is not done", **self._facts)
        self._reported = True
        return self._error

    def cancel(self) -> bool:
        """Stop it: the I/O ends, its files go, waiters get `SaveCancelledError`.

        Whoever cancels knows: the error counts as reported.

        Returns:
            False when it is too late: the commit has begun, or the save is done.
        """
        if self.done():
            return False
        self._check_loop()
        cancelled = self._canceller()
        self._reported = self._reported or cancelled
        return cancelled

    async def cancel_and_wait(self) -> None:
        """Cancel, and return once nothing touches the state or the disk any more.

        A save that had already begun to commit is waited for instead. Cancelled itself,
        it returns no earlier.
        """
        self._check_loop()
        self.cancel()
        await settle(self._ended.wait())

    async def events(self) -> AsyncIterator[Event]:
        """What happens to it, until it is done; never more than one event ahead.

        Every phase comes once; progress in between is told as of now, so that a slow
        listener skips numbers instead of filling memory. An error is the last event.
        """
        self._check_loop()
        told = Phase.CALLED
        last: Event | None = None
        while True:
            while told < self._phase:
                told = Phase(told + 1)
                yield self._event(told)
            if self.done():
                break
            event = self._event(told)
            if event != last and event.total:
                last = event
                yield event
            else:
                await self._change()
        if self._error is not None:
            self._reported = True
            yield self._event(told)

    def _event(self, phase: Phase) -> Event:
        p = self.progress
        return Event(self.step, phase, p.staged, p.written, p.total, self._error)

    # What follows is for the saver.

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """The caller is kept meanwhile."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - start

    def _reach(self, phase: Phase) -> None:
        if phase > self._phase:
            self._phase = phase
            self._seconds[phase] = time.perf_counter() - self._called
            self._wake()

    def _commit(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reach(Phase.COMMITTED)

    def _fail(self, error: CheckpointError) -> bool:
        """End it with `error`; returns whether somebody is waiting to be told."""
        self._error = error
        self._traceback = error.__traceback__
        awaited = bool(self._waiters)
        self._wake()
        return awaited

    def _end(self) -> None:
        """Nothing of it touches the state or the store any more."""
        self._ended.set()
        # A handle may be kept for long: it must not keep what was saved.
        self._canceller = _too_late

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._loop:
            message = "this save belongs to another thread or event loop; use it there, or aiockpt.sync"
            raise UsageError(message, **self._facts)

    async def _reached(self, phase: Phase) -> None:
        self._check_loop()
        while self._phase < phase:
            if self._error is not None:
                self._reported = True
                # From the same point each time: else every raise would add the frames of its waiter.
                raise self._error.with_traceback(self._traceback)
            await self._change()
