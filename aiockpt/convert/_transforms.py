"""What Distributed Checkpoint's extensions did to an item, undone: zstd, where its module is there.

A stream that was compressed has no ranges to read: it is unpacked into an unnamed temporary
file (in `TMPDIR`), up to the size that its tensor can have, and removed with the last
reference to it.
"""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from typing import Any, BinaryIO, Final

from ..errors import ForeignFormatError, StorageError, UsageError
from ._files import Range

__all__ = ["undo"]

_ZSTD: Final = "stream.zstd"
_WINDOW: Final = 8 << 20
"""Bytes that a stream may look back; the largest that zstd uses below its levels for experts."""
_STEP: Final = 1 << 20


def undo(source: Range, transforms: tuple[str, ...], most: int, *, path: str) -> Range:
    """The bytes of an item as they were before its transforms; blocking.

    Args:
        source: the item in its file.
        transforms: what was done to it, as the metadata says.
        most: bytes that may come out.
        path: the item's name.

    Raises:
        ForeignFormatError: a transform is not known, the stream is damaged or too long.
        UsageError: a module is missing.
        StorageError: there is no room for the temporary file.
    """
    for transform in transforms:
        name, _, version = transform.partition("/")
        if name != _ZSTD or version.partition(".")[0] != "1" or len(transforms) > 1:
            why = f"{source.name}: went through {', '.join(transforms)[:200]}, which is not known here"
            raise ForeignFormatError(why, file=source.name, path=path)
        source = _unpacked(source, most, path)
    return source


def _unpacked(source: Range, most: int, path: str) -> Range:
    try:
        zstd: Any = importlib.import_module("zstandard")
    except ImportError as error:
        why = f"{source.name}: is compressed with zstd; install zstandard to read it"
        raise UsageError(why, file=source.name, path=path) from error
    reader = zstd.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(_Stream(source))
    try:
        with tempfile.TemporaryFile() as file:
            nbytes = _copy(reader, file, most)
            if nbytes <= most:
                return Range(_Unnamed(os.dup(file.fileno()), nbytes, source.name), 0, nbytes, source.name)
    except zstd.ZstdError as error:
        raise ForeignFormatError(f"{source.name}: damaged: {error}", file=source.name, path=path) from error
    except OSError as error:
        raise StorageError.wrap(error, "cannot unpack", file=tempfile.gettempdir()) from error
    why = f"{source.name}: unpacks to more than the {most} bytes it can have"
    raise ForeignFormatError(why, file=source.name, path=path)


def _copy(reader: Any, file: BinaryIO, most: int) -> int:
    nbytes = 0
    while nbytes <= most and (data := reader.read(_STEP)):
        file.write(data)
        nbytes += len(data)
    file.flush()
    return nbytes


class _Unnamed:
    """A temporary file as a source of ranges; gone with the last reference to it."""

    def __init__(self, fd: int, nbytes: int, name: str) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.name = name

    def __del__(self) -> None:
        os.close(self.fd)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view from an offset on."""
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if not got:
                raise ForeignFormatError(f"{self.name}: the file ends too early", file=self.name)
            done += got


class _Stream(io.RawIOBase):
    """A range as the stream that a decompressor reads."""

    def __init__(self, source: Range) -> None:
        self.source = source
        self.at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what follows."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), self.source.nbytes - self.at)
        self.source.read_into(self.at, view[:count])
        self.at += count
        return count
