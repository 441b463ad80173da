"""Signs of life that do not depend on the event loop: a call every so many seconds.

A training loop may keep its thread, and the loop with it, busy for minutes; whoever looks
at our record meanwhile must not take us for dead. One daemon thread of the process does
nothing but wait, and hands each call to the control lane when its time has come.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from ._threads import Lane, executor

__all__ = ["Beat"]


class Beat:
    """Calls a method again and again, until it is stopped or the method's object is gone.

    Args:
        seconds: between two calls. A call that takes longer is not overtaken.
        call: a bound method, held weakly; it may block, and sees to its own errors.
    """

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._seconds = seconds
        self._call = weakref.WeakMethod(call)
        self._running: Future[object] | None = None
        self.due = time.monotonic() + seconds
        _pulse.add(self)

    def stop(self) -> None:
        """Begin no more calls; one under way goes on. Any number of times."""
        _pulse.remove(self)

    def strike(self, now: float) -> bool:
        """Hand the call over if it is time; returns whether there is still something to call."""
        call = self._call()
        if call is None:
            return False
        if now >= self.due:
            self.due = now + self._seconds
            if self._running is None or self._running.done():
                self._running = executor(Lane.CONTROL).submit(call)
        return True


class _Pulse:
    """The one thread; it is there as long as there are beats."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without beats; a forked child has no thread of its parent's."""
        self._changed = threading.Condition()
        self._beats: list[Beat] = []
        self._thread: threading.Thread | None = None

    def add(self, beat: Beat) -> None:
        _hook()
        with self._changed:
            self._beats.append(beat)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aiockpt-pulse", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, beat: Beat) -> None:
        with self._changed:
            self._beats = [other for other in self._beats if other is not beat]
            self._changed.notify()

    def _run(self) -> None:
        beats: list[Beat] = []
        while True:
            # Without our lock: handing a call over takes a lane's, and whoever holds that may
            # collect garbage whose finalizer stops a beat, which takes ours.
            gone = [beat for beat in beats if not beat.strike(time.monotonic())]
            with self._changed:
                self._beats = [beat for beat in self._beats if beat not in gone]
                if not self._beats:
                    self._thread = None
                    return
                self._changed.wait(max(0.0, min(beat.due for beat in self._beats) - time.monotonic()))
                beats = list(self._beats)
            gone.clear()


_pulse = _Pulse()


@functools.cache
def _hook() -> None:
    os.register_at_fork(after_in_child=_pulse.reset)
