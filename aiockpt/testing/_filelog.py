"""A log of what happened on the disk, made by several threads at once."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

__all__ = ["FileLog", "FileOp"]


@dataclass(slots=True, kw_only=True)
class FileOp:
    """One event on the disk, as a simulator of power loss needs it.

    An event happened at some time between `began` and `ended`; a flush covers only
    events that had ended when it began.
    """

    op: str
    """mkdir, rename, replace, link, unlink, rmdir, sync_dir, lock, create, write, truncate,
    fsync, read, scandir, stat_size, exists, open, close. `lock` makes the file if need be."""
    path: str
    target: str | None = None
    """The second name of rename, replace and link."""
    file: int | None = None
    """Which file was created, written, cut or flushed: names change, this number does not."""
    offset: int = 0
    nbytes: int = 0
    """Length of a write; of a truncate: the file's length after it."""
    data: bytes | None = None
    """What was written, with `keep_data`."""
    began: int = 0
    ended: int | None = None
    """Clock ticks; `ended` is None while it runs and when it failed."""


class FileLog:
    """Events with the times of one clock. Thread-safe.

    Attributes:
        log: every event in the order they began.
    """

    def __init__(self, *, keep_data: bool) -> None:
        self.log: list[FileOp] = []
        self._keep_data = keep_data
        self._ids = itertools.count()
        self._clock = itertools.count()
        self._guard = threading.Lock()

    def new_file(self) -> int:
        """A number for a file that is about to be made."""
        return next(self._ids)

    def begin(
        self,
        op: str,
        path: str,
        *,
        target: str | None = None,
        file: int | None = None,
        offset: int = 0,
        nbytes: int = 0,
        data: bytes | memoryview | None = None,
    ) -> FileOp:
        """Record that an event begins."""
        event = FileOp(op=op, path=path, target=target, file=file, offset=offset, nbytes=nbytes)
        if self._keep_data and data is not None:
            event.data = bytes(data)
        with self._guard:
            event.began = next(self._clock)
            self.log.append(event)
        return event

    def end(self, *events: FileOp) -> None:
        """Record that events have happened."""
        with self._guard:
            for event in events:
                event.ended = next(self._clock)
