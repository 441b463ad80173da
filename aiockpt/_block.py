"""A block of host memory: page-aligned, huge pages advised, pinned where that helps."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import warnings
from typing import Any, Final

import torch

__all__ = ["BLOCK_BYTES", "MIN_BLOCKS", "PAGE", "Block"]

BLOCK_BYTES: Final = 16 << 20
PAGE: Final = 4096
MIN_BLOCKS: Final = 2
"""The smallest budget, in blocks: one is filled while the other is written."""

POISON = 0xDB
MADV_WIPEONFORK = 18  # the mmap module has no name for it


class Block:
    """Some page-aligned host memory.

    It is mapped on first use, hence in the thread that fills it: pinning takes time. A
    forked child finds zeros in it; direct I/O of the parent is not disturbed by the fork.
    """

    __slots__ = ("__weakref__", "_pinned", "_tensor", "_view", "nbytes", "number")

    def __init__(self, nbytes: int, *, number: int = 0, pinned: bool | None = False) -> None:
        self.nbytes = nbytes
        self.number = number
        self._pinned = pinned
        self._tensor: torch.Tensor | None = None
        self._view: memoryview | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor."""
        if self._tensor is None:
            self._map()
        assert self._tensor is not None
        return self._tensor

    @property
    def view(self) -> memoryview:
        """The same memory for file calls."""
        if self._view is None:
            self._map()
        assert self._view is not None
        return self._view

    def _map(self) -> None:
        pinned = _pinned(self.nbytes) if _wants_pinned(self._pinned) else None
        self._tensor, self._view = pinned or _pageable(self.nbytes)

    def poison(self) -> None:
        """Fill with a pattern that `check` looks for."""
        if self._tensor is not None:
            self._tensor.fill_(POISON)

    def check(self) -> None:
        """Raise AssertionError if somebody wrote into the block since `poison`."""
        if self._tensor is not None and bool((bad := self._tensor != POISON).any()):
            spoiled = bad.nonzero()
            where, count = int(spoiled[0]), len(spoiled)
            what = f"block {self.number} was written to while it lay in the pool"
            raise AssertionError(f"{what}: {count} bytes, the first at {where}")


def _pageable(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    # Private: the default of the mmap module is shared memory, which is slower to touch.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Wiped rather than left out (MADV_DONTFORK): a child's mmap object would unmap the addresses when it is
    # collected, and by then they may belong to something else. Both spare the parent copy-on-write.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), MADV_WIPEONFORK):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError:
                continue  # only slower without
    return torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)


def _pinned(nbytes: int) -> tuple[torch.Tensor, memoryview] | None:
    """Memory the accelerator copies to asynchronously; None, and one warning, where there is none left."""
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        _warn_unpinned(str(error).partition("\n")[0])
        return None
    if tensor.data_ptr() % PAGE:
        return None  # direct I/O would refuse it
    array: Any = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # lives as long as the view does
    return tensor, memoryview(array).cast("B")


def _wants_pinned(pinned: bool | None) -> bool:
    """By default: if this process uses an accelerator already; starting one only to pin costs its memory."""
    if pinned is not None:
        return pinned
    device = torch.accelerator.current_accelerator()
    initialized = getattr(getattr(torch, device.type, None), "is_initialized", None) if device else None
    return bool(initialized and initialized())


_times_unpinned = itertools.count()


def _warn_unpinned(reason: str) -> None:
    if next(_times_unpinned) == 0:
        text = f"cannot pin host memory ({reason}): copies from the device go through pageable memory, slower"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
