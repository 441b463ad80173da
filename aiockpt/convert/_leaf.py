"""A tensor that has not been read: what it is, where its bytes lie, and how to get some of them.

The bytes of a tensor lie in pieces: boxes of it (one a rank that wrote it), each with
strides over some storage. Any stretch of its row-major content can be read into given
memory without reading the rest, and with little memory beside it, whatever the strides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import xxhash

from .._dtypes import NAME
from .._plan import boxes

__all__ = ["MB", "Bytes", "Content", "Leaf", "Piece", "Room", "contiguous", "view_of"]

MB: Final = 1 << 20
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes that torch can copy with any strides, by item size."""

Shape = tuple[int, ...]


class Bytes(Protocol):
    """Some bytes of a foreign file, checked as far as its format allows."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view; blocking.

        Raises:
            CheckpointError: the file is damaged, or cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and where its elements lie."""

    offsets: Shape
    """Of the box in the tensor."""
    sizes: Shape
    strides: Shape
    """In elements of the storage."""
    begin: int
    """The first element's byte in the storage."""
    storage: Bytes


class Room:
    """Memory for bytes on their way; one thread at a time.

    Args:
        nbytes: how much.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._tensor: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """The first bytes of it."""
        if self._tensor is None:
            self._tensor = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._tensor[:nbytes]


@dataclass(eq=False, slots=True)
class Content:
    """The bytes of one tensor, or of several that are tied."""

    dtype: torch.dtype
    shape: Shape
    pieces: Sequence[Piece] | Callable[[], Sequence[Piece]] = field(repr=False)
    """Where they lie; looked up when they are read where that means to open a file, and then forgotten."""
    nbytes: int = 0
    at: tuple[int, int] = (0, 0)
    """Sorts contents as they lie on disk, where the pieces do not say."""
    digest: str = ""
    """XXH3 of the row-major content, once all of it has passed in order."""
    _state: xxhash.xxh3_64 | None = None
    _passed: int = 0
    _open: Sequence[Piece] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[int, int]:
        """Sorts contents as they lie on disk."""
        if callable(self.pieces) or not self.pieces:
            return self.at
        first = self.pieces[0]
        return id(first.storage), first.begin

    def read(self, first: int, out: torch.Tensor, room: Room) -> None:
        """Read bytes [first, first + len(out)) of the content; blocking.

        Args:
            first: a multiple of the item size.
            out: uint8, one-dimensional, contiguous.
            room: memory for what is not in order on disk.

        Raises:
            CheckpointError: they cannot be read.
        """
        pieces = self._looked_up()
        if first == 0:
            self._state, self._passed = xxhash.xxh3_64(), 0
        size = self.dtype.itemsize
        if len(pieces) == 1 and contiguous(self.shape, pieces[0].strides):
            piece = pieces[0]
            piece.storage.read_into(piece.begin + first, view_of(out))
        else:
            self._gather(pieces, first // size, out.view(_BITS[size]), room)
        self._note(first, out)

    def _looked_up(self) -> Sequence[Piece]:
        if not callable(self.pieces):
            return self.pieces
        if self._open is None:
            self._open = self.pieces()
        return self._open

    def _note(self, first: int, out: torch.Tensor) -> None:
        if self._state is not None and first == self._passed:
            self._state.update(view_of(out))
            self._passed += len(out)
            if self._passed == self.nbytes:
                self.digest, self._state = self._state.hexdigest(), None
                self._open = None

    def _gather(self, pieces: Sequence[Piece], first: int, out: torch.Tensor, room: Room) -> None:
        """Fill `out` with elements from `first` on, box by box and piece by piece."""
        at = 0
        for index, count in boxes(self.shape, first, first + len(out)):
            starts, sizes = _extent(index, self.shape)
            target = out[at : at + count].view(sizes)
            for piece in pieces:
                _copy_common(piece, starts, sizes, target, room)
            at += count

    def name(self) -> str:
        """The dtype's name."""
        return NAME[self.dtype]


@dataclass(eq=False, slots=True)
class Leaf:
    """A tensor at a place of a state."""

    content: Content
    flags: int = 0
    """1: requires grad, 2: a Parameter."""


def contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether elements with these strides lie in row-major order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def view_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, which it keeps alive."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def _extent(index: tuple[slice | int, ...], shape: Shape) -> tuple[Shape, Shape]:
    """Starts and sizes of `tensor[index]` as a box of the tensor."""
    starts, sizes = [], []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(0, size)
        start, stop = (part, part + 1) if isinstance(part, int) else (part.start, part.stop)
        starts.append(start)
        sizes.append(stop - start)
    return tuple(starts), tuple(sizes)


def _copy_common(piece: Piece, starts: Shape, sizes: Shape, target: torch.Tensor, room: Room) -> None:
    """Copy what a piece and a box have in common."""
    low = [max(a, b) for a, b in zip(starts, piece.offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(starts, sizes, piece.offsets, piece.sizes, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    for dim, (a, b, start) in enumerate(zip(low, high, starts, strict=True)):
        target = target.narrow(dim, a - start, b - a)
    local = tuple(a - o for a, o in zip(low, piece.offsets, strict=True))
    _copy_region(piece, local, target, room)


def _copy_region(piece: Piece, starts: Shape, target: torch.Tensor, room: Room) -> None:
    """Copy a box of a piece, in halves until each spans no more than there is room for."""
    item = target.element_size()
    for at, sizes in _regions(starts, tuple(target.shape), piece.strides, room.nbytes // item):
        span = 1 + sum((n - 1) * s for n, s in zip(sizes, piece.strides, strict=True))
        begin = piece.begin + item * sum(a * s for a, s in zip(at, piece.strides, strict=True))
        memory = room.take(span * item)
        piece.storage.read_into(begin, view_of(memory))
        part = target
        for dim, (a, start, n) in enumerate(zip(at, starts, sizes, strict=True)):
            part = part.narrow(dim, a - start, n)
        part.copy_(memory.view(target.dtype).as_strided(sizes, piece.strides))


def _regions(starts: Shape, sizes: Shape, strides: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box until no part of it spans more than `most` elements of its storage."""
    todo = [(starts, sizes)]
    while todo:
        at, box = todo.pop()
        reach = [(n - 1) * s for n, s in zip(box, strides, strict=True)]
        if 1 + sum(reach) <= most:
            yield at, box
            continue
        dim = max(range(len(reach)), key=reach.__getitem__)
        half = box[dim] // 2
        todo.append(
            ((*at[:dim], at[dim] + half, *at[dim + 1 :]), (*box[:dim], box[dim] - half, *box[dim + 1 :]))
        )
        todo.append((at, (*box[:dim], half, *box[dim + 1 :])))
