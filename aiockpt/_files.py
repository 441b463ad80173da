"""Every call that touches a disk goes through one object: `FileSystem`.

It is the seam where tests put faults and recordings. The blocking methods are for
`offload(..., lane=Lane.CONTROL)`; files of blocks are asynchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from types import TracebackType
from typing import Self

from aiockpt._direct import BlockFile, Io, named, open_writer
from aiockpt._ranges import RangeFile, open_reader

__all__ = ["BlockFile", "FileSystem", "Io", "Lock", "RangeFile"]

RENAME_NOREPLACE = 1
AT_FDCWD = -100
CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class FileSystem:
    """The calls aiockpt makes to a disk; override them to see or to spoil each one.

    All raise OSErrors with `errno` and `filename`. New files get mode 0o666 and new
    folders 0o777, less the umask, which is never read or changed.
    """

    def mkdir(self, path: str) -> None:
        """Make one folder; its parent must be there."""
        os.mkdir(path)

    def rename(self, src: str, dst: str) -> None:
        """Move `src` to the new name `dst`; FileExistsError if there is anything."""
        rename_new(src, dst)

    def replace(self, src: str, dst: str) -> None:
        """Move the file `src` to `dst`, in place of what is there."""
        os.replace(src, dst)

    def link(self, src: str, dst: str) -> None:
        """Give `src` the second name `dst`; FileExistsError if there is anything."""
        os.link(src, dst)

    def symlink(self, target: str, path: str) -> None:
        """Make `path` a symbolic link to `target`; FileExistsError if there is anything."""
        os.symlink(target, path)

    def read_link(self, path: str) -> str | None:
        """Where a symbolic link leads; None for anything else, and for nothing."""
        try:
            return os.readlink(path)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def scandir(self, path: str) -> list[tuple[str, bool, int]]:
        """(name, whether a folder, size in bytes) of each entry; links are not followed."""
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                # Another process may remove an entry between the two calls.
                with contextlib.suppress(FileNotFoundError):
                    is_dir = entry.is_dir(follow_symlinks=False)
                    found.append((entry.name, is_dir, entry.stat(follow_symlinks=False).st_size))
        return found

    def stat_size(self, path: str) -> int:
        """The size of a file in bytes."""
        return os.stat(path).st_size

    def free(self, path: str) -> int | None:
        """Bytes that the file system of a folder says it can still take; None when it does not say."""
        try:
            stat = os.statvfs(path)
        except OSError as error:
            if error.errno in CANNOT or isinstance(error, FileNotFoundError):
                return None
            raise
        return stat.f_bavail * stat.f_frsize if stat.f_blocks else None

    def exists(self, path: str) -> bool:
        """Whether there is anything by that name, a dangling link included."""
        return os.path.lexists(path)

    def sync_dir(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with named(path):
                os.fsync(fd)
        except OSError as error:
            if error.errno not in CANNOT:  # file systems without such a thing have nothing to flush
                raise
        finally:
            os.close(fd)

    def read(self, path: str, limit: int) -> bytes:
        """A whole small file; OSError(EFBIG) if it has more than `limit` bytes."""
        with open(path, "rb", buffering=0) as file, named(path):
            parts = []
            left = limit + 1
            while left and (part := file.read(min(left, 1 << 24))):
                parts.append(part)
                left -= len(part)
        if not left:
            raise OSError(errno.EFBIG, f"has more than {limit} bytes", path)
        return b"".join(parts)

    def create(self, path: str, data: bytes) -> None:
        """Make a new small file, durable when this returns; nothing is left after an error."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with named(path):
                try:
                    write_all(fd, memoryview(data))
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise

    def lock(self, path: str) -> Lock | None:
        """Take the lock file at `path`, making it if need be; None when somebody holds it."""
        return take_lock(path)

    async def open_writer(self, path: str, nbytes: int, io: Io = "auto") -> BlockFile:
        """Make a new file for blocks.

        Args:
            path: must not exist.
            nbytes: how long it will be; the space is reserved where the file system can,
                so that a full disk is an error here.
            io: "direct" asks for direct I/O, "auto" does for large files only; both go
                on through the page cache where that is refused.
        """
        return await open_writer(path, nbytes, io)

    async def open_reader(self, path: str, io: Io = "auto") -> RangeFile:
        """Open a file to read ranges of it.

        Args:
            path: the file.
            io: "auto" tries the page cache and reads large aligned ranges directly where
                they are not cached, "direct" does not ask the cache, "buffered" only uses it.
        """
        return await open_reader(path, io)


class Lock:
    """A lock file that is held; the kernel frees it when the process dies, children included.

    A POSIX record lock, not `flock`: that one lives on in a forked data loader worker
    after its trainer was killed. The price: closing *any* descriptor of the file frees
    it, so nobody else in this process may open it; `take_lock` sees to its own part.
    """

    def __init__(self, path: str, fd: int, key: tuple[int, int]) -> None:
        self.path = path
        self._fd = fd
        self._key = key
        self._held = True

    def release(self) -> None:
        """Let go; idempotent. The file stays: unlink it before, while it is still ours."""
        with _held_guard:
            if self._held:
                self._held = False
                _held.pop(self._key, None)
                os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: dict[tuple[int, int], int] = {}
"""(device, inode) of the lock files this process holds -> the process id, which a fork changes."""
_held_guard = threading.Lock()


def take_lock(path: str) -> Lock | None:
    """See `FileSystem.lock`."""
    with _held_guard:
        while True:
            # Looked at by name first: opening and closing our own lock file would free it.
            if _held.get(_key(path)) == os.getpid():
                return None
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                with named(path):
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    stat = os.fstat(fd)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                    return None
                raise
            key = (stat.st_dev, stat.st_ino)
            if _key(path) == key:
                _held[key] = os.getpid()
                return Lock(path, fd, key)
            os.close(fd)  # unlinked between our open and our lock: a lock nobody else will ever see


def _key(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (stat.st_dev, stat.st_ino)


def rename_new(src: str, dst: str) -> None:
    """Rename without ever replacing: a plain rename silently takes the place of an empty folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(src), os.fsencode(dst)
        if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in CANNOT:
            raise OSError(code, os.strerror(code), src, None, dst)
    # NFS and many FUSE file systems: look first. Two writers at once are kept apart by their lock.
    if os.path.lexists(dst):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
    os.rename(src, dst)


def write_all(fd: int, rest: memoryview) -> None:
    """Write everything, however short the single writes are."""
    while len(rest):
        done = os.write(fd, rest)
        if done <= 0:
            raise OSError(errno.EIO, "the file takes no more bytes and says no reason")
        rest = rest[done:]
