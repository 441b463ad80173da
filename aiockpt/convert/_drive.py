"""The mechanics of a conversion: memory, hops to threads, and the instant `dst` appears."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Final

import torch

from .._names import stem
from .._threads import Lane, offload, settle
from ..errors import UsageError
from ._leaf import MB, Room

__all__ = ["Desk", "Place", "drive", "flush"]

_HOP_BYTES: Final = 32 * MB
_HOP_SECONDS: Final = 0.05


class Desk:
    """The memory of one conversion, a quarter of its budget a use.

    Args:
        budget: bytes in all.
    """

    def __init__(self, budget: int) -> None:
        self.share = min(budget // 4 // MB * MB, 16 * MB)
        self._buffer: torch.Tensor | None = None
        self._room = Room(self.share)

    def buffer(self) -> torch.Tensor:
        """Memory for bytes on their way; whole MiB."""
        if self._buffer is None:
            self._buffer = torch.empty(self.share, dtype=torch.uint8)
        return self._buffer

    def room(self) -> Room:
        """Memory for what is not in order."""
        return self._room


async def drive(steps: Iterator[int]) -> None:
    """Run a generator of blocking work in a thread, some of it a hop, so that it can be cancelled.

    Args:
        steps: yields the bytes it has just moved.

    Raises:
        Exception: whatever the work raised.
    """
    # The stage lane: a step may wait for reads, which need a thread of the bulk lane. Were it in that lane
    # itself, a few conversions at a time would each hold a thread and wait for one more.
    try:
        while await offload(_some, steps, lane=Lane.STAGE):
            pass
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            await settle(offload(close, lane=Lane.STAGE))


def _some(steps: Iterator[int]) -> bool:
    """Work for a moment; whether there is more."""
    moved, until = 0, time.monotonic() + _HOP_SECONDS
    for nbytes in steps:
        moved += nbytes
        if moved >= _HOP_BYTES or time.monotonic() > until:
            return True
    return False


class Place:
    """Where the result is to be, and where it is made: beside it, under a hidden name.

    Args:
        path: where it is to be.
        source: what is converted; it must not be replaced together with more than itself.
        overwrite: whether something may be there.

    Raises:
        UsageError: something is there, the path is no name, or replacing it would delete the source.
    """

    def __init__(self, path: str, source: str, overwrite: bool) -> None:
        self.path = _named(path)
        self.overwrite = overwrite
        self._folder, name = os.path.split(self.path)
        token = uuid.uuid4().hex[:12]
        # The ending stays: it says to some formats whether they are a file.
        ending = os.path.splitext(name)[1]
        self.attempt = os.path.join(self._folder, f".{stem(name)}.{token}.part{stem(ending)}")
        self._aside = os.path.join(self._folder, f".{stem(name)}.{token}.old")
        self._made: list[str] = []
        if os.path.lexists(self.path):
            if not overwrite:
                raise self._taken()
            self._spare(source)

    def _spare(self, source: str) -> None:
        """Refuse to replace the folder that holds the source, and with it all that lies beside it."""
        inside, above = os.path.realpath(source), os.path.join(os.path.realpath(self.path), "")
        same = os.path.isdir(source) and os.path.join(inside, "") == above
        if os.path.isdir(self.path) and not os.path.islink(self.path) and (same or inside.startswith(above)):
            why = f"{self.path} is or holds the source, which replacing it would delete: give another dst"
            raise UsageError(why, file=self.path)

    def prepare(self) -> None:
        """Make the folders above it that are missing, each durable in its parent."""
        missing, folder = [], self._folder
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                self._made.append(path)
            flush(os.path.dirname(path))

    def _taken(self) -> UsageError:
        return UsageError(f"{self.path} is there already; say overwrite=True to replace it", file=self.path)

    def publish(self) -> None:
        """Give the result its name; from then on a crash cannot lose it.

        Raises:
            UsageError: somebody else has taken the name meanwhile.
        """
        aside = os.path.lexists(self.path)
        if aside and not self.overwrite:
            raise self._taken()
        if aside:
            os.rename(self.path, self._aside)
        try:
            self._rename()
        except BaseException:
            if aside:
                os.rename(self._aside, self.path)
            raise
        flush(os.path.dirname(self.path))
        if aside:
            _remove(self._aside)

    def _rename(self) -> None:
        if os.path.isdir(self.attempt):
            os.rename(self.attempt, self.path)  # onto a folder with anything in it: refused by the kernel
            return
        try:
            os.link(self.attempt, self.path)  # which never replaces anything
        except FileExistsError as error:
            raise self._taken() from error
        except OSError:
            os.rename(self.attempt, self.path)  # no links here
            return
        os.unlink(self.attempt)

    def remove(self) -> None:
        """Remove what was made so far, and the folders that were made for it while they are empty."""
        _remove(self.attempt)
        with contextlib.suppress(OSError):
            while self._made:
                os.rmdir(self._made.pop())


def _named(path: object) -> str:
    """The path made absolute.

    Raises:
        UsageError: it ends in no name: it means a folder by its place, like the one this process works in.
    """
    if not isinstance(path, str) or "\0" in path:
        raise UsageError(f"dst is the path of a new file or folder, not {path!r:.80}")
    if os.path.basename(path.rstrip(os.sep)) in ("", ".", ".."):
        raise UsageError(f"dst={path!r} names no file or folder", file=path)
    return os.path.abspath(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def flush(path: str) -> None:
    """Flush a file or folder to stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
