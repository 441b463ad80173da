"""The run's lock: `RUN/lock`, a POSIX record lock with a record in it; or a reference, in memory."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable
from typing import Self

from .._files import FileSystem, Lock

__all__ = ["LocalLock", "MemoryLock"]


class LocalLock:
    """A held lock file. Dropped without `release`, it lets the lock go and leaves the file.

    Args:
        files: makes the calls.
        lock: the lock that was taken.
    """

    def __init__(self, files: FileSystem, lock: Lock) -> None:
        self._files = files
        self._path = lock.path
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._held(lock)

    def _held(self, lock: Lock) -> None:
        self._lock = lock
        self.place = lock.key
        self._finalizer = weakref.finalize(self, lock.release)
        self._finalizer.atexit = False

    def read(self) -> bytes:
        with self._guard:
            try:
                return self._files.read_lock(self._lock)
            except FileNotFoundError:
                self._take_again()
                return self._files.read_lock(self._lock)

    def write(self, record: bytes) -> None:
        with self._guard:
            self._files.write_lock(self._lock, record)

    def release(self, *, forget: bool) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the lock is its parent's
        with self._guard:
            try:
                if forget and self._finalizer.alive:
                    self._forget()
            finally:
                self._finalizer()

    def _take_again(self) -> None:
        """Somebody removed the file: whoever makes a new one first has the lock."""
        lock = self._files.lock(self._path)
        if lock is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), self._path)
        self._finalizer()
        self._held(lock)

    def _forget(self) -> None:
        try:
            self._files.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError:
            # A record that stays would keep others out for a while: no record is as good as no file.
            with contextlib.suppress(OSError):
                self._files.write_lock(self._lock, b"")


class MemoryLock:
    """The lock of a run in memory: held by reference, as an attempt is.

    Args:
        holder: gives the lock that is held now.
        closed: whether the store that took it is closed.
    """

    place = (0, 0)

    def __init__(self, holder: Callable[[], Self | None], closed: Callable[[], bool]) -> None:
        self.record = b""
        self._holder = holder
        self._closed = closed
        self._released = False
        self._pid = os.getpid()

    def alive(self) -> bool:
        """Whether it counts: a forked child has a copy of its own."""
        return not self._released and not self._closed() and self._pid == os.getpid()

    def read(self) -> bytes:
        if self._holder() is not self:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), "lock")
        return self.record

    def write(self, record: bytes) -> None:
        self.record = record

    def release(self, *, forget: bool) -> None:
        del forget  # the record goes with the lock in any case
        self._released = True
