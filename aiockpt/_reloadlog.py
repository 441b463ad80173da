"""What a reloader did, as plain records: its history, and a stream of events.

Records hold text and numbers only, never a model or an error: whoever keeps them keeps
nothing else alive.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from typing import Any, Final, Self

from .checkpoint import Checkpoint

__all__ = ["Attempt", "Events", "ReloadLog"]

REMEMBERED: Final = 200
"""Attempts in the history."""
UNREAD: Final = 1000
"""Events that wait for a slow listener; the oldest are dropped."""


class Attempt:
    """One try to put a checkpoint to service.

    Attributes:
        facts: of it so far; shared with the history.
    """

    def __init__(self, log: ReloadLog, checkpoint: Checkpoint, why: str) -> None:
        self._log = log
        self._begun = self._since = time.monotonic()
        self.facts: dict[str, Any] = {
            "step": checkpoint.step,
            "save_id": checkpoint.save_id,
            "name": checkpoint.name,
            "why": why,
            "begun": time.time(),
            "outcome": None,
            "stage": "lease",
            "reason": "",
            "error": "",
            "seconds": {},
            "total": 0.0,
        }
        self._tell("found")

    @property
    def stage(self) -> str:
        """What is being done."""
        return str(self.facts["stage"])

    def enter(self, stage: str) -> None:
        """Go on to the next stage."""
        self._close_stage()
        self.facts["stage"] = stage
        self._tell("stage")

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """It is over: `swapped`, `failed`, `deferred` or `cancelled`."""
        self._close_stage()
        self.facts["outcome"] = outcome
        self.facts["total"] = time.monotonic() - self._begun
        if error is not None:
            self.facts["reason"] = str(error) or type(error).__name__
            self.facts["error"] = type(error).__name__
        self._tell(outcome)

    def drained(self, seconds: float) -> None:
        """The version that it replaced is used by nobody any more, so long after it was replaced."""
        self.facts["seconds"]["drain"] = seconds
        self._tell("drained")

    def _close_stage(self) -> None:
        now = time.monotonic()
        seconds = self.facts["seconds"]
        seconds[self.stage] = seconds.get(self.stage, 0.0) + now - self._since
        self._since = now

    def _tell(self, event: str) -> None:
        self._log.publish(event, self.facts)


class Events:
    """The events from the call on: an async iterator, which ends with the reloader."""

    def __init__(self) -> None:
        self._queue: deque[dict[str, Any]] = deque(maxlen=UNREAD)
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, event: dict[str, Any]) -> None:
        """One more; a listener that is too slow misses the oldest."""
        self._queue.append(event)
        self._changed.set()

    def close(self) -> None:
        """No more will come."""
        self._closed = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._queue.popleft()


class ReloadLog:
    """The history of one reloader, and who listens."""

    def __init__(self) -> None:
        self._history: deque[Attempt] = deque(maxlen=REMEMBERED)
        self._listeners: weakref.WeakSet[Events] = weakref.WeakSet()
        self._closed = False
        self.swapped = 0
        self.failed = 0

    def begin(self, checkpoint: Checkpoint, why: str) -> Attempt:
        """A new attempt."""
        attempt = Attempt(self, checkpoint, why)
        self._history.append(attempt)
        return attempt

    def publish(self, event: str, facts: dict[str, Any]) -> None:
        """Tell all listeners."""
        self.swapped += event == "swapped"
        self.failed += event == "failed"
        record = {"event": event, "time": time.time(), **facts, "seconds": dict(facts.get("seconds", {}))}
        for listener in list(self._listeners):
            listener.put(dict(record))

    def events(self) -> Events:
        """Listen from now on."""
        events = Events()
        if self._closed:
            events.close()
        self._listeners.add(events)
        return events

    def history(self) -> list[dict[str, Any]]:
        """The attempts that are over, oldest first."""
        over = [attempt.facts for attempt in self._history if attempt.facts["outcome"] is not None]
        return [facts | {"seconds": dict(facts["seconds"])} for facts in over]

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for listener in list(self._listeners):
            listener.close()
