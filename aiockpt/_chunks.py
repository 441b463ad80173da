"""Chunks: parts of a tensor that lie in different files, and whether they make up the whole. Pure.

A chunk is a rectangular box of its tensor's elements. Boxes tile a tensor exactly if and
only if the signed corners of all of them add up to the signed corners of the whole: the
mixed difference of "how often is this element covered" determines the function. That
takes a few dictionary entries a chunk, however the boxes lie, and hostile numbers cannot
make it slow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

__all__ = ["MOST_CUTS", "Box", "Chunk", "Share", "cover_problem", "share_problem", "slices"]

Shape = tuple[int, ...]

Box = tuple[Shape, Shape]
"""(offsets, sizes) of a chunk in its tensor."""
Chunk = tuple[Shape, Shape]
"""(shape of the whole tensor, offsets of the chunk in it)."""
Share = tuple[str, str, Shape, Shape, Shape]
"""What one rank holds of a tensor: (path, dtype, shape of the whole, offsets, sizes)."""

MOST_CUTS: Final = 10
"""Dimensions along which one tensor may be cut: a chunk has two to that power corners."""


def slices(box: Box) -> tuple[slice, ...]:
    """The index that selects a chunk from its tensor."""
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


def cover_problem(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not cover a tensor of that shape exactly once, or None."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or not _inside(shape, offsets, sizes):
            return f"the chunk at {list(offsets)} of size {list(sizes)} does not lie in {list(shape)}"
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, sizes in boxes)]
    if len(cut) > MOST_CUTS:
        return f"it is cut along {len(cut)} dimensions, at most {MOST_CUTS} are supported"
    count: dict[Shape, int] = {}
    for offsets, sizes in boxes:
        _add_corners(count, [(offsets[d], offsets[d] + sizes[d]) for d in cut], _weight(shape, sizes, cut), 1)
    _add_corners(count, [(0, shape[d]) for d in cut], _weight(shape, shape, cut), -1)
    if not any(count.values()):
        return None
    held, needed = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held == needed:
        return f"its {len(boxes)} chunks leave a hole and overlap elsewhere"
    return f"its {len(boxes)} chunks {'overlap' if held > needed else 'leave a hole'}"


def _inside(shape: Shape, offsets: Shape, sizes: Shape) -> bool:
    return all(at >= 0 <= n and at + n <= size for at, n, size in zip(offsets, sizes, shape, strict=True))


def _weight(shape: Shape, sizes: Shape, cut: Sequence[int]) -> int:
    """1, or 0 for a box without elements, which covers nothing wherever it is."""
    return int(all(shape[d] for d in range(len(shape))) and all(sizes[d] for d in cut))


def _add_corners(count: dict[Shape, int], spans: Sequence[tuple[int, int]], weight: int, sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(spans) if weight else 0):
        corner = tuple(span[end] for span, end in zip(spans, ends, strict=False))
        count[corner] = count.get(corner, 0) + sign * weight * (-1) ** sum(ends)


def share_problem(shares: Sequence[Share]) -> tuple[str, str] | None:
    """Why what the ranks hold is not every tensor exactly once: (path, reason), or None."""
    held: dict[str, list[Share]] = {}
    for share in shares:
        held.setdefault(share[0], []).append(share)
    for path, chunks in held.items():
        if len({(dtype, whole) for _, dtype, whole, *_ in chunks}) != 1:
            return path, "its chunks differ in dtype or in the shape of the whole"
        problem = cover_problem(chunks[0][2], [(offsets, sizes) for *_, offsets, sizes in chunks])
        if problem:
            return path, problem
    return None
