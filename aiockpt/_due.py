"""When a save is due, and what saves cost: the books a trigger is asked with."""

from __future__ import annotations

import time
from collections.abc import Callable

from .policies import Moment, When

__all__ = ["Due"]

SMOOTH = 0.3
"""Weight of the newest measurement; one slow save does not change the rhythm for long."""


class Due:
    """Asks a trigger, and remembers since when it counts.

    Args:
        when: the trigger; None is never due.
        clock: monotonic seconds.
    """

    def __init__(self, when: When | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.when = when
        self.preempted = False
        self.pending = 0
        """Saves under way."""
        self.skipped = 0
        """Saves that were due and left out."""
        self.seen: int | None = None
        """The highest step anybody asked about."""
        self._clock = clock
        self._last_step: int | None = None
        self._last_time = clock()
        self._blocked = 0.0
        self._write = 0.0

    def ask(self, step: int) -> bool:
        """Whether a save is due after `step` completed steps."""
        self.seen = step if self.seen is None else max(self.seen, step)
        if self.when is None:
            return False
        moment = Moment(
            step=step,
            now=self._clock(),
            last_step=self._last_step,
            last_time=self._last_time,
            blocked_seconds=self._blocked,
            write_seconds=self._write,
            preempted=self.preempted,
            pending=self.pending,
        )
        return self.when(moment)

    def restored(self, step: int) -> None:
        """Count from a restored step on; steps seen before it no longer matter."""
        self.seen = step
        self.begun(step)

    def begun(self, step: int) -> None:
        """A save of `step` has begun: count from here."""
        self._last_step = step
        self._last_time = self._clock()

    def measured(self, *, blocked: float | None = None, write: float | None = None) -> None:
        """What a save cost, in seconds: until the state could change, and until the commit."""
        if blocked is not None:
            self._blocked = _smooth(self._blocked, blocked)
        if write is not None:
            self._write = _smooth(self._write, write)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - SMOOTH) * old + SMOOTH * new
