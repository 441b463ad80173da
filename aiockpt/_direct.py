"""Block files over aiofiles: big aligned blocks past the page cache where the disk allows.

One hop to a thread a block. Direct I/O is an optimisation that any file system may
refuse, at open or at the first write, and that a short write can make impossible half
way: each refusal switches the descriptor to buffered I/O and goes on. What comes out is
the same file in every case.

All errors are OSErrors with `errno` and `filename`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import aiofiles

from aiockpt._threads import Lane, executor, offload, settle

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

__all__ = ["PAGE", "BlockFile", "Io", "RangeFile", "named", "open_reader", "open_writer"]

Io = Literal["auto", "direct", "buffered"]

PAGE = 4096
DIRECT_FROM = 1 << 20
"""With io="auto", smaller files and reads are not worth the trip past the page cache."""

IOV_MAX = 1024
O_DIRECT = getattr(os, "O_DIRECT", 0)
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""What file systems answer to a way of I/O they do not have."""


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Give an OSError of a call on a descriptor the file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def open_direct(path: str, flags: int) -> tuple[int, bool]:
    """Open with O_DIRECT, or without where that is refused; returns (fd, whether direct)."""
    if O_DIRECT:
        try:
            return os.open(path, flags | O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            # The refusal comes after the file was created: it is ours, O_EXCL would trip over it.
            flags = flags & ~os.O_EXCL
    return os.open(path, flags, 0o666), False


def clear_direct(fd: int) -> None:
    """Switch a descriptor to buffered I/O."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve space, so that a full disk is found out now; nothing where the file system cannot."""
    # Not os.posix_fallocate: where the call is missing, glibc writes into every block instead.
    libc = ctypes.CDLL(None, use_errno=True)
    if nbytes <= 0 or not hasattr(libc, "fallocate"):
        return
    while libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in REFUSED | {errno.ENODEV, errno.EPERM}:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


async def open_writer(path: str, nbytes: int, io: Io = "auto") -> BlockFile:
    """Make a new file of about `nbytes`; see `FileSystem.open_writer`."""
    direct = False

    def opener(name: str, flags: int) -> int:
        nonlocal direct
        wanted = io == "direct" or (io == "auto" and nbytes >= DIRECT_FROM)
        if wanted:
            fd, direct = open_direct(name, flags)
        else:
            fd = os.open(name, flags, 0o666)
        try:
            with named(path):
                preallocate(fd, _up(nbytes))
        except BaseException:
            os.close(fd)
            _remove(path)
            raise
        return fd

    def wrap(file: AsyncFileIO) -> BlockFile:
        return BlockFile(path, file, direct=direct)

    opening = aiofiles.open(path, "xb", buffering=0, opener=opener, executor=executor(Lane.BULK))
    return wrap(await settle(opening, undo=lambda file: wrap(file).discard()))


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


class BlockFile:
    """One new file, written from front to back by one task.

    It must end in `finish` or `discard`; when `finish` raises, the descriptor is closed
    and only `discard` remains to be called.
    """

    def __init__(self, path: str, file: AsyncFileIO, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self.position = 0
        self._file = file
        self._closed = False

    async def write(self, offset: int, view: memoryview) -> None:
        """Append a block; blocks are multiples of `PAGE` long, but for the last.

        Args:
            offset: where in the file; must be where the last write ended.
            view: the bytes. They must not change until this returns.
        """
        if offset != self.position:
            raise ValueError(f"{self.path}: write at {offset}, but the file ends at {self.position}")
        rest = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if self.direct and (len(rest) % PAGE or offset % PAGE):
            self._go_buffered()
        with named(self.path):
            while len(rest):
                rest = rest[await self._write_some(rest) :]

    async def finish(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, flush it to stable storage and close it.

        A failed flush is final: the kernel may have dropped the pages, and a second
        fsync would report success without them.
        """
        try:
            with named(self.path):
                await settle(self._file.truncate(nbytes))
                await offload(os.fsync, self._file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                await self._close()
            raise
        with named(self.path):
            await self._close()  # some file systems report a lost write only here

    async def discard(self) -> None:
        """Close and remove the file; quiet, idempotent, whatever happened before."""
        try:
            with contextlib.suppress(OSError):
                await self._close()
        finally:
            await offload(_remove, self.path)

    async def _write_some(self, rest: memoryview) -> int:
        """Hand `rest` to the kernel once; returns how much of it is in the file for good."""
        try:
            done = await settle(self._file.write(rest)) or 0
        except OSError as error:
            if not self.direct or error.errno not in REFUSED:
                raise
            self._go_buffered()
            return 0
        if done <= 0:
            raise OSError(errno.EIO, "the file takes no more bytes and says no reason")
        if self.direct and done < len(rest) and done % PAGE:
            done = await self._realign(done)
        self.position += done
        return done

    async def _realign(self, done: int) -> int:
        """After a short direct write: go back to the last page boundary, the next write starts there."""
        whole = done - done % PAGE
        if not whole:  # no progress that way: the rest goes through the page cache
            self._go_buffered()
            return done
        await settle(self._file.seek(self.position + whole))
        return whole

    def _go_buffered(self) -> None:
        clear_direct(self._file.fileno())
        self.direct = False

    async def _close(self) -> None:
        if not self._closed:
            self._closed = True
            await settle(self._file.close())


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
            await offload(self._read, offset, buffers)

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


def _up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
