"""Listeners: be told what happens to the saves of a run.

A listener is any object with some of the methods of `Listener`, each sync or async.

- Called on the saver's loop, in the order of events; a sync method must not block.
- Sync methods have run by the time an awaiter of the same phase goes on (unless an async
  method of the same listener is still busy with an earlier event: order goes first).
- A slow async method delays only the later events of its own listener, never a save.
- An error is logged with the listener's name and never reaches a save or the run.
- Leaving the saver waits until all is told, for at most `drain_timeout`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ._log import log
from ._turns import Turns
from .checkpoint import Checkpoint
from .errors import CheckpointError, UsageError
from .pending import PendingSave

__all__ = ["Failure", "Listener"]


EVENTS = ("begin", "before_save", "after_stage", "after_commit", "after_failure", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong."""

    step: int
    save_id: str
    error: CheckpointError
    """Why; `SaveCancelledError` for a save that was cancelled."""
    publisher: str | None = None
    """The publisher that failed although the step is committed; None: the save itself."""


class Listener:
    """The methods a listener may have; deriving from this class is not needed.

    Any of them may be `async def`.
    """

    def begin(self, saver: Any) -> Awaitable[None] | None:
        """The saver was entered. The async `Saver`, under `aiockpt.sync` too.

        Keep it to call `saver.request_stop("why")` later.
        """
        return None

    def before_save(self, pending: PendingSave) -> Awaitable[None] | None:
        """A save has begun: its state was captured, nothing is written yet."""
        return None

    def after_stage(self, pending: PendingSave) -> Awaitable[None] | None:
        """The state of this save may change."""
        return None

    def after_commit(self, checkpoint: Checkpoint) -> Awaitable[None] | None:
        """A crash cannot lose this step any more."""
        return None

    def after_failure(self, failure: Failure) -> Awaitable[None] | None:
        """A save failed or was cancelled, or a committed step could not be published."""
        return None

    def end(self, saver: Any) -> Awaitable[None] | None:
        """The saver has drained; nothing comes after this."""
        return None


class Listeners:
    """Tells every listener of one saver.

    Args:
        listeners: in the order in which they are told.

    Raises:
        UsageError: one has none of the methods.
    """

    def __init__(self, listeners: Iterable[object]) -> None:
        self._ears = [_Ear(listener) for listener in listeners]

    def tell(self, event: str, value: object) -> None:
        """Hand an event to all; never raises."""
        for ear in self._ears:
            ear.tell(event, value)

    async def close(self, deadline: float | None) -> None:
        """Wait until everybody has been told everything, at most until `deadline`."""
        for ear in self._ears:
            await ear.close(deadline)


class _Ear:
    """One listener and the events it has not been told yet."""

    def __init__(self, listener: object) -> None:
        name = type(listener).__name__
        methods = {event: getattr(listener, event, None) for event in EVENTS}
        self._methods = {event: method for event, method in methods.items() if callable(method)}
        if not self._methods or isinstance(listener, type):
            raise UsageError(f"{listener!r:.80} is no listener: it has none of {', '.join(EVENTS)}")
        self._name = name
        self._turns = Turns(f"listener {name}")

    def tell(self, event: str, value: object) -> None:
        if event not in self._methods:
            return
        if self._turns.busy:
            self._turns.put(partial(self._later, event, value))
            return
        outcome = self._call(event, value)
        if outcome is not None:
            self._turns.put(partial(self._finish, event, outcome))

    def _call(self, event: str, value: object) -> Awaitable[object] | None:
        try:
            outcome = self._methods[event](value)
        except (Exception, asyncio.CancelledError) as error:
            self._log(event, error)
            return None
        return outcome if inspect.isawaitable(outcome) else None

    async def _later(self, event: str, value: object) -> None:
        outcome = self._call(event, value)
        if outcome is not None:
            await self._finish(event, outcome)

    async def _finish(self, event: str, outcome: Awaitable[object]) -> None:
        try:
            await outcome
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._log(event, error)  # it cancelled itself
        except Exception as error:
            self._log(event, error)

    def _log(self, event: str, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}"
        log.error("listener %s failed in %s (the save goes on): %s", self._name, event, what, exc_info=error)

    async def close(self, deadline: float | None) -> None:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if await self._turns.close(seconds):
            log.error("listener %s did not end in time; it was cancelled", self._name)
