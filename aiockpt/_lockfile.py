"""A lock file: held by one owner in one process, with a small record that others can read.

A POSIX record lock, not `flock`: that one lives on in a forked data loader worker after
its trainer was killed. The price: closing *any* descriptor of the file frees the lock, so
nobody else in this process may open it by its name. What this module does keeps to that,
and `Lock.read` takes a lock back that somebody else's carelessness has freed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from aiockpt._direct import named

__all__ = ["Lock", "LockFile", "peek_lock", "take_lock"]

RECORD_BYTES = 4096
"""No record is longer; what follows in the file is not looked at."""

_held: dict[tuple[int, int], tuple[int, int]] = {}
"""(device, inode) of the lock files this process holds -> (process id, which a fork changes; descriptor)."""
# Reentrant: a collection inside may end in `release`, by the finalizer of an attempt or store nobody kept.
_held_guard = threading.RLock()


class LockFile(Protocol):
    """The run's lock, held as well as the store can hold it, and the record in it.

    Whether the lock alone keeps others out depends on the store and its file system; the
    record, renewed by whoever is alive, is for those whom it does not keep out. All methods
    block and may be called from any thread: they are for a lane.
    """

    place: tuple[int, int]
    """Which file on which device it is, for this machine only."""

    def read(self) -> bytes:
        """The record as it is now, whoever wrote it; b"" for none.

        A lock file that was removed is made again.

        Raises:
            BlockingIOError: somebody else has the lock now.
            OSError: the store failed.
        """

    def write(self, record: bytes) -> None:
        """Make this the record, durably.

        Raises:
            OSError: the store failed; the record is the old one, the new one, or torn.
        """

    def release(self, *, forget: bool) -> None:
        """Let the lock go; any number of times.

        Args:
            forget: remove the record first, because it is ours.
        """


class Lock:
    """A lock file that is held; the kernel frees it when the process dies, children included.

    Attributes:
        path: its name when it was taken.
        key: (device, inode): which file it is, on this machine.
    """

    def __init__(self, path: str, fd: int, key: tuple[int, int]) -> None:
        self.path = path
        self.key = key
        self._fd = fd
        self._held = True
        # A descriptor that is closed while another thread reads may be somebody else's by then.
        self._using = threading.RLock()

    def release(self) -> None:
        """Let go; idempotent. The file stays: unlink it before, while it is still ours."""
        with self._using, _held_guard:
            if self._held:
                self._held = False
                _held.pop(self.key, None)
                os.close(self._fd)

    def read(self) -> bytes:
        """The file's content, once it is certain that the lock is held and the file has its name.

        Raises:
            BlockingIOError: the lock was lost to another process.
            FileNotFoundError: the file was removed, or another one has its name.
        """
        with self._open() as fd:
            # Held already, this changes nothing; freed by a stray close in this process, it mends that.
            _lock_now(fd, self.path)
            if _key(self.path) != self.key:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
            # Where locks do not reach other hosts, those may have written here meanwhile.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return os.pread(fd, RECORD_BYTES, 0)

    def write(self, data: bytes) -> None:
        """Make `data` the file's whole content, durable and seen by other hosts."""
        with self._open() as fd:
            if os.pwrite(fd, data, 0) != len(data):
                raise OSError(errno.EIO, "the record was written in part", self.path)
            os.ftruncate(fd, len(data))
            os.fsync(fd)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with self._using, named(self.path):
            if not self._held:
                raise OSError(errno.EBADF, "the lock was released", self.path)
            yield self._fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take_lock(path: str) -> Lock | None:
    """Take the lock file at `path`, making it if need be; None when somebody holds it."""
    with _held_guard:
        while True:
            # Looked at by name first: opening and closing our own lock file would free it.
            if _own(path) is not None:
                return None
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                with named(path):
                    _lock_now(fd, path)
                    stat = os.fstat(fd)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    return None
                raise
            key = (stat.st_dev, stat.st_ino)
            if _key(path) == key:
                _held[key] = (os.getpid(), fd)
                return Lock(path, fd, key)
            os.close(fd)  # unlinked between our open and our lock: a lock nobody else will ever see


def peek_lock(path: str) -> bytes:
    """What a lock file says, whoever holds it; b"" when there is none."""
    with _held_guard:
        own = _own(path)
        if own is not None:
            return os.pread(own, RECORD_BYTES, 0)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            with named(path):
                return os.pread(fd, RECORD_BYTES, 0)
        finally:
            os.close(fd)


def _own(path: str) -> int | None:
    pid, fd = _held.get(_key(path), (0, -1))
    return fd if pid == os.getpid() else None


def _lock_now(fd: int, path: str) -> None:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path) from error
        raise


def _key(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (stat.st_dev, stat.st_ino)
