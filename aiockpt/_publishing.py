"""Runs the publishers of one saver: in order, tried again, drained at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from ._log import log
from ._turns import Turns
from .checkpoint import Checkpoint
from .errors import CheckpointError, PublishError
from .publish import Publisher, PublishFunction, as_publisher
from .storage import Store

__all__ = ["Publishing", "Sleep"]


PAUSES = (0.5, 2.0, 8.0)
"""Seconds before each new try."""

Sleep = Callable[[float], Awaitable[object]]
Newest = Callable[[], int]
Failed = Callable[[str, Checkpoint, PublishError], object]


class Publishing:
    """The publishers of one saver, each with a queue of its own: a slow one delays no other.

    Args:
        store: of the run.
        publishers: publishers, or functions of a checkpoint.
        newest: gives the newest committed step.
        failed: told the publisher's name, the checkpoint and the error of what failed for good.
        sleep: waits before a new try.

    Raises:
        UsageError: one is no publisher, or cannot work with this store.
    """

    def __init__(
        self,
        store: Store,
        publishers: Iterable[Publisher | PublishFunction],
        newest: Newest,
        failed: Failed,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._lines = [_Line(as_publisher(p), store, newest, failed, sleep) for p in publishers]
        for line in self._lines:
            line.publisher.check(store)
        self.markers = sorted({line.publisher.marker for line in self._lines if line.publisher.marker})
        """Files that a step's folder may come to hold."""

    def committed(self, checkpoint: Checkpoint) -> None:
        """A step was committed; returns at once."""
        for line in self._lines:
            line.put(checkpoint)

    def again(self, newest: Callable[[], Awaitable[Checkpoint | None]]) -> None:
        """The run was opened or rewound: tell of its newest step whoever bears it again."""
        for line in self._lines:
            if line.publisher.repeats:
                line.turns.put(partial(line.publish_again, newest))

    async def idle(self) -> None:
        """Wait until everything is published, or has failed."""
        for line in self._lines:
            await line.turns.idle()

    async def close(self, deadline: float | None) -> None:
        """As `idle`, at most until `deadline`; what is not done then has failed."""
        for line in self._lines:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            await line.close(seconds)


class _Line:
    """One publisher and what it has not published yet."""

    def __init__(
        self, publisher: Publisher, store: Store, newest: Newest, failed: Failed, sleep: Sleep
    ) -> None:
        self.publisher = publisher
        self.turns = Turns(f"publisher {publisher.name}")
        self._store = store
        self._newest = newest
        self._failed = failed
        self._sleep = sleep
        self._left: list[Checkpoint] = []

    def put(self, checkpoint: Checkpoint) -> None:
        """Publish it when its turn comes."""
        self._left.append(checkpoint)
        self.turns.put(partial(self._publish, checkpoint))

    async def _publish(self, checkpoint: Checkpoint) -> None:
        """Try, and try again; an error is told, not raised."""
        for pause in (*PAUSES, None):
            # Asked before every try: a newer step may have been committed meanwhile, and its turn comes.
            if self.publisher.pointer and checkpoint.step < self._newest():
                break
            try:
                await self.publisher.publish(self._store, checkpoint)
                break
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                cause: BaseException = error  # it cancelled itself
            except Exception as error:
                cause = error
            if pause is None:
                self._fail(checkpoint, cause)
            else:
                message = "publisher %s failed for step %d and is tried again in %g s: %s"
                log.warning(message, self.publisher.name, checkpoint.step, pause, _what(cause))
                await self._sleep(pause)
        self._left.remove(checkpoint)

    async def publish_again(self, newest: Callable[[], Awaitable[Checkpoint | None]]) -> None:
        """Publish the newest step of the run, whether that had been done or not."""
        try:
            checkpoint = await newest()
        except CheckpointError as error:
            log.warning("publisher %s: cannot look for the newest step: %s", self.publisher.name, error)
            return
        if checkpoint is not None:
            self._left.append(checkpoint)
            await self._publish(checkpoint)

    async def close(self, seconds: float | None) -> None:
        """Wait so long; whatever is left is cancelled and told."""
        if await self.turns.close(seconds):
            while self._left:
                checkpoint = self._left.pop(0)
                self._fail(checkpoint, TimeoutError("it did not end in time and was cancelled"))

    def _fail(self, checkpoint: Checkpoint, cause: BaseException) -> None:
        name, step = self.publisher.name, checkpoint.step
        message = f"step {step} is committed, but publisher {name} failed: {_what(cause)}"
        error = PublishError(message, step=step, file=checkpoint.name, publisher=name)
        error.__cause__ = cause
        log.error("%s", error, extra={"step": step})
        self._failed(name, checkpoint, error)


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
