"""Every call that touches a disk goes through one object: `FileSystem`.

It is the seam where tests put faults and recordings. The blocking methods are for
`offload(..., lane=Lane.CONTROL)`; files of blocks are asynchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from aiockpt._direct import BlockFile, Io, named, open_writer
from aiockpt._lockfile import Lock, peek_lock, take_lock
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

    def scandir(self, path: str) -> list[tuple[str, bool, int, float]]:
        """(name, whether a folder, size in bytes, mtime) of each entry; links are not followed."""
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                # Another process may remove an entry between the two calls.
                with contextlib.suppress(FileNotFoundError):
                    is_dir = entry.is_dir(follow_symlinks=False)
                    stat = entry.stat(follow_symlinks=False)
                    found.append((entry.name, is_dir, stat.st_size, stat.st_mtime))
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

    def peek_lock(self, path: str) -> bytes:
        """What a lock file says, whoever holds it; b"" when there is none."""
        return peek_lock(path)

    def read_lock(self, lock: Lock) -> bytes:
        """What our own lock file says; see `Lock.read` for what is made sure of."""
        return lock.read()

    def write_lock(self, lock: Lock, data: bytes) -> None:
        """Change what our own lock file says, durably."""
        lock.write(data)

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
