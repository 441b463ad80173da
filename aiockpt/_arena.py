"""Host memory that one save's tensors are copied into, each with a storage of its own.

`torch.save` writes whole storages: tensors that were views of one block would drag all of
it into the file. So every tensor is made over its own stretch of the memory. The memory of
a saver is used again by its next saves; what somebody still holds on to is not.

Shared memory is an anonymous file, which has no name in any folder: the kernel frees it
with the last process that has it open, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import tempfile
from typing import Any, Final

import torch

from ._block import PAGE

__all__ = ["ALIGN", "Arena", "Arenas"]

ALIGN: Final = 64
"""Where tensors may begin."""
GRAIN: Final = 1 << 20
"""Arenas are multiples of it, so that a state that grows a little fits again."""

_numbers = itertools.count()


class Arena:
    """Some page-aligned host memory.

    Args:
        nbytes: at least so many.
        shared: other processes are to map it.
        fd: an existing arena's memory, of another process.
    """

    def __init__(self, nbytes: int, *, shared: bool = False, fd: int | None = None) -> None:
        self.number = next(_numbers)
        self.nbytes = max(PAGE, nbytes)
        self.fd = fd
        if shared and fd is None:
            self.fd = _anonymous_file(self.nbytes)
        if self.fd is None:
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(self.fd, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # only slower without
                memory.madvise(mmap.MADV_HUGEPAGE)
        # Every tensor and view below refers to this object, so its references tell whether there are any.
        self._memory: Any = (ctypes.c_uint8 * self.nbytes).from_buffer(memory)
        self._unused = sys.getrefcount(self._memory)

    def in_use(self) -> bool:
        """Whether a tensor or view of it is alive somewhere in this process."""
        return sys.getrefcount(self._memory) > self._unused

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A stretch of it as uint8, with a storage of exactly that size; `nbytes` is above 0."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A stretch of it for whoever takes buffers."""
        return memoryview(self._memory).cast("B")[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of it; the memory is freed with the last tensor in it."""
        self._memory = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Arenas:
    """The arenas of one saver, used again; for the loop's thread.

    Args:
        shared: other processes are to map them.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.dropped: list[int] = []
        """Numbers of arenas that are gone, for whoever has mapped them too."""
        self._idle: list[Arena] = []

    def take(self, nbytes: int) -> Arena | None:
        """The smallest idle arena that is large enough; None: `make` one, in place of one that is not."""
        fitting = [arena for arena in self._idle if arena.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda arena: arena.nbytes)
            self._idle.remove(found)
            return found
        if self._idle:
            self._drop(self._idle.pop())
        return None

    def make(self, nbytes: int) -> Arena:
        """A new arena. Blocking."""
        return Arena(-(-nbytes // GRAIN) * GRAIN, shared=self.shared)

    def put(self, arena: Arena, *, lost: bool = False) -> None:
        """Take one back; `lost`: something may still read or write it."""
        if lost or arena.in_use():
            self._drop(arena)
        else:
            self._idle.append(arena)

    def close(self) -> None:
        """Free those that are idle."""
        while self._idle:
            self._drop(self._idle.pop())

    def _drop(self, arena: Arena) -> None:
        self.dropped.append(arena.number)
        arena.close()


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("aiockpt", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
