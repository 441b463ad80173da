"""Foreign files, opened and read with suspicion: ranges that end where they say, no way out of a folder."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Protocol

from ..errors import ForeignFormatError, StorageError, UnsafeFileError

__all__ = ["Folder", "ForeignFile", "Limited", "Range"]

_OPEN: Final = 16
"""Files of one folder that are open at the same time."""


class ForeignFile:
    """One file, read by ranges; blocking. Closed when it is collected, or by `close`.

    Args:
        path: where it is.
        name: what it is called in messages.

    Raises:
        ForeignFormatError: it is no plain file, or there is none.
        StorageError: it cannot be opened.
    """

    def __init__(self, path: str, name: str | None = None) -> None:
        self.path = path
        self.name = name or path
        self._file = self._open()
        self.nbytes = os.fstat(self._file.fileno()).st_size

    def _open(self) -> BinaryIO:
        try:
            # Not to wait for ever on a pipe that somebody has put in its place.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError as error:
            raise ForeignFormatError(f"{self.name}: there is no such file", file=self.path) from error
        except OSError as error:
            raise StorageError.wrap(error, "cannot open", file=self.path) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ForeignFormatError(f"{self.name}: not a plain file", file=self.path)
        return os.fdopen(fd, "rb", buffering=0)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view from an offset on.

        Raises:
            ForeignFormatError: the file ends before that.
            StorageError: it cannot be read.
        """
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise StorageError.wrap(error, "cannot read", file=self.path) from error
            if not got:
                raise ForeignFormatError(f"{self.name}: the file ends too early", file=self.path)
            done += got

    def close(self) -> None:
        """Let go of the file; any number of times."""
        self._file.close()


class Source(Protocol):
    """A file, or a range of one."""

    name: str

    @property
    def nbytes(self) -> int: ...
    def read_into(self, offset: int, view: memoryview) -> None: ...


@dataclass(slots=True)
class Range:
    """Some bytes of a file, under a name of their own.

    Raises:
        ForeignFormatError: on creation: they lie outside of the file.
    """

    file: Any
    begin: int
    nbytes: int
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.file.name
        if not 0 <= self.begin <= self.begin + self.nbytes <= self.file.nbytes:
            why = (
                f"{self.name}: {self.nbytes} bytes from {self.begin} on lie outside of its {self.file.nbytes}"
            )
            raise ForeignFormatError(why, file=self.name)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view from an offset in the range on.

        Raises:
            ForeignFormatError: the range ends before that.
        """
        if offset < 0 or offset + len(view) > self.nbytes:
            raise ForeignFormatError(f"{self.name}: a tensor lies outside of its bytes", file=self.name)
        self.file.read_into(self.begin + offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some of its bytes; for small records."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)


@dataclass(slots=True)
class Limited:
    """A range as the file a pickle is read from; never more than `limit` bytes of it."""

    source: Range
    limit: int
    at: int = 0
    _end: int = field(default=-1, init=False)

    def begin(self) -> None:
        """The next pickle starts here, with a limit of its own."""
        self._end = min(self.source.nbytes, self.at + self.limit)

    def read(self, n: int, /) -> bytes:
        """The next `n` bytes, fewer at the end; nothing at all beyond the limit."""
        if self._end < 0:
            self.begin()
        count = max(0, min(n, self._end - self.at))
        data = self.source.read(self.at, count)
        self.at += count
        return data

    def readline(self) -> bytes:
        """The next line, of 4 KiB at most."""
        start = self.at
        data = self.read(4096)
        line, feed, _ = data.partition(b"\n")
        self.at = start + len(line) + len(feed)
        return line + feed

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self.at


class Folder:
    """A folder of foreign files; none is opened that does not lie in it.

    Args:
        path: where it is.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._open: dict[str, ForeignFile] = {}

    def file(self, name: Any) -> ForeignFile:
        """Open one of its files, or find it open.

        Raises:
            UnsafeFileError: the name leads out of the folder.
            ForeignFormatError: there is no such file.
        """
        if name in self._open:
            return self._open[name]
        path = self._inside(name)
        if len(self._open) >= _OPEN:
            self._open.pop(next(iter(self._open))).close()
        found = self._open[name] = ForeignFile(path, name)
        return found

    def _inside(self, name: Any) -> str:
        parts = name.split("/") if isinstance(name, str) else [""]
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
            raise UnsafeFileError(
                f"{self.path}: a file is called {str(name)[:200]!r}, which leads out of it", file=self.path
            )
        path = os.path.realpath(os.path.join(self.path, *parts))
        if os.path.commonpath([path, self.path]) != self.path:
            why = f"{name} in {self.path} leads to {path}: copy the folder with its links resolved"
            raise UnsafeFileError(why, file=os.path.join(self.path, name))
        return path

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Read from one of its files."""
        self.file(name).read_into(offset, view)

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()


@dataclass(slots=True)
class Member:
    """A file of a folder, opened whenever it is read."""

    folder: Folder
    name: str
    nbytes: int = -1

    def __post_init__(self) -> None:
        self.nbytes = self.folder.file(self.name).nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view from an offset on."""
        self.folder.read_into(self.name, offset, view)
