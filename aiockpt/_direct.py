"""Writing block files over aiofiles: big aligned blocks past the page cache where the disk allows.

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
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Literal, TypeVar

import aiofiles

from aiockpt._threads import Lane, executor, offload, settle
from aiockpt.errors import DrainTimeoutError

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

__all__ = ["DIRECT_FROM", "O_DIRECT", "PAGE", "REFUSED", "BlockFile", "Io", "named", "open_writer"]

T = TypeVar("T")
Io = Literal["auto", "direct", "buffered"]

PAGE = 4096
DIRECT_FROM = 1 << 20
"""With io="auto", smaller files and reads are not worth the trip past the page cache."""

O_DIRECT = getattr(os, "O_DIRECT", 0)
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
        self._lost = False  # a stuck thread is inside a call: the descriptor must stay its own

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
        if self._closed:
            raise OSError(errno.EBADF, "finished or discarded already", self.path)
        try:
            with named(self.path):
                await self._settle(self._file.truncate(nbytes))
                await self._settle(offload(os.fsync, self._file.fileno()))
        except BaseException:
            with contextlib.suppress(OSError):
                await self._close()
            raise
        with named(self.path):
            await self._close()  # some file systems report a lost write only here

    async def discard(self) -> None:
        """Close and remove the file; quiet, idempotent, whatever happened before.

        Does nothing while a thread is stuck in a call: the next one would stick as well,
        and a closed descriptor's number would go to another file.
        """
        if self._lost:
            return
        try:
            with contextlib.suppress(OSError):
                await self._close()
        finally:
            await offload(_remove, self.path)

    async def _write_some(self, rest: memoryview) -> int:
        """Hand `rest` to the kernel once; returns how much of it is in the file for good."""
        try:
            done = await self._settle(self._file.write(rest)) or 0
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
        await self._settle(self._file.seek(self.position + whole))
        return whole

    def _go_buffered(self) -> None:
        clear_direct(self._file.fileno())
        self.direct = False

    async def _close(self) -> None:
        if not self._closed and not self._lost:
            self._closed = True
            await self._settle(self._file.close())

    async def _settle(self, call: Awaitable[T]) -> T:
        try:
            return await settle(call)
        except DrainTimeoutError:
            self._lost = True
            raise


def _up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
