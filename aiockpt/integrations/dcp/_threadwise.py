"""One thing a thread: what DCP calls in the course of one save or load, it calls on one thread."""

from __future__ import annotations

import os
import threading
from typing import Generic, Protocol, TypeVar

__all__ = ["Threadwise"]


class _Closable(Protocol):
    pid: int

    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Threadwise(Generic[T]):
    """What each thread has under way; that of threads which have ended is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[int, tuple[threading.Thread, T]] = {}

    def get(self) -> T | None:
        """This thread's, if it has one; what a parent process had before a fork does not count."""
        found = self._things.get(threading.get_ident())
        if found is None or found[0] is not threading.current_thread() or found[1].pid != os.getpid():
            return None
        return found[1]

    def put(self, thing: T) -> None:
        """Make it this thread's, in place of what it had."""
        with self._lock:
            old = [self._things.pop(threading.get_ident(), None)]
            dead = [ident for ident, (thread, _) in self._things.items() if not thread.is_alive()]
            old += [self._things.pop(ident) for ident in dead]
            self._things[threading.get_ident()] = (threading.current_thread(), thing)
        for entry in old:
            if entry is not None:
                entry[1].close()

    def take(self) -> T | None:
        """Remove this thread's without closing it."""
        with self._lock:
            found = self._things.pop(threading.get_ident(), None)
        return None if found is None else found[1]

    def drop(self) -> None:
        """Close this thread's."""
        found = self.take()
        if found is not None:
            found.close()

    def close_all(self) -> None:
        """Close those of all threads."""
        with self._lock:
            things, self._things = list(self._things.values()), {}
        for _, thing in things:
            thing.close()
