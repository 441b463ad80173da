"""Reading ranges of a file into given memory: the page cache first, then past it.

One hop to a thread a range, however many buffers it fills. All errors are OSErrors with
`errno` and `filename`, but for EOFError where the file is too short.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import aiofiles

from aiockpt._direct import DIRECT_FROM, O_DIRECT, PAGE, REFUSED, Io, named
from aiockpt._threads import Lane, executor, offload, settle
from aiockpt.errors import DrainTimeoutError

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

__all__ = ["RangeFile", "open_reader"]

IOV_MAX = 1024
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


async def open_reader(path: str, io: Io = "auto") -> RangeFile:
    """Open a file for reading ranges of it; see `FileSystem.open_reader`."""
    size = 0

    def opener(name: str, flags: int) -> int:
        nonlocal size
        fd = os.open(name, flags)
        size = os.fstat(fd).st_size  # here, in the thread: on a network file system it is a round trip
        return fd

    def wrap(file: AsyncFileIO) -> RangeFile:
        return RangeFile(path, file, size, io=io)

    opening = aiofiles.open(path, "rb", buffering=0, opener=opener, executor=executor(Lane.BULK))
    return wrap(await settle(opening, undo=lambda file: wrap(file).close()))


class RangeFile:
    """A file that is read in ranges, by several tasks at once if they like."""

    def __init__(self, path: str, file: AsyncFileIO, size: int, *, io: Io) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._fd = file.fileno()
        self._io = io
        self._cached = bool(RWF_NOWAIT) and io == "auto"
        self._direct = bool(O_DIRECT) and io != "buffered"
        self._direct_fd: int | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers`, one after another, with the bytes from `offset` on.

        Raises:
            EOFError: the file ends before that.
        """
        with named(self.path):
            try:
                await offload(self._read, offset, buffers)
            except DrainTimeoutError:
                self._closed = True  # a stuck thread is inside: the descriptors must stay its own
                raise

    async def close(self) -> None:
        """Close the file; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await settle(self._file.close())
        finally:
            if self._direct_fd is not None:
                await offload(os.close, self._direct_fd)

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read in the calling thread: what is cached, then past the cache, then what remains."""
        rest = _Rest(offset, buffers)
        if self._cached:
            self._read_cached(rest)
        if self._direct:
            self._read_direct(rest)
        while rest.todo:
            if not rest.advance(os.preadv(self._fd, rest.batch(), rest.offset)):
                missing = sum(map(len, rest.todo))
                raise EOFError(f"{self.path} ends at byte {rest.offset}, {missing} more were expected")

    def _read_cached(self, rest: _Rest) -> None:
        try:
            while rest.todo and rest.advance(os.preadv(self._fd, rest.batch(), rest.offset, RWF_NOWAIT)):
                pass
        except BlockingIOError:
            pass  # the next page is not in the cache
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self._cached = self._direct = False  # tmpfs for one: its cache is all there is

    def _read_direct(self, rest: _Rest) -> None:
        least = DIRECT_FROM if self._io == "auto" else PAGE
        try:
            while sum(map(len, batch := rest.aligned_batch())) >= least:
                if not rest.advance(os.preadv(self._direct_descriptor(), batch, rest.offset)):
                    return
                least = PAGE  # what was begun directly goes on so: the cache has no more of it either
        except OSError as error:
            if error.errno not in REFUSED | {errno.ENOENT}:
                raise
            self._direct = False

    def _direct_descriptor(self) -> int:
        """A second descriptor, opened on first need: O_DIRECT on the first would be for all readers."""
        with self._lock:
            if self._direct_fd is None:
                # By descriptor, not by path: the file may have been renamed or retired by now.
                name = f"/proc/self/fd/{self._fd}"
                self._direct_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)
            return self._direct_fd


class _Rest:
    """What a read still has to fill, and from where."""

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.offset = offset
        self.todo = deque(memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes)

    def batch(self) -> list[memoryview]:
        """As many buffers as one system call takes."""
        return list(islice(self.todo, IOV_MAX))

    def aligned_batch(self) -> list[memoryview]:
        """The buffers at the front that direct I/O can fill; none where offset or memory are not aligned."""
        found: list[memoryview] = []
        if self.offset % PAGE:
            return found
        for view in islice(self.todo, IOV_MAX):
            whole = len(view) - len(view) % PAGE
            if not whole or ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE:
                break
            found.append(view[:whole])
            if whole < len(view):
                break
        return found

    def advance(self, nbytes: int) -> bool:
        """Count `nbytes` as read; returns whether there were any."""
        self.offset += nbytes
        left = nbytes
        while left:
            view = self.todo.popleft()
            if left < len(view):
                self.todo.appendleft(view[left:])
            left -= min(left, len(view))
        return nbytes > 0
