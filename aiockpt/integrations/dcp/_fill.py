"""Planned reads of DCP to byte ranges, and verified bytes to the planner's tensors.

A read item asks for a box of a stored chunk. Only the pieces that hold bytes of the box
are read; the box is copied out of each block as it comes. The planner is asked for a
target when its first bytes are there, and told once when its last ones are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from aiockpt._capture import bits
from aiockpt._dtypes import BY_NAME, itemsize
from aiockpt._plan import boxes
from aiockpt._reads import Part, Span, box_spans
from aiockpt._saved import Saved
from aiockpt.errors import UsageError

from ._flat import Leaf

__all__ = ["Fill"]

Range = tuple[int, int]


@dataclass(slots=True)
class _Job:
    """One read item on its way."""

    item: ReadItem
    ranges: list[Range]
    """What it wants of the row, [begin, end) a dimension."""
    left: int
    """Elements that have not come yet."""
    target: torch.Tensor | None = None


class Fill:
    """The target of one load's reads; takes the place of tensors that are filled directly.

    Args:
        saved: the checkpoint.
        planner: gives the tensors; called by one thread at a time.
    """

    def __init__(self, saved: Saved, planner: LoadPlanner) -> None:
        self._saved = saved
        self._planner = planner
        self._jobs: dict[int, list[_Job]] = {}
        self._lock = threading.Lock()

    def add(self, item: ReadItem, leaf: Leaf) -> None:
        """Take in a read item.

        Raises:
            UsageError: it asks for what the checkpoint does not have.
        """
        row = self._row(item, leaf)
        ranges = [(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True)]
        shape = self._saved.stored.shape[row]
        if len(ranges) != len(shape) or any(a < 0 or b > n for (a, b), n in zip(ranges, shape, strict=True)):
            raise UsageError(f"{leaf.path}: the plan reads {ranges} of a chunk of shape {list(shape)}")
        self._jobs.setdefault(row, []).append(_Job(item, ranges, math.prod(item.lengths)))

    def _row(self, item: ReadItem, leaf: Leaf) -> int:
        """The stored row an item means: by the hint, or by its place."""
        stored, index = self._saved.stored, item.storage_index
        hint = index.index
        candidates = leaf.rows if hint is None or not 0 <= hint < len(leaf.rows) else [leaf.rows[hint]]
        wanted = None if index.offset is None else tuple(index.offset)
        for row in (*candidates, *leaf.rows):
            if wanted is None or stored.offsets(row) == wanted:
                return row
        raise UsageError(f"{leaf.path}: no chunk begins at {list(wanted or ())}")

    def spans(self) -> Iterator[Span]:
        """The bytes to read, none of them twice."""
        stored = self._saved.stored
        for row, jobs in self._jobs.items():
            size = itemsize(stored.dtype[row])
            found: list[Span] = []
            for job in jobs:
                begins = [a for a, _ in job.ranges]
                found += box_spans(row, stored.shape[row], begins, [b - a for a, b in job.ranges], size)
            yield from _joined(found)

    def fill(self, parts: Iterable[Part], block: torch.Tensor, touched: dict[str, None]) -> None:
        """Copy what a verified block holds to the targets; blocking, for a thread."""
        stored = self._saved.stored
        for row, first, nbytes, at in parts:
            dtype = BY_NAME[stored.dtype[row]]
            data = block[at : at + nbytes].view(dtype)
            begin = first // dtype.itemsize
            done = 0
            for index, count in boxes(stored.shape[row], begin, begin + data.numel()):
                place = [
                    _as_range(i, n)
                    for i, n in zip(_padded(index, stored.shape[row]), stored.shape[row], strict=True)
                ]
                box = data[done : done + count].view([b - a for a, b in place])
                for job in self._jobs[row]:
                    self._copy(job, place, box, touched)
                done += count

    def _copy(self, job: _Job, place: Sequence[Range], box: torch.Tensor, touched: dict[str, None]) -> None:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, job.ranges, strict=True)]
        if any(a >= b for a, b in common):
            return
        target = self._target(job)
        touched[job.item.dest_index.fqn] = None
        source = box[tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(common, place, strict=True))]
        out = target[tuple(slice(a - r, b - r) for (a, b), (r, _) in zip(common, job.ranges, strict=True))]
        with torch.inference_mode() if out.is_inference() else torch.no_grad():
            _copy_values(out, source)
        with self._lock:
            job.left -= source.numel()
            if not job.left:
                self._planner.commit_tensor(job.item, target)

    def _target(self, job: _Job) -> torch.Tensor:
        with self._lock:
            if job.target is None:
                target = self._planner.resolve_tensor(job.item)
                if target.size() != job.item.lengths:
                    raise UsageError(
                        f"{job.item.dest_index.fqn}: the planner's target has shape {list(target.shape)}, "
                        f"planned was {list(job.item.lengths)}"
                    )
                job.target = target.detach()
            return job.target

    def finish_empty(self) -> None:
        """Commit the items that have no elements; blocking, for a thread."""
        for jobs in self._jobs.values():
            for job in jobs:
                if not math.prod(job.item.lengths):
                    target = self._target(job)
                    with self._lock:
                        self._planner.commit_tensor(job.item, target)

    def memory(self, row: int, first: int, nbytes: int) -> memoryview:
        """Nothing is read without passing through a block."""
        raise NotImplementedError


def _joined(spans: list[Span]) -> Iterator[Span]:
    """The same bytes of one row, none twice."""
    last: Span | None = None
    for row, first, nbytes in sorted(spans):
        if last is not None and first <= last[1] + last[2]:
            last = (row, last[1], max(last[2], first + nbytes - last[1]))
            continue
        if last is not None:
            yield last
        last = (row, first, nbytes)
    if last is not None:
        yield last


def _padded(index: Sequence[slice | int], shape: Sequence[int]) -> Sequence[slice | int]:
    return [*index, *[slice(None)] * (len(shape) - len(index))]


def _as_range(index: slice | int, size: int) -> Range:
    if isinstance(index, int):
        return index, index + 1
    return index.start or 0, size if index.stop is None else index.stop


def _copy_values(out: torch.Tensor, source: torch.Tensor) -> None:
    if out.dtype == source.dtype and not out.is_conj() and not out.is_neg():
        out, source = bits(out), bits(source)  # torch cannot copy every dtype by itself
    out.copy_(source)
