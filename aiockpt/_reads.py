"""Wanted tensors to reads of whole pieces. Pure.

A piece can be verified only as a whole, so every read covers whole pieces, and only
those that hold wanted bytes. Pieces next to each other become one read of at most a
block. There are two kinds of reads, and each piece belongs to one kind:

* direct: each byte goes to the memory where it is to stay, which nobody has seen yet.
  Only where the piece is wholly wanted, by a few tensors of fresh host memory;
* staged: the bytes go to a block, are verified there and copied on to their targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ._manifest import PIECE_BYTES, ShardRecord, count_pieces
from ._table import TensorTable

MOST_BUFFERS: Final = 16
"""Tensors that a directly read piece may be spread over: beyond it, a copy is cheaper."""

__all__ = [
    "Part",
    "Run",
    "Span",
    "box_spans",
    "check_extents",
    "plan_reads",
    "plan_span_reads",
    "whole_shard",
]


Part = tuple[int, int, int, int]
"""Some bytes of one tensor within a run: (row of the table, first byte of the tensor's logical
content, bytes, first byte within the run). A plain tuple: the garbage collector forgets those."""


Span = tuple[int, int, int]
"""Wanted bytes: (row, first byte of its logical content, bytes)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One read: adjacent pieces of one shard."""

    shard: int
    offset: int
    """In the shard's data section; a multiple of a piece."""
    nbytes: int
    direct: bool
    """Whether the parts lie end to end and go straight to where they stay."""
    parts: list[Part]
    """The wanted bytes, in order."""

    def pieces(self) -> range:
        """Which of the shard's pieces the run is made of."""
        first = self.offset // PIECE_BYTES
        return range(first, first + count_pieces(self.nbytes))


@dataclass(slots=True)
class _Piece:
    index: int
    nbytes: int
    wanted: int
    direct: bool
    parts: list[Part]


def plan_reads(
    table: TensorTable,
    shards: Sequence[ShardRecord],
    wanted: Iterable[int],
    fresh: Collection[int],
    block_bytes: int,
) -> list[Run]:
    """Plan the reads for some rows, in file order.

    Args:
        table: the checkpoint's tensors, their extents checked.
        shards: the files they lie in.
        wanted: the rows, none of them tied; doubles are read once.
        fresh: those of them whose bytes may be read straight to where they stay.
        block_bytes: the most bytes of one read, a multiple of a piece.
    """
    return plan_span_reads(
        table, shards, ((row, 0, table.nbytes[row]) for row in set(wanted)), fresh, block_bytes
    )


def plan_span_reads(
    table: TensorTable,
    shards: Sequence[ShardRecord],
    spans: Iterable[Span],
    fresh: Collection[int],
    block_bytes: int,
) -> list[Run]:
    """As `plan_reads`, for some bytes of the rows only.

    Args:
        table: the checkpoint's tensors, their extents checked.
        shards: the files they lie in.
        spans: the bytes; none is wanted twice.
        fresh: rows whose bytes may be read straight to where they stay.
        block_bytes: the most bytes of one read, a multiple of a piece.
    """
    groups: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (table.shard[span[0]], table.begin[span[0]] + span[1])):
        if span[2]:
            groups.setdefault(table.shard[span[0]], []).append(span)
    runs: list[Run] = []
    for shard, group in groups.items():
        runs += _join(_pieces(table, shards[shard].nbytes, group, fresh), shard, block_bytes)
    return runs


def _pieces(table: TensorTable, size: int, spans: list[Span], fresh: Collection[int]) -> Iterator[_Piece]:
    """Every piece that holds bytes of the spans, in order."""
    piece: _Piece | None = None
    for row, first, length in spans:
        done, nbytes = first, first + length
        while done < nbytes:
            index, at = divmod(table.begin[row] + done, PIECE_BYTES)
            if piece is None or piece.index != index:
                if piece is not None:
                    yield _settled(piece)
                piece = _Piece(index, min(PIECE_BYTES, size - index * PIECE_BYTES), 0, True, [])
            take = min(nbytes - done, piece.nbytes - at)
            piece.parts.append((row, done, take, at))
            piece.wanted += take
            piece.direct = piece.direct and row in fresh
            done += take
    if piece is not None:
        yield _settled(piece)


def _settled(piece: _Piece) -> _Piece:
    piece.direct = piece.direct and piece.wanted == piece.nbytes and len(piece.parts) <= MOST_BUFFERS
    return piece


def _join(pieces: Iterable[_Piece], shard: int, most: int) -> Iterator[Run]:
    """Make runs of adjacent pieces of one kind."""
    run: Run | None = None
    for piece in pieces:
        offset = piece.index * PIECE_BYTES
        fits = run is not None and run.offset + run.nbytes == offset and run.direct == piece.direct
        if run is not None and not (fits and run.nbytes + piece.nbytes <= most):
            yield run
            run = None
        if run is None:
            run = Run(shard, offset, 0, piece.direct, [])
        at = run.nbytes
        for row, first, nbytes, begin in piece.parts:
            _append(run.parts, (row, first, nbytes, begin + at))
        run = Run(shard, run.offset, at + piece.nbytes, piece.direct, run.parts)
    if run is not None:
        yield run


def _append(parts: list[Part], part: Part) -> None:
    """Add a part, as one with the last where it goes on from there."""
    row, first, nbytes, _ = part
    if parts and parts[-1][0] == row and parts[-1][1] + parts[-1][2] == first:
        _, begin, before, at = parts[-1]
        parts[-1] = (row, begin, before + nbytes, at)
    else:
        parts.append(part)


def box_spans(
    row: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> Iterator[Span]:
    """The bytes of a row that hold a box of its elements; gaps shorter than a piece are read along.

    Args:
        row: of the table.
        shape: of the row.
        offsets: where the box begins.
        sizes: of the box.
        itemsize: bytes of one element.
    """
    if not all(sizes):
        return
    strides = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    # Dimensions whose steps are longer than a piece are walked, the rest is one span.
    outer = next((d for d, stride in enumerate(strides) if stride <= PIECE_BYTES), len(shape))
    begin = sum(at * stride for at, stride in zip(offsets[outer:], strides[outer:], strict=True))
    length = itemsize + sum((n - 1) * step for n, step in zip(sizes[outer:], strides[outer:], strict=True))
    walked = [range(at, at + n) for at, n in zip(offsets[:outer], sizes[:outer], strict=True)]
    for index in itertools.product(*walked):
        at = sum(i * stride for i, stride in zip(index, strides[:outer], strict=True))
        yield row, begin + at, length


def whole_shard(number: int, record: ShardRecord, block_bytes: int) -> Iterator[Run]:
    """The reads that touch every byte of a shard's data section, for verifying it."""
    for offset in range(0, record.nbytes, block_bytes):
        yield Run(number, offset, min(block_bytes, record.nbytes - offset), False, [])


def check_extents(table: TensorTable, shards: Sequence[ShardRecord]) -> tuple[int, str] | None:
    """Find a row whose bytes overlap another's or leave a hole before it.

    The format allows neither, and without this check a small file could claim any
    number of tensors of its whole length: memory would have no bound.

    Returns:
        (row or -1, what is wrong), or None.
    """
    ends = [0] * len(shards)
    for row in sorted(
        table.stored(), key=lambda row: (table.shard[row], table.begin[row], table.nbytes[row])
    ):
        shard = table.shard[row]
        if table.begin[row] != ends[shard]:
            return row, f"its bytes overlap others or leave a hole in {shards[shard].name[:80]!r}"
        ends[shard] += table.nbytes[row]
    for end, record in zip(ends, shards, strict=True):
        if end != record.nbytes:
            return -1, f"{record.name[:80]!r} holds bytes of no tensor"
    return None
